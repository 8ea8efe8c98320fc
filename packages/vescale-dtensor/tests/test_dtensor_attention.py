"""`scaled_dot_product_attention` on sharded operands equals one device, forward and backward, with masks and dropout.

Dropout takes the unfused path, in which torch makes plain tensors of its own (the causal mask); outside of a parallel
module that needs `implicit_replication`.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.attention import SDPBackend, sdpa_kernel

from vescale.dtensor import DTensor, Partial, Replicate, Shard, UnsupportedRandomOperator, init_device_mesh
from vescale_testing import ranks

B, H, L, S, E = 4, 4, 5, 7, 6
BATCH, HEADS, WHOLE = Shard(0), Shard(1), Replicate()


def operands(num_kv_heads=H, length=S):
    generator = torch.Generator().manual_seed(1)
    shapes = [(B, H, L, E), (B, num_kv_heads, length, E), (B, num_kv_heads, length, E)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]


def mask_of(shape, dtype):
    mask = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return mask.gt(0.3).logical_or(torch.eye(shape[-2], shape[-1], dtype=torch.bool)) if dtype is torch.bool else mask


def assert_attends_alike(shard, mesh, placements, mask=None, mask_placements=None, *, whole=None, **kwargs):
    """Output and gradients of the sharded operands are those of one device, and so is the generator."""
    whole = whole or operands()
    sharded = [shard(tensor, mesh, placements) for tensor in whole]
    torch.manual_seed(3)
    expected = F.scaled_dot_product_attention(*whole, attn_mask=mask, **kwargs)
    expected.square().sum().backward()
    state = torch.get_rng_state()
    torch.manual_seed(3)
    if mask is not None:
        mask = shard(mask, mesh, mask_placements or (WHOLE,) * mesh.ndim)
    with implicit_replication() if kwargs.get("dropout_p") else contextlib.nullcontext():
        actual = F.scaled_dot_product_attention(*sharded, attn_mask=mask, **kwargs)
        actual.square().sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=1e-14)
    for one, other in zip(sharded, whole, strict=True):
        torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-12, atol=1e-13)
    return actual


@ranks(2)
def test_sharded_over_batch_or_heads(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placement in (BATCH, HEADS, WHOLE):
        for is_causal in (False, True):
            actual = assert_attends_alike(shard, mesh, (placement,), is_causal=is_causal, scale=0.3)
            assert actual.placements == (placement,)
            assert actual.stride() == F.scaled_dot_product_attention(*operands()).stride()


@ranks(4)
def test_sharded_over_two_axes(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mask = mask_of((B, 1, L, S), torch.float64)
    for placements in [(BATCH, HEADS), (HEADS, BATCH), (BATCH, BATCH), (HEADS, HEADS), (WHOLE, HEADS)]:
        assert assert_attends_alike(shard, mesh, placements, mask).placements == placements


@ranks(2)
def test_masks_that_broadcast(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for shape in [(B, H, L, S), (1, 1, L, S), (B, 1, L, S), (1, H, L, S), (L, S)]:
        for dtype in (torch.bool, torch.float64):
            for placement in (BATCH, HEADS):
                mask = mask_of(shape, dtype)
                # without a mask, with one, and without again: the rule must not remember another call's mask
                assert_attends_alike(shard, mesh, (placement,))
                assert_attends_alike(shard, mesh, (placement,), mask)
                assert_attends_alike(shard, mesh, (placement,))
                if len(shape) == 4 and shape[placement.dim] > 1:
                    assert_attends_alike(shard, mesh, (placement,), mask, (placement,))


@ranks(2)
def test_grouped_queries(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placement in (BATCH, HEADS):
        for mask in (None, mask_of((B, 1, L, S), torch.float64)):
            assert_attends_alike(shard, mesh, (placement,), mask, whole=operands(2), enable_gqa=True)


@ranks(2)
def test_heads_that_share_one_key_by_an_expansion(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placement in (BATCH, WHOLE):
        whole = operands(1)
        sharded = [shard(tensor, mesh, (placement,)) for tensor in whole]
        results = []
        for query, key, value in (whole, sharded):
            for mask in (None, mask_of((1, 1, L, S), torch.bool)):
                mask = mask if mask is None or query is whole[0] else shard(mask, mesh, (WHOLE,))
                shared = key.expand(B, H, S, E), value.expand(B, H, S, E)
                results.append(F.scaled_dot_product_attention(query, *shared, attn_mask=mask))
            sum(result.square().sum() for result in results[-2:]).backward()
        for expected, actual in zip(results[:2], results[2:], strict=True):
            torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=1e-14)
        for one, other in zip(sharded, whole, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-12, atol=1e-13)


@ranks(2)
def test_dropout_takes_the_unfused_path(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placement in (BATCH, HEADS, WHOLE):
        for kwargs in ({}, {"is_causal": True}):
            assert_attends_alike(shard, mesh, (placement,), dropout_p=0.3, **kwargs)
        for dtype in (torch.bool, torch.float64):
            assert_attends_alike(shard, mesh, (placement,), mask_of((B, 1, L, S), dtype), dropout_p=0.3)
        with sdpa_kernel(SDPBackend.MATH):
            assert_attends_alike(shard, mesh, (placement,))


@ranks(2)
def test_placements_that_do_not_fit_are_gathered(shard):
    """Over the sequence, over the head size, and heads that the ranks do not divide."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placement in (Shard(2), Shard(3)):
        assert assert_attends_alike(shard, mesh, (placement,)).placements == (WHOLE,)
    one_head = operands(1)
    actual = assert_attends_alike(shard, mesh, (HEADS,), whole=one_head, enable_gqa=True)
    assert actual.placements == (WHOLE,)


