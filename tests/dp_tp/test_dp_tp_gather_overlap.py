"""Gathers of parameters (ZeRO 1, 2) overlap with the forward of a tensor-parallel module, on local tensors, too."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.dmodule import parallelize_module, set_mode
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

pytestmark = pytest.mark.usefixtures("settled_sharing")

WHOLE = [{"tp": Replicate()}]
PLAN = {
    "parameter": {r"\d+\.up\.(weight|bias)": {"tp": Shard(0)}, r"\d+\.down\.weight": {"tp": Shard(1)}},
    "forward": {r"\d+\.up\.input": WHOLE, r"\d+\.down\.output": WHOLE},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class ScaledBlock(Block):
    """A block with parameters of its own, besides those of the layers of torch."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return x + self.down(self.up(x).relu()) * self.scale


def blocks(kind=Block):
    torch.manual_seed(0)
    return nn.Sequential(*[kind() for _ in range(3)]).double()


def tied_blocks():
    """Return blocks of which two share a bias."""
    module = blocks()
    module[2].down.bias = module[0].down.bias
    return module


def data_and_tensor_parallel():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def wrapped(mesh, module, *, zero=2, **settings):
    """Return a DDP with a bucket per block, and its optimizer."""
    module = parallelize_module(module, mesh["tp"], PLAN)
    bucket_bytes = sum(param.to_local().nbytes for param in module[1].parameters())
    model = DDP(module, mesh["dp"], bucket_bytes=bucket_bytes, zero=zero, **settings)
    return model, DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01)


def batch(mesh, seed=0):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]


