"""A torch with which the package was not tested is named once, at import."""

from vescale_testing import warnings_at_import


def test_another_torch_is_warned_of():
    (line,) = warnings_at_import("vescale.pipe", torch_version="2.15.0")
    assert line.startswith("expected torch 2.13 to 2.14, with which veScale is tested, got torch 2.15.0: ")
