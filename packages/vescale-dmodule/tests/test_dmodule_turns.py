"""Of the modes of nested modules, the innermost alone sees the functions that are called."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from vescale.dmodule._static.operator_mode import Turn, active_mode, inactive


class Seeing(TorchFunctionMode):
    def __init__(self, name, seen):
        super().__init__()
        self.name, self.seen = name, seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(self.name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def seen():
    return []


def seen_by(seen):
    seen.clear()
    torch.zeros(1)
    return list(seen)


def test_the_innermost_sees_alone(seen):
    outer = Turn(Seeing("outer", seen))
    assert seen_by(seen) == ["outer"]
    inner = Turn(Seeing("inner", seen))
    assert seen_by(seen) == ["inner"]
    with inactive():
        assert seen_by(seen) == []
        assert active_mode() is None
    assert seen_by(seen) == ["inner"]
    inner.end()
    assert seen_by(seen) == ["outer"]
    outer.end()
    assert seen_by(seen) == []
    assert active_mode() is None


def test_modes_of_the_program_see_all(seen):
    outer = Turn(Seeing("outer", seen))
    with Seeing("program", seen):
        inner = Turn(Seeing("inner", seen))
        assert seen_by(seen) == ["inner", "program", "outer"]
        inner.end()
        assert seen_by(seen) == ["program", "outer"]
    outer.end()
    assert seen_by(seen) == []


def test_turns_that_an_error_has_left_end_in_any_order(seen):
    with Seeing("program", seen):
        turns = [Turn(Seeing(name, seen)) for name in ("first", "second", "third")]
        for turn in (turns[1], turns[2], turns[0], turns[1]):
            turn.end()
        assert seen_by(seen) == ["program"]
    assert seen_by(seen) == []
    assert active_mode() is None
