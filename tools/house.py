"""Count what the repository is made of, and compare the counts with an earlier revision.

    python tools/house.py                    # counts of the working tree
    python tools/house.py --against v0.1     # the same beside those of a revision: before -> after

A row per distribution: source files and lines, test files and lines, test files that import a private module of ours,
source files above 500 lines, functions above 100 lines, import circles. Lines are physical lines, comments included.
The composed suites of ``tests/`` are one more row. `python tools/house.py --list` names what the last four count.
"""

import argparse
import ast
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from import_graph import circles, imports_of, module_name
from projects import ROOT

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 100
SUITES = "tests"  # the name of the row that counts tests/


@dataclass(frozen=True)
class Counts:
    """What one distribution is made of. Names are relative to the root."""

    source_files: int
    source_lines: int
    test_files: int
    test_lines: int
    private_tests: tuple[str, ...]
    long_files: tuple[str, ...]
    long_functions: tuple[str, ...]
    circles: tuple[str, ...]


def working_tree(root: Path = ROOT) -> dict[str, str]:
    """Return path and text of every Python file below ``packages``, ``testing`` and ``tests``."""
    places = ("packages/*/src", "packages/*/tests", "testing/src", "testing/tests", "tests")
    paths = [path for place in places for folder in root.glob(place) for path in folder.rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in sorted(paths)}


def revision_tree(revision: str, root: Path = ROOT) -> dict[str, str]:
    """Return the same of a git revision, read from the object store; the working tree is left alone."""
    names = _git(root, "ls-tree", "-r", "--name-only", "-z", revision).decode().split("\0")
    wanted = [name for name in names if _is_counted(name)]
    request = "".join(f"{revision}:{name}\n" for name in wanted).encode()
    answer = _git(root, "cat-file", "--batch", input=request)
    texts, start = {}, 0
    for name in wanted:  # each answer: "<hash> blob <size>\n<contents>\n"
        end = answer.index(b"\n", start)
        size = int(answer[start:end].split()[-1])
        texts[name] = answer[end + 1 : end + 1 + size].decode()
        start = end + size + 2
    return texts


def _is_counted(name: str) -> bool:
    parts = name.split("/")
    below = parts[2:3] if parts[0] == "packages" else parts[1:2]
    return name.endswith(".py") and (parts[0] == "tests" or (parts[0] in ("packages", "testing") and below[0] in KINDS))


KINDS = ("src", "tests")


def _git(root: Path, *arguments: str, **options: bytes) -> bytes:
    return subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True, **options).stdout


def count(files: Mapping[str, str]) -> dict[str, Counts]:
    """Return the counts of each distribution, by name, and of the composed suites.

    Args:
        files: Path relative to the root and text of each Python file.
    """
    distributions = sorted({_distribution(name) for name in files})
    return {each: _count_one({n: t for n, t in files.items() if _distribution(n) == each}) for each in distributions}


def _distribution(name: str) -> str:
    first, second = name.split("/")[:2]
    return second if first == "packages" else {"testing": "vescale-testing"}.get(first, SUITES)


def _count_one(files: Mapping[str, str]) -> Counts:
    source = {name: text for name, text in files.items() if "/src/" in name}
    tests = {name: text for name, text in files.items() if name not in source}
    modules = {module_name(name.split("/src/")[1]): text for name, text in source.items()}
    packages = {module_name(name.split("/src/")[1]) for name in source if name.endswith("/__init__.py")}
    return Counts(
        source_files=len(source),
        source_lines=_num_lines(source.values()),
        test_files=len(tests),
        test_lines=_num_lines(tests.values()),
        private_tests=tuple(name for name, text in tests.items() if imports_private_module(text)),
        long_files=tuple(name for name, text in source.items() if _num_lines([text]) > MAX_FILE_LINES),
        long_functions=tuple(f"{n}:{function}" for n, text in source.items() for function in long_functions(text)),
        circles=tuple(" ".join(circle) for circle in circles(imports_of(modules, packages))),
    )


def _num_lines(texts: Iterable[str]) -> int:
    return sum(text.count("\n") for text in texts)


def imports_private_module(text: str) -> bool:
    """Return whether a file imports a module of ours with a leading underscore in its dotted name.

    >>> imports_private_module("from vescale.optim._norm import exact")
    True
    """
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    ours = [name.split(".") for name in names if name.split(".")[0] in ("vescale", "vescale_testing")]
    return any(part.startswith("_") and not part.startswith("__") for name in ours for part in name)


def long_functions(text: str, limit: int = MAX_FUNCTION_LINES) -> list[str]:
    """Return the names of the functions with more than ``limit`` lines, signature and docstring included."""
    return [
        node.name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= limit
    ]


def table(after: Mapping[str, Counts], before: Mapping[str, Counts] | None = None) -> str:
    """Return the counts as a Markdown table, with those of an earlier revision where given: ``before -> after``."""
    titles = [field.name.replace("_", " ") for field in fields(Counts)]
    rows = [["distribution", *titles]]
    for name in sorted({*after, *(before or ())}):
        rows.append([name, *_cells(after.get(name), before and before.get(name), before is not None)])
    rows.append(["all", *_cells(_total(after), before and _total(before), before is not None)])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _cells(after: Counts | None, before: Counts | None, compared: bool) -> list[str]:
    columns: list[Callable[[Counts | None], str]] = [
        lambda counts, name=field.name: _number(counts, name) for field in fields(Counts)
    ]
    if not compared:
        return [column(after) for column in columns]
    return [old if old == new else f"{old} -> {new}" for old, new in ((c(before), c(after)) for c in columns)]


def _number(counts: Counts | None, name: str) -> str:
    value = getattr(counts, name, 0)
    return f"{value if isinstance(value, int) else len(value):,}"


def _total(rows: Mapping[str, Counts]) -> Counts:
    def add(name: str) -> int | tuple[str, ...]:
        values = [getattr(row, name) for row in rows.values()]
        return sum(values) if isinstance(values[0], int) else tuple(v for value in values for v in value)

    return Counts(**{field.name: add(field.name) for field in fields(Counts)})


def main(arguments: list[str]) -> None:
    """Print the table, and with ``--list`` the names behind the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--against", metavar="REVISION", help="a git revision to compare with")
    parser.add_argument("--list", action="store_true", help="name files, functions and circles, too")
    options = parser.parse_args(arguments)
    after = count(working_tree())
    print(table(after, count(revision_tree(options.against)) if options.against else None))
    if options.list:
        total = _total(after)
        for field in fields(Counts):
            names = getattr(total, field.name)
            if isinstance(names, tuple):
                print(f"\n{field.name.replace('_', ' ')}:", *names or ("none",), sep="\n  ")


if __name__ == "__main__":
    main(sys.argv[1:])
