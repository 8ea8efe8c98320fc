"""A torch with which the package was not tested is named once, at import."""

import pytest

from vescale_testing import warnings_at_import


@pytest.mark.parametrize("version", ["2.12.1", "3.0.0a0+git1234567"])
def test_another_torch_is_warned_of(version):
    (line,) = warnings_at_import("vescale.dtensor", torch_version=version)
    assert line.startswith(f"expected torch 2.13 to 2.14, with which veScale is tested, got torch {version}: ")


def test_a_tested_torch_is_not():
    assert warnings_at_import("vescale.dtensor", torch_version="2.14.7") == []
