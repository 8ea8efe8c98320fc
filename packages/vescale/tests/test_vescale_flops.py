"""FLOPs of a step are those of the profile, and peaks of devices are found by their names."""

import pytest
import torch
from torch import nn

import vescale
from vescale import _device_peaks
from vescale._device_peaks import peak_flops


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

    def forward(self, idx, targets):
        return nn.functional.cross_entropy(self.head(self.embed(idx)).flatten(0, 1), targets.flatten())


def test_the_count_of_a_batch_is_that_of_the_profile():
    tokens = torch.zeros(3, 8, dtype=torch.long)
    counted = vescale.count_flops(Net(), {"idx": tokens, "targets": tokens})
    assert counted / tokens.numel() == vescale.plan.profile(Net(), sequence_length=8).flops_per_token == 6 * 16 * 32


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
