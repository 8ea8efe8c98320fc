"""Offload to host memory: the bits of ZeRO 3 without it, with everything that ZeRO 3 works with."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.dtensor import deferred_init
from vescale.optim import DDP, DistributedOptimizer, clip_grad_norm_
from vescale_testing import ranks

WIDTH = 6


class Block(nn.Module):
    """Two layers, a norm whose gradient is small, and a parameter without dims."""

    def __init__(self, *, frozen):
        super().__init__()
        self.up = nn.Linear(WIDTH, 9)
        self.norm = nn.LayerNorm(9)
        self.down = nn.Linear(9, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.down.requires_grad_(not frozen)

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.norm(self.up(x))))


class Net(nn.Module):
    """Blocks, one partly frozen, one used twice, one never used; a weight tied across the root unit."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([Block(frozen=index == 1) for index in range(4)])
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for index in (0, 1, 2, 0):
            x = self.layers[index](x)
        return self.head(x)


def build(dtype=torch.float64):
    torch.manual_seed(3)
    return Net().to(dtype)


def loss_of(model, step, micro, *, coord, size):
    generator = torch.Generator().manual_seed(100 * step + micro)
    batch = torch.randint(0, 11, (12, 3), generator=generator).chunk(size)[coord]
    return nn.functional.cross_entropy(model(batch).flatten(0, 1).double(), batch.roll(1, 1).flatten())


def dp_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))["dp"]