def step(model, optimizer, x):
    (model(x) ** 2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def waiting(model):
    return [fqn for fqn, param in model.named_parameters() if type(param).__name__.startswith("InFlight")]


# ------------------------------------------------------------------------------------------------- same values


def train(mesh, *, modes, **settings):
    """Run each step in a mode; return parameters at the end, and how many are on their way after each step."""
    model, optimizer = wrapped(mesh, blocks(ScaledBlock), **settings)
    on_their_way = []
    for seed, mode in enumerate(modes):
        set_mode(model.module, mode)
        step(model, optimizer, batch(mesh, seed))
        on_their_way.append(len(waiting(model)))
    return [param.full_tensor() for param in model.parameters()], on_their_way


@ranks(4, timeout=120)
def test_modes_may_change_while_gathers_are_on_their_way(compile_with):
    compile_with("eager")
    modes = ("eager", "static", "static", "compile", "static", "eager")
    mesh = data_and_tensor_parallel()
    values, on_their_way = train(mesh, modes=modes)
    assert on_their_way == [0 if mode == "compile" else 15 for mode in modes]
    expected, never = train(mesh, modes=modes, overlap=False)
    assert not any(never)
    assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


# ------------------------------------------------------------------------------------------------- order


def events_of_step_and_forward(mesh, monkeypatch, on_gathers, *, overlap, held_back=False):
    """Return in which order blocks run and gathers end; coord 1 may hold the last back till coord 0 has run block 0."""
    coord, (first, second) = mesh.get_local_rank("dp"), mesh["dp"].mesh.tolist()
    control, message = dist.new_group(), torch.zeros(1)
    events = []
    model, optimizer = wrapped(mesh, blocks(), overlap=overlap)
    set_mode(model.module, "static")
    step(model, optimizer, batch(mesh))  # which is rehearsed

    def hold_back(bucket):
        if held_back and bucket == 0 and coord == 1:
            dist.recv(message, src=first, group=control)

    def block_has_run(index):
        events.append(f"block {index}")
        if held_back and index == 0 and coord == 0:
            dist.send(message, dst=second, group=control)

    with monkeypatch.context() as patch:
        on_gathers(patch, hold_back, lambda bucket: events.append(f"bucket {bucket}"))
        step(model, optimizer, batch(mesh))
        for index, block in enumerate(model.module):
            block.register_forward_hook(lambda *_, index=index: block_has_run(index))
        return events, model(batch(mesh, 1))


@ranks(4, timeout=120)
def test_a_forward_on_local_tensors_begins_before_the_last_gather_has_ended(monkeypatch, on_gathers):
    mesh = data_and_tensor_parallel()
    events, overlapped = events_of_step_and_forward(mesh, monkeypatch, on_gathers, overlap=True, held_back=True)
    assert events == [f"{what} {i}" for block in range(3) for what, i in (("bucket", 2 - block), ("block", block))]
    events, expected = events_of_step_and_forward(mesh, monkeypatch, on_gathers, overlap=False)
    assert events == [f"bucket {i}" for i in (2, 1, 0)] + [f"block {i}" for i in range(3)]
    assert torch.equal(overlapped, expected)


# ------------------------------------------------------------------------------------------------- guards


def outputs_after_a_late_gather(mesh, monkeypatch, late_gathers, module, *, prepare=lambda _model: None):
    """Return what static mode computes with values that come on the first wait, and the expected result."""
    model, _ = wrapped(mesh, module)
    set_mode(model.module, "static")
    prepare(model)
    x = batch(mesh)
    model(x).sum().backward()
    with monkeypatch.context() as patch:
        late_gathers(patch)
        for slot in model.slots().values():
            slot.value_part.fill_(0.5)
        model.gather_parameters()
        out = model(x)
    model.wait_for_parameters()
    return out, model(x)


def hook_and_keep_a_part_in_eager_mode(model):
    """Make autograd add up the gradients of a tied parameter: then its twin is an alias of the leaf in each call."""
    model.module[0].down.bias.register_hook(lambda gradient: gradient)
    set_mode(model.module, "eager", "2")


@ranks(4, timeout=120)
def test_local_tensors_wait_for_their_values(monkeypatch, late_gathers, without_leaves):
    mesh = data_and_tensor_parallel()
    tied = {"prepare": hook_and_keep_a_part_in_eager_mode}
    for module, settings in ((blocks(), {}), (tied_blocks(), tied)):
        out, expected = outputs_after_a_late_gather(mesh, monkeypatch, late_gathers, module, **settings)
        assert torch.equal(out, expected)
    without_leaves(monkeypatch)  # they show what was there before
    out, expected = outputs_after_a_late_gather(mesh, monkeypatch, late_gathers, blocks())
    assert not torch.equal(out, expected)


def local_tensor(param):
    """Return the tensor inside of a DTensor, by the protocol of tensor subclasses."""
    names, _ = param.__tensor_flatten__()
    return next(value for name in names if isinstance(value := getattr(param, name), torch.Tensor))


@ranks(4, timeout=120)
def test_local_tensors_follow_a_parameter_to_other_memory():
    mesh = data_and_tensor_parallel()
    for frees in (False, True):  # with True no address is compared: they stay where they were
        model, optimizer = wrapped(mesh, blocks())
        for param in model.parameters():
            param._vescale_memory.frees = frees
        set_mode(model.module, "static")
        step(model, optimizer, batch(mesh))
        before = model(batch(mesh))
        for param in model.parameters():
            local = local_tensor(param)
            local.data = local.detach() * 2
        after = model(batch(mesh))
        assert torch.equal(after, before) == frees
        set_mode(model.module, "eager")
        assert torch.equal(after, model(batch(mesh))) != frees


@ranks(4, timeout=120)
def test_local_tensors_do_not_count_as_shared_memory():
    mesh = data_and_tensor_parallel()
    model, optimizer = wrapped(mesh, blocks(), zero=1)
    for mode in ("static", "static", "eager", "static"):  # each change leaves local tensors behind
        set_mode(model.module, mode)
        for seed in range(2):
            step(model, optimizer, batch(mesh, seed))
            assert len(waiting(model)) == 12
    model.wait_for_parameters()
    alias = model.module[1].up.weight.to_local().detach()
    step(model, optimizer, batch(mesh))
    assert waiting(model) == [fqn for fqn, _ in model.named_parameters() if not fqn.startswith("1.")]
    del alias
    gc.collect()
    step(model, optimizer, batch(mesh))
    assert len(waiting(model)) == 12


@ranks(4, timeout=120)
def test_a_backward_of_a_forward_before_the_step_is_an_error_as_in_one_process():
    mesh = data_and_tensor_parallel()
    for mode in ("eager", "static"):
        model, optimizer = wrapped(mesh, blocks())
        set_mode(model.module, mode)
        model(batch(mesh)).sum().backward()
        loss = model(batch(mesh)).sum()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
