"""The examples in the docstrings of the public functions run."""

import doctest

import pytest
import torch

import vescale.ckpt as ckpt


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    "function",
    [
        *(ckpt.save, ckpt.load, ckpt.read_manifest, ckpt.verify, ckpt.diff, ckpt.PerRank, ckpt.Layout, ckpt.wait),
        *(ckpt.load_dcp, ckpt.save_dcp, ckpt.load_hf, ckpt.save_hf, ckpt.WeightRule),
    ],
    ids=lambda f: f.__name__,
)
def test_the_example_of_a_public_function_runs(function, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, **{name: getattr(ckpt, name) for name in ckpt.__all__}}
    (example,) = doctest.DocTestFinder(recurse=False).find(function, function.__name__, globs=names)
    result = doctest.DocTestRunner().run(example)
    assert result.attempted > 0
    assert result.failed == 0
