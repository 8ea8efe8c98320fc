"""`keep_float64` lets nothing fall to float32, in any spelling, on any tensor type, and touches nothing else."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.utils.checkpoint import checkpoint

from vescale_testing import created_dtypes, keep_float64, ranks

X = torch.ones(2, 3, dtype=torch.float64)

CASTS = {
    ".float()": lambda: X.float(),
    ".to(dtype)": lambda: X.to(torch.float32),
    ".to(dtype=)": lambda: X.to(dtype=torch.float32),
    ".to(device, dtype)": lambda: X.to("cpu", torch.float32),
    ".type(dtype)": lambda: X.type(torch.float32),
    "softmax(dtype=)": lambda: F.softmax(X, dim=-1, dtype=torch.float32),
    "torch.softmax(dtype)": lambda: torch.softmax(X, -1, torch.float32),
    "sum(dtype=)": lambda: X.sum(dtype=torch.float32),
    "arange().float()": lambda: torch.arange(3).float(),
    "ones(dtype=)": lambda: torch.ones(3, dtype=torch.float32),
    "new_zeros(dtype=)": lambda: X.new_zeros(2, dtype=torch.float32),
    "bf16.float()": lambda: X.bfloat16().float(),
    "default dtype": lambda: torch.ones(2),
    "int division": lambda: torch.arange(3) / 2,
    "module.float()": lambda: torch.nn.Linear(1, 1, dtype=torch.float64).float().weight,
}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
def test_casts_to_float32_become_float64(cast):
    with keep_float64():
        assert cast().dtype is torch.float64
    assert cast().dtype is torch.float32  # without it, and after it


def test_other_casts_stay():
    with keep_float64():
        assert X.bfloat16().dtype is torch.bfloat16
        assert X.half().dtype is torch.float16
        assert X.to(torch.int32).dtype is torch.int32
        assert torch.zeros(2, dtype=torch.bool).dtype is torch.bool


def test_reinterpreting_bits_is_no_cast():
    bits = torch.tensor([0x3F800000], dtype=torch.int32)
    with keep_float64():
        assert bits.view(torch.float32).tolist() == [1.0]


def test_the_default_dtype_comes_back_after_an_error():
    with pytest.raises(ValueError, match="inside"), keep_float64():
        raise ValueError("inside")
    assert torch.get_default_dtype() is torch.float32


@pytest.mark.parametrize("backward", ["backward", "autograd.backward", "autograd.grad"])
def test_it_holds_in_recomputation(backward):
    def block(x):
        seen.append((y := x.float() * 2).dtype)
        return y.sin()

    seen = []
    x = X.clone().requires_grad_()
    with keep_float64():
        loss = checkpoint(block, x, use_reentrant=False).sum()
        if backward == "backward":
            loss.backward(torch.tensor(1.0), retain_graph=False)
        elif backward == "autograd.backward":
            torch.autograd.backward(loss)
        else:
            (x.grad,) = torch.autograd.grad(loss, x)
    assert seen == [torch.float64] * 2
    assert torch.allclose(x.grad, 2 * (2 * X).cos(), rtol=1e-14)


@ranks(2)
def test_it_works_on_dtensors():
    x = distribute_tensor(torch.rand(4, 3, dtype=torch.float64), init_device_mesh("cpu", (2,)), [Shard(0)])
    with keep_float64():
        assert isinstance(x.float(), DTensor)
        assert x.float().dtype is F.softmax(x, dim=-1, dtype=torch.float32).dtype is torch.float64
    assert x.float().dtype is torch.float32


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("keep", [True, False])
def test_an_unmodified_mixtral_stays_in_float64(attention, keep):
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        attn_implementation=attention,
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).double()
    tokens = torch.randint(32, (2, 8))
    with keep_float64() if keep else nullcontext(), created_dtypes() as seen:
        model(tokens, labels=tokens).loss.backward()
    assert torch.float64 in seen
    assert (torch.float32 in seen) is not keep, seen.get(torch.float32)
