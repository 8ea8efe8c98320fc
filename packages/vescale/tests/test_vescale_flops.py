"""FLOPs of a model are counted without values, and equal those of a real step; peaks are found by the device's name."""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import vescale
from vescale import _device_peaks, _flops
from vescale._device_peaks import peak_flops

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
CONFIG = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)


def tokens():
    found = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    return {"input_ids": found, "labels": found}


def test_the_count_is_that_of_a_real_step():
    model = LlamaForCausalLM(CONFIG)
    counted = vescale.count_flops(model, tokens())
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # it knows no fused kernel of CPUs
        model(**tokens()).loss.backward()
    assert counted == counter.get_total_flops()
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name)
    assert counted >= 6 * matrices * tokens()["input_ids"].numel()
    model.lm_head = nn.Linear(32, 128, bias=False)  # a larger model counts more
    model.config.vocab_size = 128
    assert vescale.count_flops(model, tokens()) > counted


def test_no_value_of_the_model_is_used_or_changed():
    deferred = vescale.deferred_init(LlamaForCausalLM, CONFIG)
    model = LlamaForCausalLM(CONFIG)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert vescale.count_flops(deferred, tokens()) == vescale.count_flops(model, tokens())
    assert vescale.dtensor.is_deferred(deferred)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_experts_count_for_the_tokens_that_they_get(implementation):
    def count(chosen):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = MixtralConfig(**SIZES, **heads, num_local_experts=4, num_experts_per_tok=chosen)
        config._experts_implementation = implementation
        with torch.device("meta"):
            return vescale.count_flops(MixtralForCausalLM(config), tokens())

    if implementation == "eager":  # its loop over experts depends on values
        with pytest.raises(ValueError, match=r"expected a model that runs on this batch without values"):
            count(1)
        return
    each = 6 * tokens()["input_ids"].numel() * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert count(3) - count(2) == count(2) - count(1) == each * SIZES["num_hidden_layers"]


@pytest.mark.parametrize(
    ("left", "right", "flops"),
    [((6, 4), (3, 4, 5), 240), ((4, 6), (6, 5), 240), ((3, 2, 4), (3, 4, 5), 240), ((3, 2, 4), (4, 15), 240)],
)
def test_products_of_groups_are_counted_by_their_shapes(left, right, flops):
    assert _flops._grouped_matmul(left, right) == flops


def test_a_loss_function_gets_the_target():
    model = nn.Linear(16, 4, bias=False)
    batch = {"input": torch.ones(2, 16), "target": torch.ones(2, 4)}
    assert vescale.count_flops(model, batch, loss_fn=nn.functional.mse_loss) == 2 * 2 * 2 * 16 * 4


class ByValue(nn.Module):
    def forward(self, x):
        return x.sum() if bool((x > 0).any()) else x.mean()


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(ValueError, match=r"expected a scalar loss, got Tensor from the model; pass labels"):
        vescale.count_flops(nn.Linear(16, 4), {"input": torch.ones(2, 16)})
    with pytest.raises(ValueError, match=r"expected a model that runs on this batch without values, got .*six times"):
        vescale.count_flops(ByValue(), {"x": torch.ones(2)})


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-32GB", 125e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("NVIDIA GB200", 2.5e15),
        ("NVIDIA B200", 2.25e15),
        ("AMD Instinct MI300X", 1307.4e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_is_found_by_its_name(name, flops):
    assert peak_flops(name) == flops


def test_the_table_is_that_of_the_docstring():
    rows = [
        line.strip("| ").split(" | ") for line in (_device_peaks.__doc__ or "").splitlines() if line.startswith("| ")
    ]
    listed = {device: float(flops) for devices, flops, _ in rows[1:] for device in devices.split(", ")}
    assert listed == _device_peaks.PEAK_FLOPS
    assert all(source for _, _, source in rows)
