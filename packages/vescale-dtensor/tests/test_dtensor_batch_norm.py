"""Batch norm over a sharded batch is that of one device, and moves statistics, not rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vescale.dtensor import Replicate, Shard, debug, distribute_tensor, init_device_mesh, strict
from vescale_testing import half_of, in_halves, ranks

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
LAYOUTS = {  # mesh -> placements of the input
    (2,): [(S0,), (S2,), (S1,)],
    (3,): [(S0,), (S2,)],
    (2, 2): [(S0, S0), (S0, R), (S0, S2), (R, S2), (S1, S0)],
}
SHAPES = [(7, 3, 5), (2, 4, 4, 3), (4, 1, 3, 2, 2)]  # two rows on three ranks: one of them has none


def values(shape, dtype=torch.float64, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(num_channels, **options):
    layer = nn.BatchNorm1d(num_channels, dtype=torch.float64, **options)
    layer._check_input_dim = lambda _: None  # of any number of dims
    for number, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
        if tensor.is_floating_point():
            tensor.data.copy_(values(tensor.shape, seed=9 + number).abs() + 0.5)
    return layer


def on_mesh(layer, mesh):
    """Return a copy of the layer on the mesh, replicated."""
    layer = copy.deepcopy(layer)
    for name, parameter in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(distribute_tensor(parameter.data, mesh, [R] * mesh.ndim)))
    for name, buffer in list(layer.named_buffers()):
        setattr(layer, name, distribute_tensor(buffer, mesh, [R] * mesh.ndim))
    return layer


def step(layer, x):
    """Return output, first and second gradients, and buffers."""
    out = layer(x)
    wanted = [x, *layer.parameters()]
    first = torch.autograd.grad((out**3).sum(), wanted, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), wanted)
    return [out, *first, *second, *layer.buffers()]


@in_halves
@pytest.mark.parametrize("shape", list(LAYOUTS), ids=str)
def test_it_is_that_of_one_device(shape, half):
    @ranks(torch.Size(shape).numel())
    def on_every_rank():
        mesh = init_device_mesh("cpu", shape)
        for mode, of_input, placements in half_of(half, ["train", "eval", "no statistics"], SHAPES, LAYOUTS[shape]):
            layer = norm(of_input[1], affine=of_input != SHAPES[2], track_running_stats=mode != "no statistics")
            layer.train(mode != "eval")
            on_ranks = on_mesh(layer, mesh)
            x = values(of_input).requires_grad_()
            sharded = distribute_tensor(x.detach(), mesh, placements).requires_grad_()
            for number in range(2):  # running statistics of the second step build on those of the first
                where = f"{mode} {of_input} {placements} {number}"
                for got, want in zip(step(on_ranks, sharded), step(layer, x), strict=True):
                    torch.testing.assert_close(
                        got.full_tensor(), want, rtol=1e-10, atol=1e-10, msg=lambda t, w=where: f"{w}: {t}"
                    )

    on_every_rank()


@ranks(2)
def test_it_moves_statistics():
    mesh = init_device_mesh("cpu", (2,))
    for num_rows in (4, 64):
        x = distribute_tensor(values((num_rows, 3, 5)), mesh, [S0]).requires_grad_()
        layer = on_mesh(norm(3), mesh)
        with debug.comm_log() as log, strict():
            out = layer(x)
            (out * 2).backward(torch.ones_like(out))
        assert [(record.operator, record.num_bytes) for record in log] == [("all_reduce", n) for n in (24, 24, 48)]
        with debug.comm_log() as log, strict():
            layer.eval()(x)
        assert log.total_bytes == 0


@ranks(2)
def test_dtypes():
    """float32 sums in float64, as the kernel does; 16-bit inputs have float32 parameters."""
    mesh = init_device_mesh("cpu", (2,))
    for dtype in (torch.float32, torch.bfloat16):
        x = values((6, 3, 5), dtype) + 100  # a sum of squares would cancel
        weight = values((3,), torch.float32)
        whole = [t.clone().requires_grad_() for t in (x, weight)]
        parts = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((x, S0), (weight, R))]
        found = []
        for each, of_weight in (whole, parts):
            out = F.batch_norm(each, None, None, of_weight, training=True)
            found.append([out, *torch.autograd.grad(out.float().square().sum(), (each, of_weight))])
        for want, got in zip(*found, strict=True):
            assert got.dtype == want.dtype
            tolerance = 1e-5 if dtype == torch.float32 else 4e-2
            torch.testing.assert_close(got.full_tensor(), want, rtol=tolerance, atol=tolerance)


@ranks(2)
def test_each_shard_alone_has_other_statistics():
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(values((4, 3, 5)), mesh, [S0])
    together = F.batch_norm(sharded, None, None, training=True).to_local()
    assert not torch.allclose(F.batch_norm(sharded.to_local(), None, None, training=True), together)
