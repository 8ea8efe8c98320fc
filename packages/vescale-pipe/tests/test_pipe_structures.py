"""Programs of any form: skips over stages, nested outputs, code between modules, in-place operators, frozen parts."""

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import halved, ranks

WIDTH = 4


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, skip):
        return self.linear(torch.cat([x, skip], dim=-1))


class UNet(nn.Module):
    """Every level of the way up takes the output of the same level on the way down, stages apart."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.down3 = linear(), linear(), linear()
        self.middle = linear()
        self.up3, self.up2, self.up1 = Up(), Up(), Up()

    def forward(self, x):
        d1 = torch.tanh(self.down1(x))
        d2 = torch.tanh(self.down2(d1))
        d3 = torch.tanh(self.down3(d2))
        y = self.up3(self.middle(d3), d3)
        y = self.up2(y, skip=d2)
        return self.up1(y, skip=d1).square().mean()


@dataclasses.dataclass
class Features:
    hidden: torch.Tensor
    extra: dict[str, Any]


class Pair(NamedTuple):
    hidden: torch.Tensor
    gate: torch.Tensor


class MakesFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        y = self.linear(x)
        return Features(torch.tanh(y), {"gates": (torch.sigmoid(y), [y * 2]), "scale": 3})


class TakesFeatures(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, features, *, mask):
        gate, (double,) = features.extra["gates"]
        return Pair(self.linear(features.hidden * mask) * features.extra["scale"], gate + double)


class TakesPair(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, pair):
        return {"out": self.linear(pair.hidden * pair.gate), "pair": pair}


class Nested(nn.Module):
    """Dataclasses, dicts, lists and named tuples between modules."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = MakesFeatures(), TakesFeatures(), TakesPair()

    def forward(self, x):
        mask = (torch.arange(x.shape[-1], device=x.device) % 2).to(x.dtype)
        result = self.third(self.second(self.first(x), mask=mask))
        return {"loss": (result["out"] * result["pair"].gate).square().mean()}


class Mixed(nn.Module):
    """Operators on values of several stages, with several outputs, views, indexing, constants and integer values."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        a = self.a(x) * self.scale
        left, right = a.chunk(2, dim=-1)
        largest, where = a.max(dim=-1)
        b = self.b(torch.cat([right, left], dim=-1)) + torch.zeros_like(a).add(1.0)
        stacked = torch.stack([a, b, a * b]).transpose(0, 1)
        c = self.c(stacked.sum(1)) * where.unsqueeze(-1) + largest[:, None]
        for row in c[:2]:
            c = c + row
        return F_loss(c, a, b)


def F_loss(c, a, b):  # noqa: N802
    return (c.square() + a.detach() * b).mean()


class InPlace(nn.Module):
    """In-place operators between modules, also on received values and on buffers of zeros."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear(), linear(), linear()

    def forward(self, x):
        h = self.a(x)
        h += 1
        h += self.b(h.tanh())  # written by stage 1, where it was received
        collected = torch.zeros(x.shape[0], 2 * WIDTH, dtype=x.dtype)
        collected[:, :WIDTH] = h
        collected[:, WIDTH:] = self.c(h)
        total = torch.zeros((), dtype=x.dtype)
        total += collected.square().mean()
        return total


class Identities(nn.Module):
    """Units and operators that return an argument itself, an output twice, or nothing new."""

    class Passes(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x, mask, note):
            y = self.linear(x) * mask
            return y, y, mask, x, note

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = self.Passes(), self.Passes(), linear()

    def forward(self, x):
        mask = torch.ones_like(x)
        y, same, mask, _, note = self.a(x, mask, "note")
        assert note == "note"
        y, same, mask, before, _ = self.b(y.contiguous().to(x.dtype) + same, mask, None)
        return (self.c(y) * mask + before + same.reshape(y.shape)).square().mean()


