"""Packages import what the architecture allows and what they declare, nothing else.

The table below is the architecture: arrows between packages only as listed. Everything here reads syntax trees.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
from projects import ROOT, dependencies, read_projects, requirement_name

ALLOWED_SIBLINGS = {
    "vescale-ckpt": set(),
    "vescale-dmodule": {"vescale-dtensor"},
    "vescale-dtensor": set(),
    "vescale-optim": {"vescale-dmodule", "vescale-dtensor"},
    "vescale-pipe": set(),
    "vescale-plan": set(),
    "vescale": {
        "vescale-ckpt",
        "vescale-dmodule",
        "vescale-dtensor",
        "vescale-optim",
        "vescale-pipe",
        "vescale-plan",
    },
}
PROJECTS = read_projects()
_DISTRIBUTIONS = {"upath": "universal-pathlib", "yaml": "pyyaml"}  # whose modules have another name


def imported(path: Path, *, inside_functions: bool = True) -> list[tuple[int, str]]:
    """Return the line and the dotted name of every absolute import, `from a import b` as `a.b`.

    A test that is skipped where a library is missing imports it, too: in a unit session it would never run.
    """
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.importorskip":
            found.append((node.lineno, ast.literal_eval(node.args[0])))
    return found


def owner(dotted: str) -> str:
    """Return the distribution that a dotted import name belongs to."""
    parts = dotted.split(".")
    if parts[0] == "vescale" and len(parts) > 1 and f"vescale-{parts[1]}" in PROJECTS:
        return f"vescale-{parts[1]}"
    return _DISTRIBUTIONS.get(parts[0], requirement_name(parts[0]))


def undeclared(paths: list[Path], allowed: set[str], **options: bool) -> list[str]:
    """Return a sentence for every import in ``paths`` of a distribution outside of ``allowed``."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}, which belongs to {owner(name)}"
        for path in paths
        for line, name in imported(path, **options)
        if name.split(".")[0] not in sys.stdlib_module_names and owner(name) not in allowed
    ]


def test_the_table_names_every_package():
    assert set(ALLOWED_SIBLINGS) == set(PROJECTS)


@pytest.mark.parametrize("name", PROJECTS)
def test_declared_siblings_are_the_tables(name):
    assert PROJECTS[name].siblings == ALLOWED_SIBLINGS[name]


@pytest.mark.parametrize("name", PROJECTS)
def test_source_imports_only_what_is_declared(name):
    project = PROJECTS[name]
    allowed = {name, *project.siblings, *map(requirement_name, project.requirements)}
    if name == "vescale":
        allowed.add("torch")  # every part brings it
    paths = sorted(project.folder.glob("src/**/*.py"))
    assert undeclared(paths, allowed, inside_functions=False) == []
    # what an extra brings may be imported where it is used
    assert undeclared(paths, allowed | set(map(requirement_name, project.optional_requirements))) == []


@pytest.mark.parametrize("name", PROJECTS)
def test_tests_import_only_what_a_unit_session_installs(name):
    project = PROJECTS[name]
    family = [project, *(PROJECTS[sibling] for sibling in dependencies(PROJECTS, name))]
    requirements = [r for member in family for r in member.requirements]
    allowed = {member.name for member in family} | {"vescale-testing", "torch"}
    allowed |= set(map(requirement_name, [*requirements, *project.test_requirements]))
    helpers = {requirement_name(path.stem) for path in project.folder.glob("tests/**/*.py")}
    assert undeclared(sorted(project.folder.glob("tests/**/*.py")), allowed | helpers) == []


def test_an_undeclared_import_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text("import os\nimport torch.nn\nfrom vescale.dtensor import Shard\nfrom vescale import dmodule\n")
    found = undeclared([path], {"torch", "vescale-dtensor"})
    assert found == ["module.py:4 imports vescale.dmodule, which belongs to vescale-dmodule"]


def private_torch_names(path: Path) -> list[str]:
    """Return the private torch names that a file imports."""
    return [
        f"{path.name}:{line} {name}"
        for line, name in imported(path)
        if name.startswith("torch.") and re.search(r"\._(?!_)", name)
    ]


# Private attributes of torch's tensors, operators and modules that no class of ours has.
PRIVATE_ATTRIBUTES = (
    "_backward_hooks",
    "_buffers",
    "_cdata",
    "_local_tensor",
    "_op_dispatcher",
    "_overloadpacket",
    "_parameters",
    "_schema",
)


def private_torch_attributes(path: Path) -> list[str]:
    """Return the private attributes of torch's modules and objects that a file reads. Names of operators are public."""
    return [
        f"{path.name}:{node.lineno} {text}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "self")
        for text in [ast.unparse(node)]
        if node.attr in PRIVATE_ATTRIBUTES
        or (re.match(r"(torch|dist)\.(.*\.)?_(?!_)\w+$", text) and not text.startswith("torch.ops."))
    ]


@pytest.mark.parametrize("name", PROJECTS)
def test_private_torch_names_stay_in_one_file(name):
    paths = PROJECTS[name].folder.glob("src/**/*.py")
    assert [
        found
        for path in paths
        if "_torch" not in (path.stem, path.parent.name)
        for found in (*private_torch_names(path), *private_torch_attributes(path))
    ] == []


def test_a_private_torch_name_is_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("from torch.utils._pytree import tree_map\nfrom torch import __version__\n")
    assert private_torch_names(path) == ["module.py:1 torch.utils._pytree.tree_map"]
    path.write_text("import torch\ntorch._C\nop._schema\nself._schema\ntorch.ops.aten._softmax\ntorch.utils.data\n")
    assert private_torch_attributes(path) == ["module.py:2 torch._C", "module.py:3 op._schema"]


# Collectives of Python objects and Tensor.numpy() fail without numpy, which torch does not declare.
NEEDS_NUMPY = re.compile(r"(gather|scatter|broadcast)\w*_object\(|object_list\(|(?<!def )\bnumpy\(")


@pytest.mark.parametrize("name", PROJECTS)
def test_numpy_is_declared_where_torch_needs_it(name):
    project = PROJECTS[name]
    family = [project, *(PROJECTS[sibling] for sibling in dependencies(PROJECTS, name))]
    declared = {requirement_name(r) for member in family for r in member.requirements}
    users = [path.name for path in project.folder.glob("src/**/*.py") if NEEDS_NUMPY.search(path.read_text())]
    assert not users or "numpy" in declared, f"{name} must declare numpy for {users}"


@pytest.mark.parametrize("line", ["dist.all_gather_object(a, b)", "dist.scatter_object_list(a, b)", "state.numpy()"])
def test_a_use_of_numpy_through_torch_is_found(line):
    assert NEEDS_NUMPY.search(line)
    assert not NEEDS_NUMPY.search("def numpy(self): ...")
