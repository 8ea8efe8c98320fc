"""All packages together name a torch with which they were not tested once."""

from vescale_testing import warnings_at_import

PACKAGES = ("vescale.plan", "vescale.dtensor", "vescale.dmodule", "vescale.optim", "vescale.pipe", "vescale.ckpt")


def test_one_warning():
    assert len(warnings_at_import(*PACKAGES, torch_version="2.15.0")) == 1