class PartlyFrozen(nn.Module):
    """The first stage has nothing to learn, and one value is used without a gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = linear().requires_grad_(False), linear(), linear()

    def forward(self, x):
        a = self.a(x)
        b = self.b(a)
        with torch.no_grad():
            scale = self.c(b).abs().mean()
        return self.c(b + a).square().mean() * scale


class Unused(nn.Module):
    """A module that is called without effect on the loss has no gradient, and one that is not called neither."""

    def __init__(self):
        super().__init__()
        self.a, self.unused, self.b, self.never = linear(), linear(), linear(), linear()

    def forward(self, x):
        h = self.a(x)
        aside = self.unused(h)
        return (self.b(h) + 0 * aside.detach()).square().mean()


class Checkpointed(nn.Module):
    """Container code wraps its blocks in activation checkpointing; the backward calls them again."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Sequential(linear(), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in (self.a, self.b, self.c):
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


THREE = {
    UNet: ["down3", "up3"],
    Nested: ["second", "third"],
    Mixed: ["b", "c"],
    InPlace: ["b", "c"],
    Identities: ["b", "c"],
    PartlyFrozen: ["b", "c"],
    Checkpointed: ["b", "c"],
    Unused: [["a"], ["unused"], ["b", "never"]],
}


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def loss_of(model, x):
    output = model(x)
    return output["loss"] if isinstance(output, dict) else output


@halved
@pytest.mark.parametrize("schedule, num_microbatches", [("1f1b", 4), ("gpipe", 2)])
@pytest.mark.parametrize("kind", THREE, ids=lambda kind: kind.__name__)
@ranks(3)
def test_equal_to_one_process(kind, schedule, num_microbatches, train_one_process, pipeline_mesh, differences):
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = train_one_process(build(kind), loss_of, {"x": x}, num_microbatches)
    model = build(kind)
    plan = PipelinePlan(schedule, num_microbatches, THREE[kind])
    # some mix rows: the loop of gradient accumulation in one process does so within a micro-batch, too
    engine = PipelineEngine(model, pipeline_mesh(), plan, per_microbatch=kind in (Mixed, PartlyFrozen))
    for _ in range(2):  # recorded, then followed
        model.zero_grad()
        loss = engine(x)
        loss.backward()
        assert torch.equal(loss, expected.losses[0])
        assert differences(model, expected) == {}


@ranks(4)
def test_a_unet_sends_each_skip_straight_to_its_stage(pipeline_mesh):
    split = ["down2", "middle", "up2"]
    engine = PipelineEngine(build(UNet), pipeline_mesh(), PipelinePlan("1f1b", 2, split))
    engine(torch.randn(4, WIDTH, dtype=torch.float64))
    assert [(t.source, t.destination) for t in engine.transfers] == [(0, 1), (1, 2), (2, 3), (1, 3), (0, 3)]
    assert str(engine.transfers[-1]) == "stage 0 -> 3: output 0 of `tanh` (stage 0), float64[2, 4], for `up1`"


@ranks(2)
def test_values_keep_their_strides(pipeline_mesh):
    """A transposed value arrives transposed: code that looks at strides goes the same way on every stage."""
    seen = []

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = linear()

        def forward(self, x):
            seen.append(x.stride())
            return self.linear(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = linear(), Last()

        def forward(self, x):
            return self.last(self.first(x).t()).mean()

    engine = PipelineEngine(Model(), pipeline_mesh(), PipelinePlan(split=["last"]))
    engine(torch.randn(WIDTH, WIDTH))
    assert seen == ([] if engine.stage == 0 else [(1, WIDTH)])


@ranks(2)
def test_a_module_with_two_names_is_replaced_at_both(pipeline_mesh):
    model = nn.Sequential(linear(), linear())
    model.add_module("again", model[0])
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan(split=["1"]), loss_fn=torch.mean)
    assert model.again is model[0]
    assert hasattr(model[0], "absent_fqns") == (engine.stage == 1)
