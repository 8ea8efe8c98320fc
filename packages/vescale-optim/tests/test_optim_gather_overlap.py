"""Gathers of parameters (ZeRO 1, 2) overlap with the next forward; a read of a parameter waits for its gather."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

EYE = torch.eye(6, dtype=torch.float64)


def layers():
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)]).double()


def wrapped(module=None, mesh=None, **settings):
    """Return a DDP with a bucket per layer, and its optimizer."""
    mesh = mesh or init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(module or layers(), mesh["dp"], **{"zero": 2, "bucket_bytes": 400, **settings})
    return model, DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)


def train(model, optimizer):
    model(EYE).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def waiting(model):
    """Return the names of the parameters whose values are on their way."""
    return [fqn for fqn, param in model.named_parameters() if type(param).__name__.startswith("InFlight")]


def start_gather(model, value):
    """Let every rank's part of every parameter have a value, and gather them."""
    for slot in model.slots().values():
        slot.value_part.fill_(value)
    model.gather_parameters()


def events_of_step_and_forward(on_gathers, *, overlap, held_back=False):
    """Return in which order layers run and gathers end; rank 1 may hold back the last gather till layer 0 has run."""
    control = dist.new_group([0, 1])
    message = torch.zeros(1)
    events = []
    model, optimizer = wrapped(overlap=overlap)

    def hold_back(bucket):
        if held_back and bucket == 0 and dist.get_rank() == 1:
            dist.recv(message, src=0, group=control)

    def layer_has_run(index):
        events.append(f"layer {index}")
        if held_back and index == 0 and dist.get_rank() == 0:
            dist.send(message, dst=1, group=control)

    with pytest.MonkeyPatch.context() as patch:
        on_gathers(patch, hold_back, lambda bucket: events.append(f"bucket {bucket}"))
        train(model, optimizer)
        for index, layer in enumerate(model.module):
            layer.register_forward_hook(lambda *_, index=index: layer_has_run(index))
        return events, model(EYE)


@ranks(2)
def test_forward_begins_before_the_last_gather_has_ended(on_gathers):
    events, overlapped = events_of_step_and_forward(on_gathers, overlap=True, held_back=True)
    assert events == [f"{what} {i}" for layer in range(4) for what, i in (("bucket", 3 - layer), ("layer", layer))]
    events, expected = events_of_step_and_forward(on_gathers, overlap=False)
    assert events == [f"bucket {i}" for i in (3, 2, 1, 0)] + [f"layer {i}" for i in range(4)]
    assert torch.equal(overlapped, expected)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return 2 * x


def saved(p):
    file = io.BytesIO()
    torch.save(p, file)
    file.seek(0)
    return torch.load(file)


@torch.no_grad()
def from_all_ranks(p):
    whole = torch.empty(2, *p.shape, dtype=p.dtype)
    dist.all_gather(list(whole), p)
    return whole


def out_of(module, p):
    """Return what a layer whose parameters are all one value computes, divided so that it is this value."""
    return module(torch.eye(6, dtype=p.dtype)) / 2


#: What reads a parameter whose elements are all one value, and returns tensors with that value.
READS = {
    "operator": lambda p, _: p * 1,
    "data": lambda p, _: p.data,
    "detach": lambda p, _: p.detach(),
    "numpy": lambda p, _: torch.from_numpy(np.asarray(p.detach())),
    "tolist": lambda p, _: torch.tensor(p.tolist()),
    "item": lambda p, _: torch.tensor(p[0, 0].item()),
    "iteration": lambda p, _: torch.stack(list(p)),
    "storage": lambda p, _: torch.tensor(p.untyped_storage().tolist()) * 0 + p.data_ptr() * 0 + p.detach().mean(),
    "copy": lambda p, _: copy.deepcopy(p),
    "pickle": lambda p, _: pickle.loads(pickle.dumps(p)),
    "save": lambda p, _: saved(p),
    "text": lambda p, _: torch.tensor(float(repr(p).split("[[")[1].split(",")[0])),
    "list of tensors": lambda p, _: torch._foreach_mul([p], 1)[0],
    "operator of the dispatcher": lambda p, _: torch.ops.aten.mul.Tensor(p, 1),
    "autograd function": lambda p, _: Double.apply(p) / 2,
    "source of a copy": lambda p, _: torch.empty(6, 6, dtype=p.dtype).copy_(p),
    "collective": lambda p, _: from_all_ranks(p),
    "state dict": lambda _, model: model.state_dict()["0.weight"],
    "state dict of the module": lambda _, model: model.module.state_dict()["0.weight"],
    "part of the module": lambda p, model: out_of(model.module[0], p),
    "without gradients": torch.no_grad()(lambda p, model: out_of(model.module[0], p)),
    "inference mode": torch.inference_mode()(lambda p, model: out_of(model.module[0], p) + 0),
    "functional call": lambda p, model: out_of(
        lambda x: functional_call(model.module[0], dict(model.module[0].named_parameters()), x), p
    ),
    "checkpoint": lambda p, model: checkpoint(lambda x: out_of(model.module[0], x), p, use_reentrant=False),
    "vmap": lambda p, _: torch.vmap(lambda x: x * p)(torch.ones(1, 6, 6)),
    "module's copy": lambda _, model: copy.deepcopy(model.module[0]).weight,
}


