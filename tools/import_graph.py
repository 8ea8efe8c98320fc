"""The graph of imports between the modules of one package, and its circles.

Every import counts: at the top of a file, inside a function, under ``TYPE_CHECKING``. An import inside a function only
postpones a circle, and a circle of types is still two files that cannot be read one after the other.

    from ._layout.boxes import Box     a -> package._layout.boxes
    from . import _torch               a -> package._torch

Text in, names out: nothing is imported.
"""

import ast
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

Graph = Mapping[str, Collection[str]]


def module_name(path: str) -> str:
    """Return the dotted name of a file below ``src``.

    >>> module_name("vescale/optim/ddp.py"), module_name("vescale/optim/__init__.py")
    ('vescale.optim.ddp', 'vescale.optim')
    """
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(modules: Mapping[str, str], packages: Collection[str]) -> dict[str, set[str]]:
    """Return for each module the modules of the same mapping that it imports, itself excluded.

    Args:
        modules: Dotted name and source text of each module.
        packages: Which of them are ``__init__.py`` files: their relative imports count from themselves.
    """
    graph = {}
    for name, text in modules.items():
        found = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node, name, is_package=name in packages)
                # `from a import b` imports module a.b where there is one, and module a otherwise
                found |= {full if (full := f"{base}.{alias.name}") in modules else base for alias in node.names}
        graph[name] = (found & set(modules)) - {name}
    return graph


def _absolute(node: ast.ImportFrom, importer: str, *, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = importer.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Return the strongly connected components with more than one module, each sorted.

    Two modules are in the same component if each reaches the other.

        >>> circles({"a": ["b"], "b": ["c"], "c": ["b"]})
        [('b', 'c')]
    """
    reached = {start: _reachable(graph, start) for start in graph}
    components = {tuple(sorted({a, *(b for b in reached[a] if a in reached[b])})) for a in graph}
    return sorted(component for component in components if len(component) > 1)


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        new = set(graph[pending.pop()]) - found
        found |= new
        pending += new
    return found


def function_imports(text: str) -> list[tuple[int, str]]:
    """Return line and text of each import inside a function.

    >>> function_imports("def f():\\n    import json")
    [(2, 'import json')]
    """
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    found = {node for f in functions for node in ast.walk(f) if isinstance(node, ast.Import | ast.ImportFrom)}
    return sorted((node.lineno, ast.unparse(node)) for node in found)
