"""An optimizer is a class, a partial, any function of the parameters, or Muon for matrices with AdamW for the rest."""

import functools
import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import vescale
from vescale import MuonWithAdamW, Plan
from vescale_testing import ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("fields_training")
sys.path.pop(0)
adamw, build, parallelize, train, train_plain = (
    training.adamw,
    training.build,
    training.parallelize,
    training.train,
    training.train_plain,
)


def make(lr, params, weight_decay=0.0):
    return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay)


def groups(params):
    matrices, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.2}, {"params": others}], lr=0.02)


FUNCTIONS = {
    "a class": torch.optim.Adam,
    "a partial": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "a partial with positional arguments": functools.partial(make, 0.02, weight_decay=0.1),
    "a function": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "a function that makes groups": groups,
}
LAYOUTS = [{"dp": 2, "zero": 2}, {"tp": 2}, {"pp": 2, "num_microbatches": 2}, {"dp": 2, "zero": 3}]


def words(value):
    return " ".join(f"{name}={each}" for name, each in value.items()) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_training_is_that_of_one_process(kind):
    one = build()
    expected = train_plain(one, FUNCTIONS[kind](list(one.parameters())))

    @ranks(2)
    def on_every_rank():
        for fields in LAYOUTS:
            model, optimizer = parallelize(Plan(**fields), build(), FUNCTIONS[kind])
            assert train(model, optimizer).difference(expected) < 1e-10, fields

    on_every_rank()


@pytest.mark.parametrize("fields", LAYOUTS, ids=words)
def test_muon_for_matrices(fields):
    one = build()
    muon = vescale.optim.Muon(
        one.named_parameters(), lr=0.02, adamw_lr=1e-3, adamw=[r"embed\.weight", r"head\.weight"], weight_decay=0.01
    )
    expected = train_plain(one, muon)

    @ranks(2)
    def on_every_rank():
        chosen = MuonWithAdamW(lr=0.02, adamw_lr=1e-3, options={"weight_decay": 0.01})
        model, optimizer = parallelize(Plan(**fields), build(), chosen)
        assert train(model, optimizer).difference(expected) < 1e-6  # its iteration is in bfloat16
        assert train(*parallelize(Plan(**fields), build(), adamw)).difference(expected) > 1e-3

    on_every_rank()


def test_which_matrices_are_adamws():
    model = build()
    assert MuonWithAdamW(lr=0.1, adamw_lr=0.1).names(model) == ["embed.weight", "head.weight"]
    more = MuonWithAdamW(lr=0.1, adamw_lr=0.1, adamw=(r"layers\.0\..*",))
    assert more.names(model)[:3] == ["embed.weight", "layers.0.up.weight", "layers.0.up.bias"]
    model.head = nn.Linear(8, 2)
    assert MuonWithAdamW(lr=0.1, adamw_lr=0.1).names(model) == ["embed.weight"]
    with pytest.raises(ValueError, match=r"names of parameters in adamw, got 'tail', which matches none of Net"):
        MuonWithAdamW(lr=0.1, adamw_lr=0.1, adamw=("tail",)).names(model)
