"""Tiny models of families that no plan knows train as on one device; `zoo` has all families and all cases."""

import functools
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
zoo = importlib.import_module("zoo")
sys.path.pop(0)

# one of each kind: scans, experts with a router's loss, ALiBi, an encoder, an encoder with a decoder
FAMILIES = ("mamba", "mixtral", "bloom", "bert", "mt5")


@pytest.mark.parametrize("family", FAMILIES)
def test_in_both_modes(family):
    found = zoo.run_family(family, ["dp 2 eager", "dp 2 static", "tp 2 eager", "tp 2 static"])
    assert found == dict.fromkeys(found, ("right", ""))


def test_rows_that_the_ranks_do_not_share_evenly():
    for family in ("mamba", "bert"):
        assert zoo.run_family(family, ["dp 3 static"]) == {"dp 3 static": ("right", "")}


def test_rows_of_each_rank_under_ddp():
    for family in ("bert", "mixtral"):
        assert zoo.run_family(family, ["ddp 2"]) == {"ddp 2": ("right", "")}


def test_micro_batches_are_parts_of_a_batch():
    for family, kind in (("bert", "right"), ("bloom", "right"), ("mixtral", "refused")):  # the loss of a router
        assert zoo.run_family(family, ["parts"])["parts"][0] == kind, family


def test_stages_of_a_pipeline():
    """Heads tied to embeddings, an embedding of encoder and decoder, the dtype of a weight, a router's loss, images."""
    for family in ("mamba", "t5", "gpt2", "bert", "mixtral", "vit"):
        found = zoo.run_family(family, ["pp 2", "pp 2 V"])
        assert found == dict.fromkeys(found, ("right", "")), family


def test_ranks_that_are_worlds_of_their_own(monkeypatch):
    """A router's loss is no mean over rows."""
    monkeypatch.setattr(zoo, "DDP", functools.partial(zoo.DDP, per_rank=True))
    told = []
    assert zoo.main(["--families", "mixtral", "--cases", "ddp 2"], told.append) == 1
    assert told[-1] == "ddp 2: 0 right, 0 refused, 0 obscure, 1 wrong, 0 hang, 0 died"
    assert told[0].startswith("mixtral, ddp 2: wrong: ")
