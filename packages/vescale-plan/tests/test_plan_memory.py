"""Model states against the closed formulas of ZeRO, Megatron and DeepSpeed; stages, ties and monotony."""

import itertools

import pytest
import torch
from torch import nn

from vescale.plan import Layout, StateBytes, estimate_memory, model_state_bytes, profile

P = 7 * 2**20
DEGREES = (1, 2, 4, 8, 64)


@pytest.mark.parametrize("n", DEGREES)
@pytest.mark.parametrize(
    ("state", "zero", "formula"),
    [
        (StateBytes(2, 2, 12), 0, lambda p, _: 16 * p),  # ZeRO paper, mixed precision Adam
        (StateBytes(2, 2, 12), 1, lambda p, n: 4 * p + 12 * p // n),
        (StateBytes(2, 2, 12), 2, lambda p, n: 2 * p + 14 * p // n),
        (StateBytes(2, 2, 12), 3, lambda p, n: 16 * p // n),
        (StateBytes(2, 2, 16), 1, lambda p, n: 4 * p + 16 * p // n),  # Megatron, 16-bit gradients
        (StateBytes(2, 4, 12), 1, lambda p, n: 6 * p + 12 * p // n),  # Megatron, bf16 with float32 gradients
        (StateBytes(4, 4, 8), 1, lambda p, n: 8 * p + 8 * p // n),  # Megatron, float32
        (StateBytes(2, 6, 12), 2, lambda p, n: 2 * p + 18 * p // n),  # DeepSpeed's ZeRO-2 estimator
    ],
)
def test_model_states_are_the_published_formulas(state, zero, formula, n):
    assert sum(model_state_bytes(P, state=state, dp=n, zero=zero)) == formula(P, n)


def test_a_neighbouring_formula_does_not_fit():
    assert sum(model_state_bytes(P, state=StateBytes(2, 2, 12), dp=4, zero=1)) != 2 * P + 14 * P // 4


def test_shards_are_rounded_up():
    assert model_state_bytes(10, state=StateBytes(4, 4, 8), dp=4, zero=2) == (40, 12, 24)
    assert model_state_bytes(10, state=StateBytes(4, 4, 8), dp=4, zero=3) == (12, 12, 24)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("float32", (4, 4, 8)), ("bfloat16", (2, 2, 4)), ("float64", (8, 8, 16))]
)
def test_states_of_a_dtype(dtype, expected):
    assert StateBytes.for_dtype(dtype) == StateBytes(*expected)


def test_pure_data_parallel_run_is_the_formula(build_gpt):
    """Through `estimate_memory` too: the whole model on every rank, states as in the ZeRO paper."""
    found = profile(build_gpt(4, 64, 4, 256, 128).to(torch.bfloat16))
    p = found.num_parameters
    for n, zero in itertools.product((1, 2, 4), (0, 1, 2, 3)):
        (stage,) = estimate_memory(
            found,
            Layout(dp=n, tp=1, pp=1, zero=zero),
            global_batch_size=8,
            sequence_length=16,
            state=StateBytes(2, 2, 12),
        )
        expected = {0: 16 * p, 1: 4 * p + 12 * p / n, 2: 2 * p + 14 * p / n, 3: 16 * p / n}[zero]
        assert stage.parameters + stage.gradients + stage.optimizer == pytest.approx(expected, abs=14)


def elements(found, pp):
    """Return the number of parameter elements of each stage."""
    one = StateBytes(params=1, grads=1, optimizer=1)
    stages = estimate_memory(found, Layout(dp=1, tp=1, pp=pp), global_batch_size=1, sequence_length=8, state=one)
    return [stage.parameters for stage in stages]


def test_every_block_is_on_exactly_one_stage():
    """Block i has 2**i parameters, so the bits of a stage's number of parameters are its blocks."""
    for blocks in range(2, 20):
        with torch.device("meta"):
            found = profile(nn.ModuleList(nn.Linear(1, 2**block, bias=False) for block in range(blocks)))
        for pp in range(1, blocks + 1):
            stages = [[block for block in range(blocks) if count >> block & 1] for count in elements(found, pp)]
            assert [block for stage in stages for block in stage] == list(range(blocks))
            sizes = [len(stage) for stage in stages]
            assert max(sizes) - min(sizes) <= 1
            assert sizes[-1] == blocks // pp, "the last stage carries the head and takes no more than its share"


def test_parameters_of_all_stages_add_up(build_mixtral):
    found = profile(build_mixtral(num_hidden_layers=5))
    for pp in range(1, 6):
        assert sum(elements(found, pp)) == found.num_parameters


def test_tied_parameter_counts_on_both_stages_that_use_it(build_mixtral):
    found = profile(build_mixtral(num_hidden_layers=4, tied=True))
    embedding = 32000 * 4096
    assert sum(elements(found, 1)) == found.num_parameters
    assert sum(elements(found, 2)) == found.num_parameters + embedding


def test_frozen_parameters_need_no_gradient_and_no_state(build_gpt):
    model = build_gpt(2, 64, 4, 128, 100)
    size = {"global_batch_size": 4, "sequence_length": 8}
    layout = Layout(dp=1, tp=1, pp=1)
    (before,) = estimate_memory(profile(model), layout, **size)
    model.embed.requires_grad_(False)
    (after,) = estimate_memory(profile(model), layout, **size)
    assert after.parameters == before.parameters
    assert before.gradients - after.gradients == 4 * 100 * 64
    assert before.optimizer - after.optimizer == 8 * 100 * 64


def activations(found, schedule, num_microbatches):
    """Return the bytes of activations of each of four stages, with micro-batches of one sequence."""
    layout = Layout(dp=1, tp=1, pp=4, num_microbatches=num_microbatches, schedule=schedule)
    stages = estimate_memory(found, layout, global_batch_size=num_microbatches, sequence_length=128)
    return [stage.activations for stage in stages]


def test_micro_batches_in_flight(build_mixtral):
    """The activations of a stage are those of one micro-batch, times the micro-batches in flight."""
    found = profile(build_mixtral(num_hidden_layers=8))
    one = activations(found, "gpipe", 1)
    for schedule, num_microbatches, in_flight in (
        ("1f1b", 8, [4, 3, 2, 1]),
        ("1f1b", 2, [2, 2, 2, 1]),
        ("gpipe", 8, [8, 8, 8, 8]),
    ):
        expected = [count * num_bytes for count, num_bytes in zip(in_flight, one, strict=True)]
        assert activations(found, schedule, num_microbatches) == expected


def test_gpipe_needs_more_than_1f1b(build_mixtral):
    found = profile(build_mixtral(num_hidden_layers=8))
    size = {"global_batch_size": 16, "sequence_length": 128}
    ours, theirs = (
        estimate_memory(found, Layout(dp=1, tp=1, pp=4, num_microbatches=16, schedule=schedule), **size)
        for schedule in ("1f1b", "gpipe")
    )
    assert all(a.activations < b.activations for a, b in zip(ours, theirs, strict=True))
    assert all(a.parameters == b.parameters for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("axis", ["tp", "pp", "dp"])
def test_more_ranks_never_need_more_memory(build_mixtral, axis):
    """Doubling one degree, everything else fixed, never raises the fullest rank's bytes."""
    found = profile(build_mixtral(num_hidden_layers=8))
    for other, zero, schedule in itertools.product((1, 2), (0, 1, 2, 3), ("1f1b", "gpipe")):
        previous = None
        for degree in (1, 2, 4, 8):
            degrees = {"dp": other, "tp": other, "pp": other} | {axis: degree}
            layout = Layout(**degrees, zero=zero, num_microbatches=4, schedule=schedule)
            stages = estimate_memory(found, layout, global_batch_size=64, sequence_length=256)
            worst = max(stage.total for stage in stages)
            assert previous is None or worst <= previous
            previous = worst


def test_higher_zero_stages_need_less(build_mixtral):
    found = profile(build_mixtral(num_hidden_layers=4))
    totals = [
        estimate_memory(found, Layout(dp=4, tp=1, pp=1, zero=zero), global_batch_size=4, sequence_length=8)[0].total
        for zero in (0, 1, 2)
    ]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == 3


def test_buffers_of_each_zero_stage(build_mixtral):
    """ZeRO-1 holds the reduced shard, ZeRO-2 two buckets (here as large as a parameter), a pipeline its sums."""
    found = profile(build_mixtral(num_hidden_layers=4))
    size = {"global_batch_size": 8, "sequence_length": 8, "bucket_bytes": 2**20}
    whole, largest = 2 * found.num_parameters, 2 * 8 * 2 * 14336 * 4096
    expected = {(0, 1): 0, (1, 1): whole // 4, (2, 1): 2 * largest, (0, 2): whole, (1, 2): whole + whole // 4}
    for (zero, pieces), buffers in expected.items():
        layout = Layout(dp=4, tp=1, pp=1, zero=zero, num_microbatches=pieces)
        assert estimate_memory(found, layout, **size)[0].buffers == buffers


def test_sharded_parameters_are_whole_where_they_are_used(build_gpt):
    """ZeRO-3 holds two blocks and what is outside of blocks, as parameters and as gradients."""
    model = build_gpt(8, 64, 4, 256, 128)
    found = profile(model)
    block = sum(p.numel() for p in model.get_submodule(found.blocks)[0].parameters())
    edges = found.num_parameters - 8 * block
    for dp, expected in ((4, 2 * 4 * (edges + 2 * block)), (1, 0)):
        layout = Layout(dp=dp, tp=1, pp=1, zero=3)
        (stage,) = estimate_memory(found, layout, global_batch_size=8, sequence_length=8)
        assert stage.buffers == expected
    model.requires_grad_(False)
    (stage,) = estimate_memory(profile(model), Layout(dp=4, tp=1, pp=1, zero=3), global_batch_size=8, sequence_length=8)
    assert stage.parameters == found.num_parameters
    assert stage.buffers == 4 * (edges + 2 * block)


def test_batch_that_does_not_divide_is_refused(build_mixtral):
    with pytest.raises(ValueError, match=r"multiple of dp \* num_microbatches = 2 \* 2 = 4 .*, got 6; use 4 or 8"):
        estimate_memory(
            profile(build_mixtral(num_hidden_layers=2)),
            Layout(dp=2, tp=1, pp=1, num_microbatches=2),
            global_batch_size=6,
            sequence_length=8,
        )
