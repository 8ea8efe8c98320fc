"""The dry runs of static mode leave nothing behind that one call of the module would not."""

import torch
from torch import nn

from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import gather_full, ranks

PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {r"up\.input": [{"tp": Replicate()}], r"down\.output": [{"tp": Replicate()}]},
}
GENERATOR = torch.Generator()


class Net(nn.Module):
    """Keeps a list, a set and a dict, draws from a generator of the program, and decays a weight in its forward."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.shapes, self.seen, self.counts = [], set(), {}

    def forward(self, x):
        self.shapes.append(tuple(x.shape))
        self.seen.add(len(self.shapes))
        self.counts[len(self.shapes)] = 1
        with torch.no_grad():
            self.scale.mul_(0.5)
        noise = torch.rand(x.shape, generator=GENERATOR, dtype=x.dtype)
        return self.down(self.up(x).relu()) * self.scale + noise


def run(model):
    GENERATOR.manual_seed(3)
    outputs = []
    for step in range(2):
        model.zero_grad()
        out = model(torch.full((2, 4), step + 1.0, dtype=torch.float64))
        out.square().sum().backward()
        outputs.append(gather_full(out.detach()))
    gradients = [gather_full(p.grad) for p in model.parameters()]
    return [*outputs, *gradients, gather_full(model.scale.detach()), GENERATOR.get_state().double()]


def build():
    torch.manual_seed(0)
    return Net().double()


@ranks(2)
def test_generators_parameters_and_attributes():
    alone = build()
    expected = run(alone)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize_module(build(), mesh["tp"], PLAN, mode="static")
    for value, other in zip(run(model), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=0, atol=1e-10)
    assert (model.shapes, model.seen, model.counts) == (alone.shapes, alone.seen, alone.counts)
