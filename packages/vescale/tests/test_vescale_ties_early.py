"""A weight that stages share is refused under ZeRO 3 before there is a process group."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale


class Tied(nn.Module):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def refusal(**fields):
    with pytest.raises(ValueError) as found:
        vescale.parallelize(vescale.Plan(pp=2, **fields), Tied(), torch.optim.SGD, loss_fn=torch.sum)
    assert not dist.is_initialized()
    return str(found.value)


def test_of_shards():
    assert refusal(dp=2, zero=3) == (
        "parallelize: expected no weight that stages share for Plan(zero=3, dp=2), since each rank holds a shard of it "
        "between forwards, got embed.weight (stage 0) = head.weight (stage 1); use zero=2, or pp=1"
    )


@pytest.mark.parametrize(
    "fields", [{"dp": 2, "zero": 2}, {"dp": 1, "zero": 3}, {"dp": 2, "zero": 3, "dp_replicate": 2}]
)
def test_of_whole_weights_it_gets_to_the_processes(fields):
    assert "processes, got 1" in refusal(**fields)
