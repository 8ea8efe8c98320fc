"""The check of an environment fails loudly for what is missing, undeclared, or from somewhere else.

It runs here in an interpreter without site-packages, so that what is installed beside pytest plays no part.
"""

import os
import subprocess
import sys

import pytest
from projects import ROOT


def check(*expected: str, path: str = "") -> tuple[int, str]:
    """Run the tool in a bare interpreter; return its exit status and what it printed."""
    done = subprocess.run(
        [sys.executable, "-S", ROOT / "tools" / "check_environment.py", *expected],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture
def source_tree(tmp_path):
    """A folder with one portion of the namespace, as a source tree that leaks into an environment."""
    portion = tmp_path / "vescale" / "pipe"
    portion.mkdir(parents=True)
    (portion / "__init__.py").touch()
    return str(tmp_path)


def test_nothing_expected_and_nothing_there():
    assert check()[0] == 0


def test_a_missing_distribution_is_named():
    status, output = check("vescale-ckpt")
    assert status == 1
    assert "vescale-ckpt should be installed and is not" in output
    assert "vescale.ckpt cannot be imported" in output


def test_a_portion_from_a_source_tree_is_not_the_environments(source_tree):
    status, output = check("vescale-pipe", path=source_tree)
    assert status == 1
    assert f"vescale.pipe comes from {source_tree}" in output


def test_an_undeclared_sibling_is_named(source_tree):
    status, output = check(path=source_tree)
    assert status == 1
    assert "vescale.pipe can be imported from" in output
    assert "although vescale-pipe is not declared" in output


def test_an_unknown_name_is_refused():
    status, output = check("vescale-pip")
    assert status == 1
    assert "no such distribution here: vescale-pip; there are: vescale, vescale-ckpt" in output
