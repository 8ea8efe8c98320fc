"""The reference can be built, and reports what is missing from it."""

import types

import pytest

pytest.importorskip("pdoc")

import api_site
from projects import read_projects


def test_every_package_has_a_page_and_every_public_name_a_docstring(tmp_path):
    packages = [project.module for project in read_projects().values()]
    modules, problems = api_site.build(tmp_path, packages)
    assert problems == []
    assert set(packages) <= set(modules)
    page = (tmp_path / "vescale" / "optim.html").read_text(encoding="utf-8")
    assert "DistributedOptimizer" in page
    assert "Wrap a module for data parallelism" in page


def test_a_public_name_without_docstring_is_found(monkeypatch):
    module = types.ModuleType("vescale.fake", "A module.")

    def forgotten(): ...

    forgotten.__module__ = "vescale.fake"
    module.forgotten, module.__all__ = forgotten, ["forgotten"]
    monkeypatch.setattr(api_site.importlib, "import_module", lambda _: module)
    assert api_site.undocumented("vescale.fake") == ["vescale.fake.forgotten"]


def test_a_warning_about_a_name_of_torch_is_left_out():
    assert not api_site.concerns_ours("Error parsing type annotation for vescale.dtensor.DeviceMesh.from_group.")
    assert api_site.concerns_ours("Error parsing type annotation for vescale.optim.DDP.forward.")
    assert api_site.concerns_ours("something else")
