"""Ragged and interleaved tensors, with their AdamW state, are saved in one layout and loaded in another."""

import torch

from vescale import checkpoint
from vescale.dtensor import InterleavedShard, RaggedShard, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_testing import ranks

LAYOUTS = {
    "ragged": [RaggedShard((0, 1), (3, 0, 1, 2)), RaggedShard((0,), (1, 1, 2, 2))],
    "interleaved": [InterleavedShard(0, 3), InterleavedShard(1, 2)],
    "plain": [Shard(0), Replicate()],
}


class Two(torch.nn.Module):
    def __init__(self, placements):
        super().__init__()
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(distribute_tensor(torch.randn(12, 8), mesh, [p])) for p in placements
        )


def trained(placements, seed):
    """Return a model after two steps of AdamW with gradients that depend on `seed`, and the optimizer."""
    model = Two(placements)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for step in range(2):
        for i, weight in enumerate(model.weights):
            generator = torch.Generator().manual_seed(100 * seed + 10 * step + i)
            grad = torch.randn(weight.shape, generator=generator)
            weight.grad = distribute_tensor(grad, weight.device_mesh, weight.placements)
        optimizer.step()
    return model, optimizer


def values(model, optimizer):
    state = [optimizer.state[w][name] for w in model.weights for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().full_tensor().clone() for tensor in (*model.weights, *state)]


@ranks(4)
def test_every_layout_loads_every_other(tmp_path):
    for saved, placements in LAYOUTS.items():
        model, optimizer = trained(placements, seed=1)
        checkpoint.save(tmp_path / saved, {"model": model, "optimizer": optimizer})
        for loaded in LAYOUTS.values():
            other, its_optimizer = trained(loaded, seed=2)
            before = values(other, its_optimizer)
            checkpoint.load(tmp_path / saved, {"model": other, "optimizer": its_optimizer})
            for actual, expected, old in zip(
                values(other, its_optimizer), values(model, optimizer), before, strict=True
            ):
                assert torch.equal(actual, expected), (saved, loaded)
                assert not torch.equal(actual, old)
