"""The global batch is cut into slices that together are the batch; what cannot be cut equally is refused."""

import itertools

import pytest
import torch

from vescale._batch import slice_batch


def test_slices_are_the_batch_in_order():
    batch = {
        "x": torch.arange(24).view(12, 2),
        "y": torch.arange(12),
        "scale": torch.tensor(3.0),
        "flag": True,
        "no": None,
    }
    for dp in (1, 2, 3, 4, 6, 12):
        parts = [slice_batch(batch, coord=coord, dp=dp) for coord in range(dp)]
        for name in ("x", "y"):
            assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
        for part, name in itertools.product(parts, ("scale", "flag", "no")):
            assert part[name] is batch[name]


def test_slices_share_memory_with_the_batch():
    batch = {"x": torch.zeros(4, 2)}
    slice_batch(batch, coord=1, dp=2)["x"].fill_(1.0)
    assert batch["x"].tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("batch", "kwargs", "message"),
    [
        (
            {"input_ids": torch.zeros(6, 2)},
            {"dp": 4},
            "input_ids has 6 sequences, which dp * num_microbatches = 4 * 1 = 4",
        ),
        (
            {"x": torch.zeros(4)},
            {"dp": 2, "num_microbatches": 4},
            "dp * num_microbatches = 2 * 4 = 8 does not divide; use",
        ),
        ({"x": torch.zeros(4), "y": torch.zeros(6)}, {"dp": 2}, "tensors disagree about the number of sequences"),
        ({"x": 3, "s": torch.tensor(1.0)}, {"dp": 2}, "there is no tensor with a batch dim among x, s"),
        ({}, {"dp": 2}, "there is no tensor with a batch dim among no arguments"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, kwargs, message):
    with pytest.raises(ValueError) as error:
        slice_batch(batch, coord=0, **kwargs)
    assert message in str(error.value)


def test_only_dicts_are_batches():
    with pytest.raises(TypeError, match="expected a dict of the model's arguments, got Tensor"):
        slice_batch(torch.zeros(4), coord=0, dp=2)


def labels(*masked):
    """Four rows of five labels, the first ``masked[i]`` of row i not counting."""
    rows = torch.ones(4, 5, dtype=torch.int64)
    for row, count in zip(rows, masked, strict=True):
        row[:count] = -100
    return rows


@pytest.mark.parametrize("masked", [(0, 0, 0, 0), (2, 2, 2, 2), (0, 3, 3, 0), (0, 3, 0, 3)])
def test_equally_masked_slices_are_cut(masked):
    assert torch.equal(slice_batch({"labels": labels(*masked)}, coord=1, dp=2)["labels"], labels(*masked)[2:])


def test_unequally_masked_slices_are_refused():
    """The mean of means would be another number than one process computes."""
    with pytest.raises(ValueError) as error:
        slice_batch({"labels": labels(0, 0, 3, 3)}, coord=0, dp=2)
    assert "the 2 pieces of the batch have [10, 4] labels that count (not -100)" in str(error.value)
    assert "put num_items_in_batch=<labels that count> / 2 into the batch" in str(error.value)
    with pytest.raises(ValueError, match="the 4 pieces of the batch"):
        slice_batch({"labels": labels(0, 3, 3, 0)}, coord=0, dp=2, num_microbatches=2)
    with pytest.raises(ValueError, match="2 pieces"):  # the first label of a sequence is not predicted
        slice_batch({"labels": labels(1, 1, 1, 0)}, coord=0, dp=2)


@pytest.mark.parametrize(
    ("batch", "dp"),
    [
        ({"labels": labels(0, 0, 3, 3), "num_items_in_batch": 7}, 2),  # the loss is divided by a number of the caller's
        ({"labels": labels(0, 0, 3, 3)}, 1),
        ({"labels": torch.randn(4, 5)}, 2),
        ({"labels": torch.tensor([1, -100, 2, -100])}, 2),
    ],
)
def test_other_normalizations_are_left_alone(batch, dp):
    assert len(slice_batch(batch, coord=0, dp=dp)["labels"]) == 4 // dp