def train(
    offload,
    *,
    mesh=None,
    module=None,
    optimizer_class=torch.optim.AdamW,
    optimizer_settings=None,
    micros=1,
    sync=False,
    scale=None,
    weight=1.0,
    clip=None,
    **settings,
):
    """Train 3 steps; return what was seen on the way, and all parameters."""
    mesh = dp_mesh() if mesh is None else mesh
    model = DDP(build() if module is None else module(), mesh, zero=3, offload=offload, **settings)
    optimizer = DistributedOptimizer(optimizer_class, model=model, lr=0.05, **(optimizer_settings or {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1, enabled=scale is not None)
    seen = []
    part = {"coord": model.data_axes.all.coord, "size": model.data_axes.all.size}
    for step in range(3):
        for micro in range(micros):
            with contextlib.nullcontext() if sync or micro == micros - 1 else model.no_sync():
                loss = loss_of(model, step, micro, **part) * weight / micros
                scaler.scale(loss).backward()
            seen.append(loss.detach().clone())
        if clip is not None:
            seen.append(clip_grad_norm_(model, clip))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    seen += [] if scale is None else [torch.tensor(scaler.get_scale())]
    state = optimizer.full_state_dict()["state"]
    seen += [value for number in sorted(state) for _, value in sorted(state[number].items())]
    with model.unsharded():
        return seen, {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def assert_same(actual, expected):
    assert len(actual[0]) == len(expected[0])
    assert actual[1].keys() == expected[1].keys()
    for one, other in zip([*actual[0], *actual[1].values()], [*expected[0], *expected[1].values()], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


CASES = {
    "plain": {},
    "accumulation": {"micros": 3, "reduction": "ordered", "clip": 0.5, "optimizer_settings": {"foreach": True}},
    "fused": {"optimizer_settings": {"fused": True, "clip_grad_norm": 0.5}},
    "reduced every time": {"micros": 2, "sync": True, "reduction": "ordered"},
    "keep": {
        "reshard_after_forward": False,
        "granularity": {r".*weight": "rows"},
        "optimizer_class": torch.optim.SGD,
        "optimizer_settings": {"momentum": 0.9},
    },
    "no overlap": {"prefetch": False, "overlap": False, "bucket_bytes": 64, "micros": 2, "sync": True},
    "masters": {
        "module": lambda: build(torch.float32),
        "param_dtype": torch.bfloat16,
        "grad_dtype": torch.float32,
        "optimizer_settings": {"state_dtype": torch.bfloat16},
    },
    "scaled": {"module": lambda: build(torch.float32), "scale": 2.0**127, "weight": 2.0},
}


@ranks(2)
def test_every_setting_has_the_bits_of_no_offload():
    records = {}
    for name, case in CASES.items():
        records[name] = train(True, **case)
        assert_same(records[name], train(False, **case))
    with pytest.raises(AssertionError):
        assert_same(records["plain"], records["fused"])
    assert any(torch.equal(value, torch.tensor(2.0**126)) for value in records["scaled"][0])  # a step was skipped


def stale_values(_bring):
    """Bring, from the second time on, the values of the first."""

    def bring(host, target, home, then):
        first = vars(host).setdefault("first", {}).setdefault(home.data_ptr(), home.clone())
        target.copy_(first)
        return then()

    return bring


def lost_gradients(_keep):
    """Keep the gradients of the first step, and no later ones."""

    def keep(_host, home, value):
        if not home.any():
            home.copy_(value)

    return keep


@ranks(2)
def test_a_stale_copy_or_a_gradient_that_is_not_brought_back_is_seen(monkeypatch, fault):
    expected = train(False)
    places = {"a shard is copied to the device": stale_values, "a gradient is copied to the host": lost_gradients}
    for place, make in places.items():
        with monkeypatch.context() as patch:
            fault(patch, place, make)
            actual = train(True)
        torch.testing.assert_close(actual[0][0], expected[0][0], rtol=0, atol=0)  # the first forward is right
        with pytest.raises(AssertionError):
            assert_same(actual, expected)


def tensor_parallel(mesh):
    """Return a model whose first layers are cut over tp, and whose norms get gradients that are partial sums."""
    model = build()
    for block in model.layers:
        for part, placements in (
            (block.up, {"weight": Shard(0), "bias": Shard(0)}),
            (block.down, {"weight": Shard(1)}),
        ):
            for name, param in [*part.named_parameters()]:
                cut = distribute_tensor(param.detach(), mesh, [placements.get(name, Replicate())])
                setattr(part, name, nn.Parameter(cut, requires_grad=param.requires_grad))
        for name, param in [*block.norm.named_parameters()]:
            setattr(block.norm, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()])))
        block.forward = lambda x, block=block: block_of_dtensors(block, x, mesh)
    return model


def block_of_dtensors(block, x, mesh):
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    hidden = block.up(whole).redistribute(mesh, [Shard(0)])
    hidden = torch.tanh(block.norm(hidden)).redistribute(mesh, [Shard(2)])
    return x + block.gain * block.down(hidden).full_tensor()


@ranks(4)
def test_tensor_parallel_and_hybrid():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for case in ({"clip": 0.5, "reduction": "ordered"}, {"micros": 2, "sync": True, "scale": 4.0}):
        parallel = {"mesh": mesh["dp"], "module": lambda: tensor_parallel(mesh["tp"]), "per_rank": True}
        assert_same(local(train(True, **case, **parallel)), local(train(False, **case, **parallel)))
        case |= {"mesh": mesh, "module": build}
        assert_same(train(True, **case), train(False, **case))


def local(record):
    return record[0], {fqn: getattr(value, "_local_tensor", value) for fqn, value in record[1].items()}


def one_process():
    model = build()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(3):
        loss_of(model, step, 0, coord=0, size=1).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach() for fqn, p in model.named_parameters()}


@ranks(1)
def test_one_rank_frees_its_parameters_and_has_the_bits_of_one_process():
    _, actual = train(True)
    for fqn, value in one_process().items():
        torch.testing.assert_close(actual[fqn], value, rtol=0, atol=0)
    model = DDP(build(), dp_mesh(), zero=3, offload=True)
    with pytest.raises(RuntimeError, match=r"reads or writes the parameter 'embed\.weight', which has no values here"):
        model.embed.weight.sum()


@ranks(2)
def test_a_deferred_module_is_offloaded_as_it_is_made():
    def deferred():
        torch.manual_seed(3)
        return deferred_init(Net)

    def eager():
        return build(torch.float32)

    assert_same(train(True, module=deferred), train(False, module=eager))
