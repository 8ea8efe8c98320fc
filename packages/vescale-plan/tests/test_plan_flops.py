"""FLOPs of a model are counted without data, and equal those of a real step."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from vescale.plan import count_flops, profile
from vescale.plan._torch import grouped_flops

transformers = pytest.importorskip("transformers")
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 5}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIG = transformers.LlamaConfig(**SIZES, **HEADS)


def tokens():
    found = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": found, "labels": found}


def test_the_count_is_that_of_a_real_step():
    """Five equal layers, of which two run."""
    model = transformers.LlamaForCausalLM(CONFIG)
    counted = count_flops(model, tokens())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it knows no fused kernel of CPUs
        model(**tokens()).loss.backward()
    assert counted == counter.get_total_flops()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    assert counted >= 6 * matrices * tokens()["input_ids"].numel()
    model.lm_head = nn.Linear(32, 128, bias=False)  # a larger model counts more
    model.config.vocab_size = 128
    assert count_flops(model, tokens()) > counted


def test_a_profile_has_the_same_number():
    found = profile(CONFIG, sequence_length=16)
    assert found.flops_per_token == count_flops(CONFIG, tokens()) / 32
    assert profile(CONFIG).flops_per_token is None


def test_no_value_of_the_model_is_used_or_changed():
    model = transformers.LlamaForCausalLM(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.device("meta"):
        bare = transformers.LlamaForCausalLM(CONFIG)
    assert count_flops(bare, tokens()) == count_flops(model, tokens())
    assert count_flops(bare, {name: value.to("meta") for name, value in tokens().items()}) == count_flops(
        model, tokens()
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_experts_count_for_the_tokens_that_they_get(implementation):
    def count(chosen):
        config = transformers.MixtralConfig(**SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=chosen)
        config._experts_implementation = implementation
        return count_flops(config, tokens())

    each = 6 * tokens()["input_ids"].numel() * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert count(3) - count(2) == count(2) - count(1) == each * SIZES["num_hidden_layers"]


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [((6, 4), (3, 4, 5), 240), ((4, 6), (6, 5), 240), ((3, 2, 4), (3, 4, 5), 240), ((3, 2, 4), (4, 15), 240)],
)
def test_products_of_groups_are_counted_by_their_shapes(left, right, flops):
    assert grouped_flops(left, right) == flops


def test_a_loss_function_gets_the_target():
    model = nn.Linear(16, 4, bias=False)
    batch = {"input": torch.ones(2, 16), "target": torch.ones(2, 4)}
    assert count_flops(model, batch, loss_fn=nn.functional.mse_loss) == 2 * 2 * 2 * 16 * 4
    assert set(batch) == {"input", "target"}


class ByValue(nn.Module):
    def forward(self, x):
        return x * float(x.numpy().sum())


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match=r"expected a scalar loss, got Tensor from the model; pass labels"):
        count_flops(nn.Linear(16, 4), {"input": torch.ones(2, 16)})
    with pytest.raises(ValueError, match=r"expected a scalar loss, got Tensor from loss_fn; pass labels"):
        count_flops(nn.Linear(16, 4), {"input": torch.ones(2, 16)}, loss_fn=torch.relu)
    with pytest.raises(ValueError, match=r"expected a model that runs on this batch without data, got .*six times"):
        count_flops(ByValue(), {"x": torch.ones(2)})
