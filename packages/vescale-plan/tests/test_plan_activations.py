"""The activation formula against what autograd really keeps for one block."""

import dataclasses

import pytest
import torch

from vescale.plan import Layout, estimate_memory, profile

BATCH, SEQ = 3, 40
# What the formula leaves out: statistics of the norms, log-sum-exp of attention.
SMALL_CHANGE = 0.02


def kept_bytes(module, x):
    """Run forward and return the bytes of distinct storages that autograd keeps, parameters excluded."""
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # holding the tensor keeps the address from reuse
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = module(x)
    # the block's output is the next block's input: counted there
    kept.pop(output.untyped_storage().data_ptr(), None)
    return sum(size for size, _ in kept.values())


def activations(found, *, batch, sequence_length, num_blocks, pp=1, **layout):
    """Return the estimated activations of each stage if the model had ``num_blocks`` blocks."""
    stages = estimate_memory(
        dataclasses.replace(found, num_blocks=num_blocks),
        Layout(**{"dp": 1, "tp": 1, "pp": pp, **layout}),
        global_batch_size=batch,
        sequence_length=sequence_length,
    )
    return [stage.activations for stage in stages]


def block_bytes(found, **size):
    """Return the estimate for one block."""
    (with_block,) = activations(found, num_blocks=1, **size)
    (without,) = activations(found, num_blocks=0, **size)
    return with_block - without


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formula_is_what_autograd_keeps(build_gpt, gated, dtype):
    """Up to small change; and a wrong formula is further away."""
    model = build_gpt(2, 64, 4, 200, 100, gated=gated).to(dtype)
    measured = kept_bytes(model.blocks[0], torch.randn(BATCH, SEQ, 64, dtype=dtype, requires_grad=True) + 0)
    estimated = block_bytes(profile(model), batch=BATCH, sequence_length=SEQ)
    assert estimated == pytest.approx(measured, rel=SMALL_CHANGE)
    wrong = dataclasses.replace(profile(model), gated=not gated)
    assert block_bytes(wrong, batch=BATCH, sequence_length=SEQ) != pytest.approx(measured, rel=SMALL_CHANGE)


@pytest.mark.parametrize(("heads", "ffn_factor"), [(8, 4), (16, 4)])
def test_sixteen_bit_dense_block_is_the_published_formula(build_gpt, heads, ffn_factor):
    """s b h (18 + 4 ffn/h) on one rank, s b h (10 + 24/tp) with tp, s b h (4 + 30/tp) with sequence parallelism."""
    hidden, tokens = 128, 48
    model = build_gpt(2, hidden, heads, ffn_factor * hidden, 50, dropout=0.1).to(torch.bfloat16)
    found = profile(model)
    size = {"batch": tokens // 16, "sequence_length": 16}
    assert block_bytes(found, **size) == tokens * hidden * (18 + 4 * ffn_factor)
    for tp in (2, 4, 8):
        assert block_bytes(found, tp=tp, **size) == tokens * hidden * (10 + 24 // tp)
        assert block_bytes(found, tp=tp, sequence_parallel=True, **size) == tokens * hidden * (4 + 30 / tp)


def test_unfused_attention_adds_the_scores(build_gpt):
    """5 a s bytes per token in 16 bit with dropout: softmax, its dropped copy and the mask."""
    model = build_gpt(2, 128, 8, 512, 50, dropout=0.1).to(torch.bfloat16)
    fused, unfused = profile(model), profile(model, fused_attention=False)
    size = {"batch": 3, "sequence_length": 16}
    added = block_bytes(unfused, **size) - block_bytes(fused, **size)
    assert added == 48 * 5 * 8 * 16


def test_edges_are_the_published_formula(build_gpt):
    """Embedding s b (8 + h); norm, head and logits 4 s b h (1 + V/h)."""
    model = build_gpt(2, 128, 8, 512, 1000, dropout=0.1).to(torch.bfloat16)
    embedding, head = activations(profile(model), batch=3, sequence_length=16, num_blocks=0, pp=2)
    assert embedding == 48 * (8 + 128)
    assert head == 48 * 4 * (128 + 1000)


def test_each_chosen_expert_counts(build_mixtral):
    """A second expert per token adds its feed-forward and a copy of the token in and out."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 50,
    }
    one = profile(build_mixtral(num_hidden_layers=2, num_experts_per_tok=1, **sizes))
    two = profile(build_mixtral(num_hidden_layers=2, num_experts_per_tok=2, **sizes))
    size = {"batch": 2, "sequence_length": 5}
    added = block_bytes(two, **size) - block_bytes(one, **size)
    assert added == 10 * 2 * (4 * 96 + 2 * 64)
