"""The global batch is cut into slices that together are the batch; what cannot be cut equally is refused."""

import pytest
import torch
from torch import nn

import vescale
from vescale_testing import RankFailure, ranks, run_ranks


def parallel_model(**plan):
    return vescale.parallelize(vescale.Plan(**plan), nn.Sequential(nn.Linear(1, 1)), torch.optim.SGD)[0]


def slices(batch, *, dp, num_microbatches=1):
    """Return the slice of every data-parallel rank."""

    def local_batch():
        return parallel_model(dp=dp, num_microbatches=num_microbatches).local_batch(batch)

    return run_ranks(local_batch, dp)


def refusal(batch, **plan):
    """Return the error of rank 0."""
    with pytest.raises(RankFailure) as failure:
        slices(batch, **plan)
    error = failure.value.exceptions[0]
    assert isinstance(error, ValueError)
    return str(error)


@pytest.mark.parametrize("dp", [1, 2, 3, 4])
def test_slices_are_the_batch_in_order(dp):
    batch = {
        "x": torch.arange(24).view(12, 2),
        "y": torch.arange(12),
        "scale": torch.tensor(3.0),
        "flag": True,
        "no": None,
    }
    parts = slices(batch, dp=dp)
    for name in ("x", "y"):
        assert [len(part[name]) for part in parts] == [12 // dp] * dp
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    for name in ("scale", "flag", "no"):
        assert all(part[name] == batch[name] for part in parts)


@ranks(4)
def test_ranks_of_one_tensor_parallel_group_have_the_same_slice():
    model, _ = vescale.parallelize(
        vescale.Plan(dp=2, tp=2), nn.Linear(1, 1), torch.optim.SGD, module_plan={"parameter": {}}
    )
    assert (
        model.local_batch({"x": torch.arange(4)})["x"].tolist() == [[0, 1], [2, 3]][model.mesh["dp"].get_local_rank()]
    )


@ranks(2)
def test_slices_share_memory_with_the_batch():
    batch = {"x": torch.zeros(4, 1)}
    model = parallel_model(dp=2)
    model.local_batch(batch)["x"].fill_(1.0)
    assert batch["x"].view(-1).tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]][model.mesh["dp"].get_local_rank()]


@pytest.mark.parametrize(
    ("batch", "plan", "message"),
    [
        (
            {"input_ids": torch.zeros(6, 2)},
            {"dp": 4},
            "expected a multiple of dp = 4 sequences, got 6 in input_ids; change the batch",
        ),
        (
            {"x": torch.zeros(4)},
            {"dp": 2, "num_microbatches": 4},
            "expected at least dp * num_microbatches = 2 * 4 = 8 sequences, got 4 in x",
        ),
        (
            {"x": torch.zeros(4), "y": torch.zeros(6)},
            {"dp": 2},
            "expected the same number of sequences in dim 0 of every tensor, got x: 4, y: 6; give each",
        ),
        (
            {"x": 3, "s": torch.tensor(1.0)},
            {"dp": 1},
            "expected a tensor with sequences in dim 0, got none among x, s; pass the inputs",
        ),
        ({}, {"dp": 1}, "expected a tensor with sequences in dim 0, got none among no arguments"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch, plan, message):
    assert message in refusal(batch, **plan)


@ranks(1)
def test_only_dicts_are_batches():
    with pytest.raises(TypeError, match="expected a dict of the model's arguments as batch, got Tensor; pass them"):
        parallel_model().local_batch(torch.zeros(4))


def labels(*masked):
    """Rows of five labels, the first ``masked[i]`` of row i not counting."""
    rows = torch.ones(len(masked), 5, dtype=torch.int64)
    for row, count in zip(rows, masked, strict=True):
        row[:count] = -100
    return rows


@pytest.mark.parametrize("masked", [(0, 0, 0, 0), (2, 2, 2, 2), (0, 3, 3, 0), (0, 3, 0, 3)])
def test_equally_masked_slices_are_cut(masked):
    _, second = slices({"labels": labels(*masked)}, dp=2)
    assert torch.equal(second["labels"], labels(*masked)[2:])


@pytest.mark.parametrize("name", ["labels", "target", "next_sentence_label"])
def test_unequally_masked_slices_are_refused(name):
    """The mean of means would be another number than one process computes, whatever the name of the targets."""
    text = refusal({"x": torch.ones(4, 5), name: labels(0, 0, 3, 3)}, dp=2)
    assert f"expected equally many counted targets (not -100) in the 2 slices of {name!r}, got [10, 4]" in text
    assert "put num_items_in_batch=<counted targets> into the batch" in text


def test_slices_of_other_sizes_are_compared_by_rows():
    rows = labels(0, 0, 0, 0, 0, 0)
    first, _ = slices({"labels": rows}, dp=2, num_microbatches=2)  # of 2, 1, 2 and 1 rows
    assert torch.equal(first["labels"], rows[:3])
    text = refusal({"labels": labels(0, 0, 3, 0, 0, 3)}, dp=2, num_microbatches=2)
    assert "in the 4 slices of 'labels', of [2, 1, 2, 1] rows, got [10, 2, 10, 2]" in text


def test_slices_of_micro_batches_and_of_shifted_targets_are_compared():
    assert "in the 4 slices" in refusal({"labels": labels(0, 3, 3, 0)}, dp=2, num_microbatches=2)
    # the first label of a sequence is not predicted
    assert "in the 2 slices" in refusal({"labels": labels(1, 1, 1, 0)}, dp=2)


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
    assert all(len(part["labels"]) == 4 // dp for part in slices(batch, dp=dp))
