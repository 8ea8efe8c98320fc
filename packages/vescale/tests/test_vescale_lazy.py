"""`import vescale` is cheap and complete: no torch, no part, every name there when it is used."""

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

import vescale


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_import_loads_no_torch_and_no_part():
    code = "import sys, vescale; print('torch' in sys.modules, [m for m in sys.modules if m.startswith('vescale.')])"
    assert run_python(code) == "False []"


def test_a_name_loads_only_what_it_needs():
    code = "import sys, vescale; vescale.Plan; print('vescale.plan' in sys.modules, 'vescale.optim' in sys.modules)"
    assert run_python(code) == "True False"


@pytest.mark.parametrize("name", vescale.__all__)
def test_every_public_name_is_there(name):
    assert getattr(vescale, name) is getattr(vescale, name)
    assert name in dir(vescale)


def test_names_are_those_of_the_parts():
    for name, home in vescale._HOMES.items():
        assert getattr(vescale, name) is getattr(importlib.import_module(home), name)
    assert vescale.checkpoint.save is vescale.save
    assert vescale.checkpoint.load is vescale.load


@pytest.mark.parametrize("part", ["ckpt", "dmodule", "dtensor", "optim", "pipe", "plan"])
def test_every_error_of_a_part_is_there(part):
    module = importlib.import_module(f"vescale.{part}")
    for name in module.__all__:
        kind = getattr(module, name)
        if isinstance(kind, type) and issubclass(kind, Exception):
            assert getattr(vescale, name) is kind


def test_star_import_and_unknown_name():
    assert (
        run_python("from vescale import *; print(Plan(dp=2).world_size, checkpoint.__name__)") == "2 vescale.checkpoint"
    )
    with pytest.raises(
        AttributeError, match="module 'vescale' has no attribute 'paralelize'; it has CheckpointError, Cluster"
    ):
        vescale.paralelize  # noqa: B018


def test_version_is_that_of_the_distribution():
    try:
        installed = importlib.metadata.version("vescale")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vescale runs from its source tree: there is no distribution to compare with")
    assert vescale.__version__ == installed
