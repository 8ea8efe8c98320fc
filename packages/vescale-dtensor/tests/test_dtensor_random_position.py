"""The position of the random streams says whether anybody has drawn."""

import pytest
import torch
from torch import nn

from vescale.dtensor import extension, random


def draw_and_restore():
    with torch.random.fork_rng():
        torch.rand(3)


DRAWS = {
    "function": lambda: nn.functional.dropout(torch.ones(3), 0.5),
    "one number": lambda: torch.rand(()),
    "permutation": lambda: torch.randperm(10_000),
    "seed": lambda: torch.manual_seed(4),
    "code of C++": lambda: torch.jit.script(nn.Dropout(0.5))(torch.ones(3)),
}
OTHERS = {
    "nothing": lambda: None,
    "computation": lambda: torch.ones(3).cos(),
    "dropout in evaluation": lambda: nn.functional.dropout(torch.ones(3), 0.5, training=False),
    "restored": draw_and_restore,
    "another generator": lambda: torch.rand(3, generator=torch.Generator()),
}


@pytest.mark.parametrize("stream", ["torch", "philox"])
def test_draws_move_it_and_nothing_else_does(stream):
    with random.stream(stream, seed=3):
        for name, function in (DRAWS | OTHERS).items():
            before = extension.random_position()
            function()
            assert (extension.random_position() == before) == (name in OTHERS), name


def test_it_equals_positions_only():
    assert extension.random_position() != torch.get_rng_state().tolist()
    with pytest.raises(TypeError, match="unhashable"):
        hash(extension.random_position())
