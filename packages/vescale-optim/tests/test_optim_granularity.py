"""`DDP(granularity=...)`: what must not be cut is on one rank, and training stays what it is, bit for bit."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale.dtensor import deferred_init, distribute_tensor
from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import TrainingRecord, assert_same_training, ranks


class Net(nn.Module):
    """Matrices, a stack of experts, a tied weight, a frozen layer and a 0-dim parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 9), nn.Linear(9, 6)])
        self.experts = nn.Parameter(torch.randn(5, 6, 4))
        self.out = nn.Linear(4, 9)
        self.back = nn.Linear(9, 6, bias=False)
        self.back.weight = self.layers[1].weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        x = self.layers[1](torch.tanh(self.layers[0](x)))
        x = torch.einsum("bi,eio->bo", self.frozen(x), self.experts)
        return self.back(self.out(x)) * self.scale


GRANULARITY = {
    r"layers\.\d\.weight": "tensor",
    "layers.0.weight": "rows",
    "experts": "expert",
    re.compile(r"out\..*"): 3,
    "frozen.weight": ("dim0", 2),
    "scale": "rows",
}
BLOCKS = {
    "layers.0.weight": 6,
    "layers.1.weight": 54,
    "experts": 24,
    "out.weight": 3,
    "out.bias": 3,
    "frozen.weight": 12,
    "scale": 1,
}


def build():
    torch.manual_seed(0)
    return Net().double()


def wrapped(module=None, *, zero, granularity=GRANULARITY, mesh=None, **settings):
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DDP(module or build(), mesh, zero=zero, granularity=granularity, **settings)


def train(model, *, optimizer_class=torch.optim.AdamW, clip=0.5):
    optimizer = DistributedOptimizer(optimizer_class, model=model, lr=0.05, clip_grad_norm=clip)
    norms = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
        norms += [] if clip is None else [optimizer.grad_norm]
        optimizer.zero_grad()
    with model.unsharded():
        return TrainingRecord.collect(model.module, optimizer, losses=[], grad_norms=norms)


def cuts(model):
    """Return, by name, where parameters are cut."""
    every = [(bucket.plan, slot) for bucket in model._reducer.buckets for slot in bucket.plan.slots]
    if model.zero == 3:
        every += [(plan, slot) for plan in model._sharded._frozen_plan.buckets for slot in plan.slots]
    return {
        slot.fqn: {plan.part(slot, coord).stop for coord in range(plan.num_shards)} - {0, slot.numel}
        for plan, slot in every
    }


def broken(model):
    return {fqn for fqn, at in cuts(model).items() if any(cut % BLOCKS.get(fqn, 1) for cut in at)}


@ranks(3)
def test_blocks_are_whole_and_training_is_the_same_bit_for_bit():
    plain = train(wrapped(zero=2, granularity=None, reduction="ordered"))
    for zero in (1, 2, 3):
        for bucket_bytes in (1, 1000, 2**20):
            model = wrapped(zero=zero, reduction="ordered", bucket_bytes=bucket_bytes)
            assert broken(model) == set()
            assert_same_training(train(model), plain, bitwise=True)
    assert broken(wrapped(zero=2, granularity=None)), "the test is of no use: nothing is cut without granularity, too"
    assert any(cuts(wrapped(zero=2)).values()), "nothing is cut at all"


@ranks(2)
def test_muon_and_sums_of_the_backend_with_two_ranks():
    """Sums of two are the same in any order, so here the bits are, too."""
    for optimizer_class in (torch.optim.AdamW, Muon):
        options = {"optimizer_class": optimizer_class, "clip": None}
        plain = train(wrapped(zero=1, granularity=None), **options)
        for zero in (1, 2, 3):
            model = wrapped(zero=zero, granularity={".*": "tensor"})
            assert not any(cuts(model).values())
            assert_same_training(train(model, **options), plain, bitwise=True)


def parallel(mesh):
    module = nn.Module()
    for name, num_rows, placement in (("rows", 6, Shard(0)), ("columns", 6, Shard(1)), ("whole", 24, Replicate())):
        value = distribute_tensor(torch.randn(num_rows, 10), mesh["tp"], [placement])
        module.register_parameter(name, nn.Parameter(value))
    return module


