"""A training whose parameters and state are saved as DTensors goes on with any number of data-parallel ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale import checkpoint
from vescale.dtensor import RaggedShard, Shard, distribute_tensor, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import gather_state, run_ranks

BLOCKS = {r"layers\.\d\.weight": "rows", "experts": "expert"}

#: Data-parallel ranks and settings of the runs, each of which loads what the one before has saved.
RUNS = [
    (2, {"zero": 3}),
    (3, {"zero": 1, "granularity": BLOCKS, "bucket_bytes": 200}),
    (4, {"zero": 3, "granularity": BLOCKS}),
    (2, {"zero": 2}),
    (1, {"zero": 3}),
]


class Net(nn.Module):
    """Odd sizes, a stack of experts and a parameter that one rank has."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 6)])
        self.experts = nn.Parameter(torch.randn(5, 6, 2))
        self.tiny = nn.Parameter(torch.ones(1))

    def forward(self, x):
        x = self.layers[1](torch.tanh(self.layers[0](x)))
        return torch.einsum("bi,eio->beo", x, self.experts) * self.tiny


def build(seed, settings):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(Net().double(), mesh["dp"], **settings)
    return model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)


def step(model, optimizer):
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model(x.chunk(dist.get_world_size())[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors(model, optimizer):
    """Return parameters and state as what is saved, all DTensors."""
    state = {}
    for fqn, entries in optimizer.state_dict()["state"].items():
        state[fqn] = {name: v.to_dtensor() if hasattr(v, "to_dtensor") else v for name, v in entries.items()}
    return {"params": model.sharded_parameters(), "state": state}


def values(model, optimizer):
    with model.unsharded():
        params = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    return params, gather_state(optimizer.state_dict()["state"])


def load(folder, model, optimizer):
    found = tensors(model, optimizer)
    checkpoint.load(folder, found)
    model.gather_parameters()
    loaded = optimizer.state_dict()
    loaded["state"] = found["state"]
    optimizer.load_state_dict(loaded)


def assert_equal(actual, expected):
    for fqn, value in expected[0].items():
        assert torch.equal(actual[0][fqn], value), fqn
    for fqn, entries in expected[1].items():
        for name, value in entries.items():
            assert torch.equal(actual[1][fqn][name], value), (fqn, name)


def run(folder, before, settings, expected):
    model, optimizer = build(0 if before is None else 1, settings)
    if before is not None:
        step(model, optimizer)
        assert not torch.equal(values(model, optimizer)[0]["experts"], expected[0]["experts"])
        load(before, model, optimizer)
        assert_equal(values(model, optimizer), expected)
    step(model, optimizer)
    saved = tensors(model, optimizer)
    if dist.get_world_size() > 1:
        assert all(isinstance(value.placements[0], RaggedShard) for value in saved["params"].values())
    checkpoint.save(folder, saved)
    return values(model, optimizer)


def test_runs_continue_each_other(tmp_path):
    before, expected = None, None
    for index, (num_ranks, settings) in enumerate(RUNS):
        folder = str(tmp_path / str(index))
        expected, *others = run_ranks(run, num_ranks, folder, before, settings, expected)
        for other in others:
            assert_equal(other, expected)
        before = folder


def other_axis(folder, expected):
    """Load without a DDP, in placements of torch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    params = {
        fqn: distribute_tensor(torch.zeros_like(value), mesh, [Shard(value.ndim - 1)])
        for fqn, value in expected[0].items()
    }
    checkpoint.load(folder, {"params": params}, strict=False)
    assert all(torch.equal(params[fqn].full_tensor(), value) for fqn, value in expected[0].items())
    assert all(isinstance(value, DTensor) for value in params.values())


def test_another_program_reads_them_in_other_placements(tmp_path):
    folder = str(tmp_path / "it")
    expected, *_ = run_ranks(run, 3, folder, None, {"zero": 3, "granularity": BLOCKS}, None)
    run_ranks(other_axis, 2, folder, expected)
