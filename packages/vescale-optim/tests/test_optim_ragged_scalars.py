"""A parameter without dims, which one rank owns, is a DTensor of one element: live, whole by `full_tensor`, loaded."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from vescale.dtensor import RaggedShard
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import gather_state, ranks


class Scaled(nn.Module):
    """A layer and two gains; with a mesh, the second is replicated over it."""

    def __init__(self, mesh=None):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.tensor(2.0))
        other = torch.tensor(3.0)
        self.other = nn.Parameter(other if mesh is None else distribute_tensor(other, mesh, [Replicate()]))

    def forward(self, x):
        other = self.other.full_tensor() if isinstance(self.other, DTensor) else self.other
        return self.gain * self.layer(x) * other


def build(zero, mesh, *, seed=0, tp=None):
    torch.manual_seed(seed)
    module = Scaled(tp).double()
    with torch.no_grad():
        for param in (module.gain, module.other):
            param.add_(seed)
    model = DDP(module, mesh, zero=zero, per_rank=True)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def whole(model):
    with model.unsharded():
        return {fqn: getattr(p, "_local_tensor", p).detach().clone() for fqn, p in model.named_parameters()}


def is_ragged(tensor):
    return any(isinstance(placement, RaggedShard) for placement in tensor.placements)


def check(zero, mesh, *, tp=None):
    model, optimizer = build(zero, mesh, tp=tp)
    params, shards = whole(model), model.sharded_parameters()
    state = optimizer.state_dict()["state"]
    saved, moments = gather_state(state), {fqn: state[fqn]["exp_avg"].to_dtensor() for fqn in ("gain", "other")}
    for fqn, moment in moments.items():
        assert is_ragged(moment)
        assert moment.shape == (1,)
        assert moment.full_tensor().item() == saved[fqn]["exp_avg"].item() != 0
        assert is_ragged(shards[fqn]) == (zero == 3)
        assert shards[fqn].shape == ((1,) if zero == 3 else ())
        assert shards[fqn].full_tensor().item() == params[fqn].item()
    copies = {fqn: shard.clone() for fqn, shard in shards.items()}
    given = {fqn: {**state[fqn], "exp_avg": moments[fqn].clone()} if fqn in moments else state[fqn] for fqn in state}
    other, its_optimizer = build(zero, mesh, seed=1, tp=tp)
    assert whole(other)["gain"] != params["gain"]
    other.load_state_dict(copies)
    its_optimizer.load_state_dict({**optimizer.state_dict(), "state": given})
    for each in ((model, optimizer), (other, its_optimizer)):
        step(*each)
    for fqn, value in whole(model).items():
        assert torch.equal(whole(other)[fqn], value), fqn
    if zero == 3:  # in the memory that the optimizer updates
        model.sharded_parameters()["gain"].to_local().fill_(5.0)
        model.gather_parameters()
        assert whole(model)["gain"] == 5


@ranks(3)
def test_over_one_axis():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for zero in (1, 2, 3):
        check(zero, mesh["dp"])


@ranks(4)
def test_over_tensor_parallelism_too_and_in_other_shapes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    check(3, mesh["dp"], tp=mesh["tp"])
    _, optimizer = build(3, mesh["dp"])
    piece = optimizer.state_dict()["state"]["gain"]["exp_avg"]
    piece.load(distribute_tensor(torch.tensor(7.0).double(), mesh["dp"], [Replicate()]))
    assert piece.to_dtensor().full_tensor().item() == 7
    with pytest.raises(ValueError, match=r"state of 'gain' has global shape \(\), got \(2,\)"):
        piece.load(distribute_tensor(torch.zeros(2).double(), mesh["dp"], [Replicate()]))
