"""A model of four layers that each hold a part of their hidden units on every rank of an axis."""

from typing import ClassVar

import pytest
import torch
from torch import nn

from vescale.dtensor import Replicate, Shard

WIDTH = 8


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class _Layers(nn.Module):
    width = WIDTH
    module_plan: ClassVar = {
        "parameter": {
            r"layers.\d+.up.(weight|bias)": [Shard(0)],
            r"layers.\d+.down.weight": [Shard(1)],
        },
        "forward": {r"layers.\d+.up.input": [[Replicate()]], r"layers.\d+.down.output": [[Replicate()]]},
    }

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.fixture
def layers_class():
    return _Layers
