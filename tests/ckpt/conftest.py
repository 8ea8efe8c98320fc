"""A training that is saved in one layout goes on in another as if nothing had happened."""

import pytest
import torch

from vescale import checkpoint
from vescale_testing import gather_state


def _values(model, optimizer):
    """Return the whole values of a module's state, and of its optimizer's."""
    with model.unsharded():
        params = {fqn: value.clone() for fqn, value in model.state_dict().items()}
    return params, gather_state(optimizer.state_dict()["state"])


def _step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def take_step():
    """`take_step(model, optimizer, x)`."""
    return _step


@pytest.fixture
def goes_on_alike(tmp_path):
    """`goes_on_alike(build, batch, layouts, others)`, on every rank: for each layout, in the folder of its number.

    A model is built in it, trained for a step, saved, and trained for three more. What is loaded into each layout of
    `others(number)` and trained for these steps is then the same, bit for bit. Returns the last values.
    """

    def check(build, batch, layouts, others):
        for number, layout in enumerate(layouts):
            trained = build(1, layout)
            _step(*trained, batch(1))
            checkpoint.save(tmp_path / str(number), dict(zip(("model", "optimizer"), trained, strict=True)))
            for seed in (2, 3, 4):
                _step(*trained, batch(seed))
            params, state = _values(*trained)
            for other in others(number):
                loaded = build(2, other)
                checkpoint.load(tmp_path / str(number), dict(zip(("model", "optimizer"), loaded, strict=True)))
                for seed in (2, 3, 4):
                    _step(*loaded, batch(seed))
                its_params, its_state = _values(*loaded)
                for fqn, value in params.items():
                    assert torch.equal(its_params[fqn], value), (layout, other, fqn)
                for fqn, entries in state.items():
                    for name, value in entries.items():
                        assert torch.equal(its_state[fqn][name], value), (layout, other, fqn, name)
        return params, state

    return check
