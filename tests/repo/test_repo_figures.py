"""The committed figures are what their script draws."""

import importlib.util

from projects import ROOT

FOLDER = ROOT / "docs" / "figures"


def test_figures_are_up_to_date():
    spec = importlib.util.spec_from_file_location("figures", FOLDER / "make.py")
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    stale = [name for name, draw in make.FIGURES.items() if (FOLDER / name).read_text(encoding="utf-8") != draw()]
    assert stale == [], "run: python docs/figures/make.py"
