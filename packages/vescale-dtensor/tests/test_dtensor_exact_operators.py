"""Inside of `exact` values and gradients of every operator have the bits of one process, on every layout and dtype."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from vescale.dtensor import Replicate, Shard, debug, distribute_tensor, exact, init_device_mesh
from vescale_testing import ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
TARGETS = torch.arange(24) % 10
INDEX = torch.arange(24) * 7 % 5

# Name: (function, shapes of its operands). Sizes are even and uneven; 8 blocks divide some of them only.
PRODUCTS = {
    "mm": (torch.mm, [(24, 16), (16, 40)]),
    "mm, uneven": (torch.mm, [(17, 33), (33, 10)]),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), [(40,), (24, 16), (16, 40)]),
    "linear": (F.linear, [(4, 6, 16), (40, 16), (40,)]),
    "linear without bias": (F.linear, [(4, 6, 16), (40, 16)]),
    "matmul": (torch.matmul, [(4, 8, 6, 16), (4, 8, 16, 5)]),
    "bmm": (torch.bmm, [(8, 6, 16), (8, 16, 5)]),
    "baddbmm": (torch.baddbmm, [(8, 6, 5), (8, 6, 16), (8, 16, 5)]),
    "mv": (torch.mv, [(24, 16), (16,)]),
    "dot": (torch.dot, [(24,), (24,)]),
    "convolution": (lambda x, w, b: F.conv2d(x, w, b, padding=1), [(8, 4, 6, 6), (8, 4, 3, 3), (8,)]),
    "convolution in groups": (lambda x, w: F.conv1d(x, w, groups=2), [(10, 4, 9), (8, 2, 3)]),
    "attention": (lambda q, k, v: attend(q, k, v, is_causal=True), [(4, 8, 6, 4)] * 3),
    "attention with dropout": (lambda q, k, v: attend(q, k, v, dropout_p=0.5), [(4, 8, 6, 4)] * 3),
}
REDUCTIONS = {
    "sum": (lambda x: x.sum(), [(24, 10)]),
    "sum over one dim": (lambda x: x.sum(0), [(24, 10)]),
    "sum of one row": (lambda x: x.sum(0), [(1, 10)]),
    "mean over two dims": (lambda x: x.mean((0, 2), keepdim=True), [(24, 3, 17)]),
    "variance": (lambda x: x.var(0), [(24, 10)]),
    "standard deviation": (lambda x: x.std(1, correction=0), [(24, 10)]),
    "norm": (lambda x: x.norm(), [(24, 10)]),
    "norms of rows": (lambda x: torch.linalg.vector_norm(x, 3, dim=1), [(24, 10)]),
    "largest element": (lambda x: torch.linalg.vector_norm(x, float("inf")), [(24, 10)]),
    "log of a sum": (lambda x: torch.logsumexp(x, 0), [(24, 10)]),
    "cumulative sum": (lambda x: x.cumsum(0), [(24, 10)]),
    "product": (lambda x: x.prod(0), [(24, 10)]),
}
NORMS = {
    "layer norm": (lambda x, w, b: F.layer_norm(x, (16,), w, b), [(4, 6, 16), (16,), (16,)]),
    "RMS norm": (lambda x, w: F.rms_norm(x, (16,), w), [(4, 6, 16), (16,)]),
    "group norm": (lambda x, w, b: F.group_norm(x, 4, w, b), [(8, 16, 5), (16,), (16,)]),
    "batch norm": (lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), [(8, 16, 5), (16,), (16,)]),
    "softmax": (lambda x: x.softmax(0), [(24, 10)]),
    "log-softmax": (lambda x: x.log_softmax(1), [(24, 10)]),
}
LOSSES = {
    "cross entropy": (lambda x, t: F.cross_entropy(x, t, ignore_index=3), [(24, 10), TARGETS]),
    "cross entropy, smoothed": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), [(24, 10), TARGETS]),
    "losses of rows": (lambda x, t: F.nll_loss(x, t, reduction="none"), [(24, 10), TARGETS]),
    "weights of classes": (lambda x, w, t: F.nll_loss(x, t, w.detach()), [(24, 10), (10,), TARGETS]),
    "squares": (F.mse_loss, [(24, 10), (24, 10)]),
}
LOOKUPS = {
    "embedding": (lambda w, t: F.embedding(t, w), [(10, 16), TARGETS]),
    "index_add": (lambda x, y, i: x.index_add(0, i, y), [(5, 16), (24, 16), INDEX]),
    "scatter_add": (lambda x, y, i: x.scatter_add(0, i[:, None].expand(-1, 16), y), [(5, 16), (24, 16), INDEX]),
    "rows chosen several times": (lambda x, i: x[i], [(5, 16), INDEX]),
}
POINTWISE = {
    "gelu": (F.gelu, [(24, 10)]),
    "silu of columns": (lambda x: F.silu(x.t()), [(24, 10)]),
    "powers": (lambda x: (x * x + 1) ** 0.3, [(24, 10)]),
    "sigmoid in place": (lambda x: (x * 2).sigmoid_(), [(24, 10)]),
    "a sum with a scale": (lambda x, y: torch.add(x, y, alpha=0.3), [(24, 10), (10,)]),
    "solver": (lambda x: torch.linalg.svdvals(x.float()), [(24, 10)]),
}
ALL = PRODUCTS | REDUCTIONS | NORMS | LOSSES | LOOKUPS | POINTWISE


def attend(*operands, **options):
    return F.scaled_dot_product_attention(*operands, **options)


def operands_of(shapes, dtype):
    """Return numbers of several magnitudes, in which another order of additions shows; indices as they are."""
    generator = torch.Generator().manual_seed(0)

    def numbers(shape):
        return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()).to(dtype)

    return [shape if isinstance(shape, torch.Tensor) else numbers(shape) for shape in shapes]


def results(function, operands):
    """Return value and gradients, as on one device."""
    torch.manual_seed(0)
    operands = [x.detach().requires_grad_() if x.is_floating_point() else x for x in operands]
    value = function(*operands)
    gradients = torch.autograd.grad((value * value).sum(), [x for x in operands if x.requires_grad], allow_unused=True)
    found = [value, *(gradient for gradient in gradients if gradient is not None)]
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach() for x in found]


def layouts(shape, mesh, first):
    """Return placements of an operand: along one dim per mesh axis, another for every operand."""
    dims = [(first + axis) % (len(shape) + 1) for axis in range(mesh.ndim)]
    return [Shard(dim) if dim < len(shape) else Replicate() for dim in dims]


def same(actual, expected):
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


SOME = {torch.float32: ALL, torch.bfloat16: dict(list(ALL.items())[::5])}
EVERY = dict.fromkeys(DTYPES, ALL)


@pytest.mark.parametrize(
    ("mesh_shape", "cases", "num_layouts"),
    [
        pytest.param((2,), SOME, 1, id="2"),
        pytest.param((4,), EVERY, 3, id="4", marks=pytest.mark.thorough),
        pytest.param((2, 2), EVERY, 3, id="2 x 2", marks=pytest.mark.thorough),
    ],
)
def test_bits_are_those_of_one_process(mesh_shape, cases, num_layouts):
    @ranks(math.prod(mesh_shape), timeout=600)
    def on_every_rank():
        mesh = init_device_mesh("cpu", mesh_shape)
        for dtype, functions in cases.items():
            for name, (function, shapes) in functions.items():
                check(name, function, operands_of(shapes, dtype), mesh, num_layouts)

    on_every_rank()


def check(name, function, operands, mesh, num_layouts):
    with exact():
        expected = results(function, operands)
    for first in range(num_layouts):
        placed = [
            distribute_tensor(x, mesh, layouts(x.shape, mesh, first + position)) for position, x in enumerate(operands)
        ]
        with exact():
            actual = results(function, placed)
        assert same(actual, expected), (name, operands[0].dtype, [x.placements for x in placed])


@pytest.mark.parametrize("name", ALL)
def test_values_are_those_of_the_program(name):
    function, shapes = ALL[name]
    operands = operands_of(shapes, torch.float64)
    with exact():
        actual = results(function, operands)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if name == "solver" else {"rtol": 1e-10, "atol": 1e-10}  # it is in float32
    for a, b in zip(actual, results(function, operands), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@ranks(2)
def test_without_the_context_some_differ():
    mesh = init_device_mesh("cpu", (2,))
    differ = set()
    for name in ("mm", "linear", "layer norm", "softmax", "log-softmax", "sum"):
        function, shapes = ALL[name]
        operands = operands_of(shapes, torch.float32)
        placed = [distribute_tensor(x, mesh, [Shard(0)]) for x in operands]
        if not same(results(function, placed), results(function, operands)):
            differ.add(name)
    assert len(differ) > 1, differ


def test_the_bits_depend_on_the_number_of_blocks():
    (x,) = operands_of([(24, 1000)], torch.float32)
    sums = []
    for num_blocks in (2, 8):
        with exact(num_blocks=num_blocks):
            sums.append(x.sum(1))
    assert not torch.equal(*sums)


@ranks(2)
def test_shards_stay_where_they_are():
    """Functions of elements, sums of whole blocks and products of fitting shards gather no operand."""
    mesh = init_device_mesh("cpu", (2,))
    x, w = operands_of([(16, 32), (32, 8)], torch.float32)
    rows, whole = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(w, mesh, [Replicate()])
    with debug.comm_log() as log, exact():
        assert F.gelu(rows).placements == (Shard(0),)
        assert torch.mm(rows, whole).placements == (Shard(0),)
        rows.softmax(1)
        rows.cumsum(1)
    assert not list(log), str(log)
    with debug.comm_log() as log, exact():
        assert rows.sum(0).placements == (Replicate(),)
    (gathered,) = log
    assert gathered.num_bytes <= 32 * 2 * x.element_size()  # a sum of each rank, not its rows


@ranks(2)
def test_running_statistics_and_clipping():
    mesh = init_device_mesh("cpu", (2,))
    (x,) = operands_of([(8, 16, 5)], torch.float32)
    modules = [nn.BatchNorm1d(16) for _ in range(2)]
    norms = []
    with exact():
        for module, batch in zip(modules, (x, distribute_tensor(x, mesh, [Shard(0)])), strict=True):
            if isinstance(batch, DTensor):
                for table in (module._parameters, module._buffers):
                    for name, tensor in table.items():
                        copy = distribute_tensor(tensor.detach().clone(), mesh, [Replicate()])
                        table[name] = nn.Parameter(copy) if isinstance(tensor, nn.Parameter) else copy
            (module(batch) ** 2 + module(batch)).sum().backward()
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 1e-3))
    for a, b in zip(
        [*modules[1].state_dict().values(), *(p.grad for p in modules[1].parameters()), norms[1]],
        [*modules[0].state_dict().values(), *(p.grad for p in modules[0].parameters()), norms[0]],
        strict=True,
    ):
        assert torch.equal(a.full_tensor() if isinstance(a, DTensor) else a, b)
