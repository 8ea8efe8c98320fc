"""Dropout and draws with one input per element equal one device, in programs that mix plain and sharded tensors."""

import functools

import pytest
import torch
import torch.nn.functional as F

from vescale.dtensor import Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

S0, S1, R = Shard(0), Shard(1), Replicate()

DROPOUTS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x, 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "native_dropout mask": lambda x: torch.native_dropout(x, 0.3, True)[1],
    "bernoulli of probabilities": torch.bernoulli,
}

# their noise is a new tensor, some of another shape
OTHER_NOISE = {
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3, training=True),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.3)[..., 0],
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=-1),
}


def input_of(shape, dtype=torch.float32):
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)


@ranks(4)
def test_masks_are_slices_of_the_global_mask(assert_drawn_alike):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for dropout in DROPOUTS.values():
        for shape in [(5, 3, 6), (1, 2, 8), (8, 16, 2), (3, 0, 2)]:
            for placements in [(S0, S1), (S1, S0), (S0, S0), (R, S1), (R, R)]:
                assert_drawn_alike(dropout, input_of(shape), mesh, placements)


@ranks(3)
def test_every_dtype_and_size(assert_drawn_alike):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for numel in (1, 15, 16, 17, 255, 256, 257):
            for name in ("dropout", "native_dropout", "bernoulli of probabilities"):
                assert_drawn_alike(DROPOUTS[name], input_of((numel,), dtype), mesh, (S0,))


@ranks(2)
def test_noise_in_a_tensor_of_its_own(assert_drawn_alike):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for dropout in OTHER_NOISE.values():
        for shape in [(4, 6, 2), (3, 5, 4)]:
            for placements in [(S0,), (S1,), (R,)]:
                assert_drawn_alike(dropout, input_of(shape), mesh, placements)


@ranks(2)
def test_no_random_numbers_are_spent_where_one_device_spends_none(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(input_of((4, 6)), mesh, (S0,))
    before = torch.get_rng_state()
    assert torch.equal(F.dropout(x, 0.3, training=False).to_local(), x.to_local())
    assert torch.equal(F.dropout(x, 0.0).to_local(), x.to_local())
    assert not F.dropout(x, 1.0).to_local().any()
    assert torch.equal(torch.get_rng_state(), before)


@ranks(2)
def test_inference_mode_sees_through_composite_operators(assert_drawn_alike):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with torch.inference_mode():
        for dropout in (DROPOUTS | OTHER_NOISE).values():
            assert_drawn_alike(dropout, input_of((4, 5, 6)), mesh, (S1,))


@ranks(3)
def test_gradients_pass_the_same_elements(shard, shard_of):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    whole = input_of((4, 7), torch.float64).requires_grad_()
    sharded = shard(whole, mesh, (S1,))
    for x in (whole, sharded):
        torch.manual_seed(2)
        (F.dropout(x, 0.5) ** 2).sum().backward()
    assert torch.equal(sharded.grad.to_local(), shard_of(whole.grad, mesh, (S1,)))


def program(activation, weight, to_sharded):
    """Plain draws, draws on shards, and plain draws again."""
    plain = torch.randn(9)
    hidden = F.dropout(activation, 0.5) @ weight.normal_()
    cached = torch.randn(3)  # fewer than 16 elements: half a Box-Muller pair stays in the generator
    hidden = F.dropout(hidden, 0.1) + to_sharded(torch.rand(1, 5))
    few = torch.empty_like(weight[:, :1].contiguous()).normal_()
    return [plain, hidden, cached, few, torch.randperm(11), torch.randint(2**40, (3,))]


@ranks(4)
def test_plain_and_sharded_draws_share_one_stream(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    activation, weight = input_of((6, 3), torch.float64), torch.zeros(3, 5, dtype=torch.float64)
    torch.manual_seed(3)
    expected = program(activation, weight.clone(), lambda x: x)
    state = torch.get_rng_state()

    cut = functools.partial(shard, mesh=mesh)
    torch.manual_seed(3)
    actual = program(
        cut(activation, placements=(S0, R)), cut(weight, placements=(R, S1)), lambda x: cut(x, placements=(R, S1))
    )
    assert torch.equal(torch.get_rng_state(), state)
    for value, reference in zip(actual, expected, strict=True):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.testing.assert_close(value, reference, rtol=1e-12, atol=0)


@ranks(2)
def test_without_the_rules_every_shard_repeats_one_mask(shard, assert_drawn_alike):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with disabled("random"):
        with pytest.raises(AssertionError):
            assert_drawn_alike(DROPOUTS["dropout"], torch.ones(8, 8), mesh, (S0,))
        first, second = F.dropout(shard(torch.ones(8, 8), mesh, (S0,)), 0.5).full_tensor().chunk(2)
        assert torch.equal(first, second)
    assert_drawn_alike(DROPOUTS["dropout"], torch.ones(8, 8), mesh, (S0,))