@ranks(3)
def test_uneven_and_empty_shards_are_gathered(shard):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for placement in (BATCH, HEADS):  # 4 over 3 ranks: 2, 2, 0
        assert_attends_alike(shard, mesh, (placement,), mask_of((B, H, L, S), torch.float64), (placement,))


@ranks(2)
def test_memory_order_of_the_result_after_a_gather(shard):
    """Heads are the third dim in memory, as projections give them; views of the result rely on it."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in operands())
    expected = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, L, H * E)
    for placement in (Shard(2), Shard(3), HEADS, Partial()):
        if placement.is_partial():
            sharded = [DTensor.from_local(t / 2, mesh, [placement]) for t in (q, k, v)]
        else:
            sharded = [shard(t, mesh, (placement,)) for t in (q, k, v)]
        actual = F.scaled_dot_product_attention(*sharded).transpose(1, 2)
        assert actual.to_local().is_contiguous()
        torch.testing.assert_close(actual.reshape(B, L, H * E).full_tensor(), expected, rtol=1e-12, atol=1e-14)


@ranks(2)
def test_a_gather_is_refused_where_it_must_be_explicit(shard):
    from torch.distributed.tensor._utils import ExplicitRedistributionContext

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with ExplicitRedistributionContext():
        with pytest.raises(
            RuntimeError, match=r"Implicit redistribution occurred for aten\._scaled_dot_product_flash_att"
        ):
            F.scaled_dot_product_attention(*[shard(x, mesh, (Shard(2),)) for x in operands()])
        q, k, v = (shard(x, mesh, (HEADS,)) for x in operands())
        F.scaled_dot_product_attention(q, k, v, attn_mask=shard(mask_of((B, 1, L, S), torch.bool), mesh, (WHOLE,)))


@ranks(2)
def test_a_plain_mask_needs_implicit_replication(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    q, k, v = (shard(x, mesh, (HEADS,)) for x in operands())
    mask = mask_of((B, 1, L, S), torch.float64)
    with pytest.raises(
        RuntimeError, match=r"got mixed torch\.Tensor and DTensor; distribute the tensor of shape \(4, 1"
    ):
        F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with implicit_replication():
        actual = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    actual.sum().backward()
    expected = F.scaled_dot_product_attention(*operands(), attn_mask=mask)
    torch.testing.assert_close(actual.full_tensor(), expected, rtol=1e-12, atol=0)


@ranks(2)
def test_fused_dropout_is_refused(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    q, k, v = (shard(x.detach(), mesh, (HEADS,)) for x in operands())
    text = r"use torch\.nn\.attention\.sdpa_kernel\(SDPBackend\.MATH\) or eager attention for attention dropout"
    for name in ("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"):
        with pytest.raises(UnsupportedRandomOperator, match=f"aten.{name}.default on a DTensor.*{text}"):
            getattr(torch.ops.aten, name)(q, k, v, 0.1)
    with pytest.raises(UnsupportedRandomOperator, match=text):
        torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, dropout_p=0.1)
