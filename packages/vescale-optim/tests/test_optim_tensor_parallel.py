"""Parameters that are DTensors over another axis are reduced and stepped, and the result is that of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import TrainingRecord, assert_same_training, halved, run_ranks

#: Rows of 7 over 2 ranks are uneven; a vector of 1 leaves the second rank of tp with nothing.
PLACEMENTS = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1), "gain": Shard(0)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)
        self.gain = nn.Parameter(torch.tensor([0.7]))

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x)))) * self.gain


def build():
    torch.manual_seed(3)
    return Block().double()


def shard(module, mesh):
    for fqn, param in list(module.named_parameters()):
        owner, _, name = fqn.rpartition(".")
        placed = distribute_tensor(param.detach(), mesh, [PLACEMENTS.get(fqn, Replicate())])
        setattr(module.get_submodule(owner), name, nn.Parameter(placed))
    return module


def put_gradients(model, whole, coord, size):
    """Give every parameter the gradient of this coord's part of the batch, through autograd, in its own layout."""
    for step_batch in batches(coord, size):
        reference = build()
        reference.load_state_dict(whole(model))
        loss = reference(step_batch).square().mean()
        grads = dict(
            zip(dict(reference.named_parameters()), torch.autograd.grad(loss, reference.parameters()), strict=True)
        )
        total = 0
        for fqn, param in model.named_parameters():
            grad = distribute_tensor(grads[fqn], param.device_mesh, param.placements).to_local()
            total = total + (param.to_local() * grad).sum()  # d/dparam is grad
        yield total


def batches(coord, size):
    for step in range(3):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        yield x.chunk(size)[coord]


def full_state(model):
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in model.state_dict().items()}


def on_ranks(shape, names, zero, clip):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = DDP(shard(build(), mesh["tp"]), mesh["dp"], zero=zero, bucket_bytes=200)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=clip)
    norms = []
    for loss in put_gradients(model, full_state, mesh.get_local_rank("dp"), mesh["dp"].size()):
        loss.backward()
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    return TrainingRecord.collect(model.module, optimizer, grad_norms=norms)


def one_process(clip):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for x in batches(0, 1):
        model(x).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip))
        optimizer.step()
        optimizer.zero_grad()
    return TrainingRecord.collect(model, optimizer, grad_norms=norms)


@halved
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize(
    "shape, names", [((2, 2), ("dp", "tp")), ((2, 2), ("tp", "dp")), ((1, 2), ("dp", "tp")), ((3, 1), ("dp", "tp"))]
)
def test_any_mesh(shape, names, zero):
    expected = one_process(0.05)
    for record in run_ranks(on_ranks, shape[0] * shape[1], shape, names, zero, 0.05):
        assert_same_training(record, expected, rtol=1e-12)


def without_tp_in_the_norm():
    pytest.MonkeyPatch().setattr("vescale.optim.clip._shard_axes", lambda _param: [])
    return on_ranks((2, 2), ("dp", "tp"), 1, 0.05)


def test_a_norm_that_forgets_an_axis_is_seen():
    with pytest.raises(AssertionError, match="differ"):
        assert_same_training(run_ranks(without_tp_in_the_norm, 4)[0], one_process(0.05), rtol=1e-12)


def test_parameters_stay_the_same_objects_and_dtensors():
    def body():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        module = shard(build(), mesh["tp"])
        before = dict(module.named_parameters())
        model = DDP(module, mesh["dp"], zero=2)
        assert all(param is before[fqn] for fqn, param in model.named_parameters())
        assert all(isinstance(param, DTensor) for param in model.parameters())
        for fqn, param in build().named_parameters():
            assert torch.equal(before[fqn].full_tensor(), param)

    run_ranks(body, 2)


def test_a_dtensor_over_the_data_parallel_axis_is_refused():
    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        module = nn.Linear(4, 4)
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(
            ValueError, match=r"'weight' is a DTensor over the axis 'dp' itself .*leave this one to DDP"
        ):
            DDP(module, mesh["dp"])

    run_ranks(body, 2)


@pytest.mark.parametrize("zero", [None, 0, 1, 2])
def test_gradients_in_other_placements_are_brought_to_those_of_the_parameter(zero):
    """Stock DTensor operators leave a Partial gradient of a replicated parameter, and a replica of a sharded one."""
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def build():
        torch.manual_seed(0)
        return nn.Linear(3, 2).double()

    def body():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        module = build()
        module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh["tp"], [Replicate()]))
        module.bias = nn.Parameter(distribute_tensor(module.bias.detach(), mesh["tp"], [Shard(0)]))
        batch = distribute_tensor(x, mesh["tp"], [Shard(0)])
        model = module if zero is None else DDP(module, mesh["dp"], zero=zero)
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1, clip_grad_norm=0.1)
        for _ in range(2):  # accumulates
            ((batch @ module.weight.T).square().sum() + (module.bias * 2).sum()).backward()
        optimizer.step()
        return module.weight.full_tensor().detach(), module.bias.full_tensor().detach()

    model = build()
    for _ in range(2):
        ((x @ model.weight.T).square().sum() + (model.bias * 2).sum()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for weight, bias in run_ranks(body, 2):
        torch.testing.assert_close(weight, model.weight.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(bias, model.bias.detach(), rtol=1e-12, atol=1e-14)


def test_every_rank_may_have_started_from_other_values():
    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        module = shard(build(), mesh["tp"])
        with torch.no_grad():
            for param in module.parameters():
                param.add_(dist.get_rank() // 2)  # the second coord of dp
        model = DDP(module, mesh["dp"], zero=1)
        for fqn, param in build().named_parameters():
            assert torch.equal(dict(model.named_parameters())[fqn].full_tensor(), param)

    run_ranks(body, 4)
