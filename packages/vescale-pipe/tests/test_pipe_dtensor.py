"""DTensor values cross stages on a (pp, tp) mesh: torch's own tensor parallelism inside the stages."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import ranks

WIDTH, HIDDEN = 4, 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Cut(nn.Module):
    """Stages begin between the column-wise and the row-wise layer, so that sharded values cross."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))).square().mean()


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def data():
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def loss_of(model, x):
    return model(x)


def close(actual, expected):
    # sums over the tp axis have another order than one process: rounding of float64, no more
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def check_gradients(model, expected):
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            assert gradient.placements == parameter.placements
            gradient = gradient.full_tensor()
        close(gradient, expected.gradients[name])


@pytest.mark.parametrize("axes", [("pp", "tp"), ("tp", "pp")])
@ranks(4)
def test_megatron_blocks_in_two_stages(axes, train_one_process):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    expected = train_one_process(build(Stack), loss_of, {"x": data()}, 4)
    model = build(Stack)
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan("1f1b", 4), per_microbatch=True)
    for fqn in engine.split.stages[engine.stage]:
        parallelize_module(model.get_submodule(fqn), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    loss = engine(data())
    loss.backward()
    close(loss.detach(), expected.losses[0])
    check_gradients(model, expected)


@pytest.mark.parametrize("layout", [Shard(-1), Replicate()])
@ranks(4)
def test_sharded_and_replicated_values_cross(layout, train_one_process):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    expected = train_one_process(build(Cut), loss_of, {"x": data()}, 2)
    model = build(Cut)
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan("1f1b", 2, ["down"]), per_microbatch=True)
    style = {
        "up": ColwiseParallel(output_layouts=layout, use_local_output=False),
        "down": RowwiseParallel(input_layouts=layout),
    }
    mine = ("up", "down")[engine.stage]
    parallelize_module(model, mesh["tp"], {mine: style[mine]})
    for _ in range(2):
        model.zero_grad()
        loss = engine(data())
        loss.backward()
        close(loss.detach(), expected.losses[0])
        check_gradients(model, expected)
    (transfer,) = engine.transfers
    assert transfer.meta.shape == (4, HIDDEN)
    assert transfer.meta.sharded.axis_names == ("tp",)
    assert transfer.meta.sharded.local_shape == ((4, HIDDEN // 2) if layout.is_shard() else (4, HIDDEN))


class PartialUp(nn.Linear):
    """Returns a value that is the sum of the tp ranks' parts."""

    def forward(self, x):
        mesh = self.weight.device_mesh
        full = nn.functional.linear(x, self.weight.full_tensor(), self.bias.full_tensor())
        return DTensor.from_local(full / mesh.size(), mesh, [Partial()], run_check=False)


class Reduces(nn.Linear):
    def forward(self, x):
        x = x.redistribute(placements=[Replicate()]) if isinstance(x, DTensor) else x
        return super().forward(x)


@ranks(4)
def test_partial_values_cross_and_their_gradients_are_replicated(train_one_process):
    """The reference is the same tensor-parallel program without a pipeline."""

    class Model(nn.Module):
        def __init__(self, mesh):
            super().__init__()
            torch.manual_seed(0)
            self.up, self.down = PartialUp(WIDTH, HIDDEN).double(), Reduces(HIDDEN, WIDTH).double()
            for module in (self.up, self.down):
                for name, parameter in list(module.named_parameters()):
                    replicated = DTensor.from_local(parameter.detach(), mesh, [Replicate()], run_check=False)
                    setattr(module, name, nn.Parameter(replicated))

        def forward(self, x):
            return self.down(self.up(x)).square().mean()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    batch = {"x": data()}
    expected = train_one_process(Model(mesh["tp"]), lambda model, x: model(x).full_tensor(), batch, 2)
    model = Model(mesh["tp"])
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan("1f1b", 2, ["down"]), per_microbatch=True)
    loss = engine(**batch)
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    assert engine.transfers[0].meta.sharded.placements == (Partial(),)
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == expected.gradients[name].placements
        assert torch.equal(parameter.grad.to_local(), expected.gradients[name].to_local()), name


class Gathers(nn.Linear):
    """A layer without DTensor parameters, so without the tp mesh."""

    def forward(self, x):
        return super().forward(x.full_tensor() if isinstance(x, DTensor) else x)


@ranks(4)
def test_a_receiver_without_the_mesh_is_given_it(train_one_process):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(WIDTH, HIDDEN), Gathers(HIDDEN, WIDTH)

        def forward(self, x):
            return self.down(self.up(x)).square().mean()

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))

    def make_engine(model, **kwargs):
        engine = PipelineEngine(model, mesh["pp"], PipelinePlan("1f1b", 2, ["down"]), per_microbatch=True, **kwargs)
        if engine.stage == 0:
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(use_local_output=False)})
        return engine

    match = r"stage 1: expected a mesh with the axes \('tp',\) for a received DTensor.*meshes=\[mesh\['tp'\]\]"
    with pytest.raises(PipelineError, match=match):
        make_engine(build(Model))(data())
    expected = train_one_process(build(Model), loss_of, {"x": data()}, 2)
    model = build(Model)
    loss = make_engine(model, meshes=[mesh["tp"]])(data())
    loss.backward()
    close(loss.detach(), expected.losses[0])
    check_gradients(model, expected)
