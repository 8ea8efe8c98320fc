"""Small models that each do one thing with their rows, as model code of users does.

    x [rows, TOKENS, WIDTH]  ->  lift  ->  layer  ->  norm over rows, or none  ->  out  ->  loss

A case replaces the layer or the loss by a function, `(model, x)`. Its name is the function's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

__all__ = ["CASES", "TOKENS", "WIDTH", "Case", "layer", "loss"]

TOKENS, WIDTH = 5, 8
Code = Callable[["Small", Tensor], Tensor]
CASES: dict[str, Case] = {}


class Small(nn.Module):
    """A model of three layers around one case's code.

    Args:
        case: what it does.
        mixes_rows: whether statistics of all rows normalize the hidden values.
    """

    def __init__(self, case: Case, *, mixes_rows: bool):
        super().__init__()
        self.lift, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if mixes_rows else None
        self._case = case
        for name, make in case.state.items():
            made = make()
            if isinstance(made, nn.Module | nn.Parameter) or not isinstance(made, Tensor):
                setattr(self, name, made)
            else:
                self.register_buffer(name, made)
        if case.setup is not None:
            case.setup(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        if self._case.layer is not None:
            x = self._case.layer(self, x)
        if self.norm is not None:
            x = self.norm(x.flatten(0, 1)).view_as(x)
        y = self.out(x)
        return y.square().mean() if self._case.loss is None else self._case.loss(self, y)


@dataclass(frozen=True)
class Case:
    """One thing that a model does.

    Attributes:
        name: of the case.
        layer: the layer; None for none.
        loss: the loss; the mean of squares if None.
        state: modules, parameters, buffers and other attributes that the model has for it.
        setup: changes a new model.
    """

    name: str
    layer: Code | None = None
    loss: Code | None = None
    state: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    setup: Callable[[Small], object] | None = None

    def build(self, *, mixes_rows: bool) -> Small:
        """Return a new model, the same on every rank."""
        torch.manual_seed(0)
        return Small(self, mixes_rows=mixes_rows).double()


def layer(_setup: Callable[[Small], object] | None = None, **state: Callable[[], object]) -> Callable[[Code], Code]:
    """Make a case of a function that is the layer of a model."""
    return lambda code: _register(Case(code.__name__, layer=code, state=state, setup=_setup), code)


def loss(_setup: Callable[[Small], object] | None = None, **state: Callable[[], object]) -> Callable[[Code], Code]:
    """Make a case of a function that is the loss of a model."""
    return lambda code: _register(Case(code.__name__, loss=code, state=state, setup=_setup), code)


def _register(case: Case, code: Code) -> Code:
    assert case.name not in CASES, f"two cases are named {case.name}"
    CASES[case.name] = case
    return code
