"""Rows of a patch are put in place together and restored exactly."""

import pytest
from torch import nn

from vescale.dmodule._execution.patch import ModulePatch, attribute_rows


def test_restores_values_absent_keys_and_order():
    owner = {"a": 1, "b": 2}
    patch = ModulePatch([(owner, "b", 20), (owner, "c", 30), (owner, "a", None)])
    assert len(patch) == 3
    patch.apply()
    assert owner == {"a": None, "b": 20, "c": 30}
    patch.restore()
    assert list(owner.items()) == [("a", 1), ("b", 2)]


def test_values_that_are_none_are_not_absent():
    owner = {"a": None}
    with ModulePatch([(owner, "a", 1)]):
        assert owner == {"a": 1}
    assert owner == {"a": None}


def test_a_key_that_is_removed_meanwhile_comes_back_and_an_added_one_stays_away():
    owner = {"a": 1}
    with ModulePatch([(owner, "a", 2), (owner, "b", 3)]):
        owner.clear()
    assert owner == {"a": 1}


def test_nests_like_brackets_and_within_itself():
    owner = {"a": 1}
    outer, inner = ModulePatch([(owner, "a", 2)]), ModulePatch([(owner, "a", 3), (owner, "b", 4)])
    with outer, inner:
        assert owner == {"a": 3, "b": 4}
        with outer:
            assert owner == {"a": 2, "b": 4}
        assert owner == {"a": 3, "b": 4}
    assert owner == {"a": 1}


def test_of_two_rows_with_one_key_the_last_shows():
    owner = {"a": 1}
    with ModulePatch([(owner, "a", 2), (owner, "a", 3)]):
        assert owner == {"a": 3}
    assert owner == {"a": 1}


class Refusing(dict):
    """A table that refuses one value."""

    def __setitem__(self, key, value):
        if value == "refused":
            raise KeyError(key)
        super().__setitem__(key, value)


def test_an_exception_half_way_restores_what_was_set():
    first, second, third = {"a": 1}, Refusing(b=2), {}
    patch = ModulePatch([(first, "a", 10), (second, "b", "refused"), (third, "c", 30)])
    with pytest.raises(KeyError):
        patch.apply()
    assert (first, dict(second), third) == ({"a": 1}, {"b": 2}, {})
    second.__class__ = Refusing
    with pytest.raises(IndexError):
        patch.restore()  # nothing is applied


def test_adds_only():
    owner = {"a": 1}
    assert ModulePatch([(owner, "b", 1)]).adds_only()
    assert not ModulePatch([(owner, "b", 1), (owner, "a", 1)]).adds_only()


def test_attribute_rows_copy_objects_on_the_way():
    class Config:
        heads, width = 4, 8

    module = nn.Module()
    module.config = shared = Config()
    with ModulePatch(attribute_rows(module, {"config.heads": 2, "scale": 3.0})):
        assert (module.config.heads, module.config.width, module.scale) == (2, 8, 3.0)
        assert shared.heads == 4
    assert module.config is shared
    assert not hasattr(module, "scale")