@ranks(2)
def test_every_way_to_read_a_parameter_waits(late_gathers):
    late_gathers(pytest.MonkeyPatch())
    model, _ = wrapped()
    unguarded = model.module[0].weight.detach()  # an alias from before
    missed = []
    for number, (name, read) in enumerate(READS.items(), start=2):
        start_gather(model, float(number))
        assert "0.weight" in waiting(model)
        assert not torch.equal(unguarded, torch.full_like(EYE, number))
        if not (read(model.module[0].weight, model) == number).all():
            missed.append(name)
        model.wait_for_parameters()
        assert (model.module[0].weight == number).all()
    assert missed == []


def local_tensor(param):
    """Return the tensor inside of a DTensor, by the protocol of tensor subclasses."""
    names, _ = param.__tensor_flatten__()
    return next(value for name in names if isinstance(value := getattr(param, name), torch.Tensor))


@ranks(2)
def test_every_way_to_read_a_dtensor_waits(late_gathers):
    late_gathers(pytest.MonkeyPatch())
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    module = layers()
    for layer in module:
        layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
        layer.bias = nn.Parameter(distribute_tensor(layer.bias.detach(), mesh["tp"], [Replicate()]))
    model, _ = wrapped(module, mesh)
    reads = {
        "to_local": lambda p: p.to_local(),
        "to_local without gradients": torch.no_grad()(lambda p: p.to_local()),
        "full_tensor": lambda p: p.full_tensor(),
        "redistribute": lambda p: p.redistribute(placements=[Replicate()]).to_local(),
        "the local tensor itself": lambda p: local_tensor(p) * 1,
        "operator": lambda p: (p * 1).full_tensor(),
        "data": lambda p: p.data.full_tensor(),
        "copy": lambda p: copy.deepcopy(p).full_tensor(),
        "state dict": lambda _: model.state_dict()["0.weight"].full_tensor(),
        "text": lambda p: torch.tensor(float(repr(p).split("[[")[1].split(",")[0])),
    }
    missed = []
    for number, (name, read) in enumerate(reads.items(), start=2):
        start_gather(model, float(number))
        if not (read(model.module[0].weight) == number).all():
            missed.append(name)
        model.wait_for_parameters()
    assert missed == []


@ranks(2)
def test_what_needs_no_values_does_not_wait():
    model, optimizer = wrapped()
    train(model, optimizer)
    param = model.module[0].weight
    assert (param.shape, param.dtype, param.device.type, param.numel()) == ((6, 6), torch.float64, "cpu", 36)
    assert (param.requires_grad, param.is_leaf, param.grad) == (True, True, None)
    assert isinstance(param, nn.Parameter)
    optimizer.zero_grad()
    optimizer.state_dict()
    model.train()
    assert len(waiting(model)) == 8
    param.sum()
    assert waiting(model) == [f"{layer}.{kind}" for layer in (1, 2, 3) for kind in ("weight", "bias")]


#: Ways to write 7 into a parameter.
WRITES = {
    "fill_": torch.no_grad()(lambda p, _: p.fill_(7)),
    "data": lambda p, _: p.data.fill_(7),
    "setitem": torch.no_grad()(lambda p, _: p.__setitem__(slice(None), 7)),
    "init": lambda p, _: nn.init.constant_(p, 7),
    "copy_": torch.no_grad()(lambda p, _: p.copy_(torch.full((6, 6), 7.0))),
    "out": torch.no_grad()(lambda p, _: torch.mul(torch.full_like(EYE, 7), 1, out=p)),
    "state dict": lambda _, model: model.load_state_dict({"0.weight": torch.full((6, 6), 7.0)}, strict=False),
}


@ranks(2)
def test_what_is_written_after_a_step_stays(late_gathers):
    """Were it written before the gather has ended, the gather would overwrite it."""
    late_gathers(pytest.MonkeyPatch())
    model, _ = wrapped()
    lost = []
    for number, (name, write) in enumerate(WRITES.items(), start=10):
        start_gather(model, float(number))
        write(model.module[0].weight, model)
        model.wait_for_parameters()
        if not (model.module[0].weight == 7).all() or not (model.module[0].bias == number).all():
            lost.append(name)
    assert lost == []


@ranks(2)
def test_a_backward_of_a_forward_before_the_step_is_an_error_as_in_one_process():
    plain = layers()
    one = plain, torch.optim.SGD(plain.parameters(), lr=0.1)
    for model, optimizer in (one, wrapped(), wrapped(overlap=False), wrapped(zero=1)):
        model(EYE).sum().backward()
        loss = model(EYE).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@ranks(2)
def test_parameters_without_gradients_may_be_used_by_an_earlier_forward_as_in_one_process():
    def gradients(model, optimizer):
        first, second = model[0](EYE).sum(), (model[1](EYE) ** 2).sum()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()
        second.backward()
        optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    plain = layers()
    expected = gradients(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model, optimizer = wrapped()
    actual = gradients(model.module, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