@ranks(4)
def test_tensor_parallel_shards_are_cut_between_their_own_rows():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = cuts(DDP(parallel(mesh), mesh["dp"], zero=1, granularity={".*": "rows"}))
    assert any(found.values())
    assert all(cut % {"rows": 10, "columns": 5, "whole": 10}[fqn] == 0 for fqn, at in found.items() for cut in at)
    with pytest.raises(ValueError, match=r"'columns': blocks of 20 elements do not divide its shape \(6, 5\) on some"):
        DDP(parallel(mesh), mesh["dp"], zero=1, granularity={"columns": 20, "rows": 10})


@ranks(4)
def test_uneven_shards_are_cut_alike():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for granularity in (None, {"a": "rows", "b": ("dim0", 3)}):
        module = nn.Module()
        for name, shape, placement in [("a", (7, 9), Shard(0)), ("b", (9, 7), Shard(1)), ("c", (150,), Replicate())]:
            value = distribute_tensor(torch.randn(shape), mesh["tp"], [placement])
            module.register_parameter(name, nn.Parameter(value))
        model = DDP(module, mesh["dp"], zero=1, granularity=granularity)
        places = {s.fqn: (s.start, b.plan.shard_numel) for b in model._reducer.buckets for s in b.plan.slots}
        every = [None] * 4
        dist.all_gather_object(every, (places, cuts(model)["c"], cuts(model)["b"]))
        assert all(held[:2] == every[0][:2] for held in every)
        assert every[0][1] or granularity, "nothing is cut"
        assert granularity is None or not any(held[2] for held in every)  # 3 x 4 and 3 x 3 elements: not cut


def padding_warnings(granularity):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        wrapped(nn.Linear(64, 1024, bias=False), zero=1, granularity=granularity)
    return [str(warning.message) for warning in found if "granularity" in str(warning.message)]


@ranks(4)
def test_buffers_that_are_mostly_padding_are_warned_of():
    (text,) = padding_warnings({"weight": "tensor"})
    assert "the buffer of 65536 elements 262144 large: no shard can be smaller than a block of 'weight'" in text
    assert padding_warnings({"weight": "rows"}) == []


WRONG = [
    (
        {"layer.0.weight": "rows"},
        ValueError,
        r"'layer.0.weight' matches no parameter of Net; near in the module: \['layers.0.w",
    ),
    ({r"(": "rows"}, ValueError, r"'\(' is neither a parameter nor a regular expression"),
    ({"layers.0.weight": 7}, ValueError, r"'layers.0.weight': blocks of 7 elements do not divide its shape \(9, 6\)"),
    ({"layers.0.weight": ("dim0", 4)}, ValueError, r"blocks of 4 indices of dim 0 do not divide its shape \(9, 6\)"),
    ({"layers.0.weight": "expert"}, ValueError, r"'expert' is for a stack of matrices, .* its shape is \(9, 6\)"),
    ({"out.*": "rows", r"out\.weight.?": 3}, ValueError, r"'out.\*' says 'rows' and .* says 3 of the parameter 'out.w"),
    ({"experts": "experts"}, ValueError, r"granularity of 'experts' must be .*, got 'experts'"),
    ({"experts": 0}, ValueError, r"granularity of 'experts' must be .*, got 0"),
    ({"experts": True}, ValueError, r"granularity of 'experts' must be .*, got True"),
    ({"experts": ("dim1", 2)}, ValueError, r"granularity of 'experts' must be .*, got \('dim1', 2\)"),
    ({3: "rows"}, TypeError, r"a key must be a name of a parameter or a regular expression, got 3"),
    ("rows", TypeError, r"granularity must map names of parameters, or regular expressions, to"),
]


@ranks(2)
def test_deferred_modules_are_cut_alike():
    torch.manual_seed(0)
    model = wrapped(deferred_init(Net), zero=3)
    assert broken(model) == set()
    torch.manual_seed(0)
    plain = wrapped(Net(), zero=3)
    assert cuts(model) == cuts(plain)
    with model.unsharded(), plain.unsharded():
        for (fqn, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours, theirs), fqn


@ranks(2)
def test_nonsense_is_refused_before_anything_is_sent():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for granularity, error, text in WRONG:
        if dist.get_rank() == 0:  # alone: a collective would wait for the other rank
            with pytest.raises(error, match=text):
                wrapped(zero=1, granularity=granularity, mesh=mesh)
    with pytest.raises(ValueError, match=r"which needs zero=1, 2 or 3, got zero=0"):
        wrapped(zero=0)
    wrapped(zero=1, granularity={})


@ranks(2)
def test_ranks_must_say_the_same():
    with pytest.raises(ValueError, match="the module given to DDP, or a setting, differs"):
        wrapped(zero=1, granularity={".*": "tensor"} if dist.get_rank() else None)
