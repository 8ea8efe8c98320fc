"""Programs that random search has found, one for each cause: equal to one device, or refused."""

import importlib
import sys
from pathlib import Path

import pytest

import vescale.dtensor  # noqa: F401 - the package under test

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "coverage"))
program, referee = map(importlib.import_module, ("program", "referee"))
sys.path.pop(0)

Input = program.Input
FLOATS = Input((4, 6), "float", "P", requires_grad=True)

RIGHT = {
    "an integer shifted by a number": ([Input((3, 2), "int4", "S0")], ["v0 = x0 << 1", "v1 = x0 >> 1"], 0),
    "truths of partial sums": ([Input((3, 2), "int1", "P")], ["v0 = x0.any()", "v1 = x0.any(0)", "v2 = x0.all(1)"], 0),
    "truths of partial floats": ([FLOATS], ["v0 = x0.any()", "v1 = (x0 - x0).any(0)"], 0),
    "new tensors like partial sums": (
        [FLOATS],
        [
            "v0 = x0.new_full(x0.shape, 3) + x0",
            "v1 = x0.new_ones(x0.shape) * x0",
            "v2 = torch.full_like(x0, 0.5)",
            "v3 = torch.ones_like(x0).sum(0)",
            "v4 = x0.new_zeros(x0.shape) + 1",
        ],
        1,
    ),
    "complex partial sums become coarser": ([Input((3,), "complex", "P")], ["v0 = x0.to(torch.complex64).abs()"], 0),
    "partial minima become complex": (
        [Input((3,), "float", "N")],
        ["v0 = torch.fft.fft(x0).abs()", "v1 = (x0 + 1j).abs()"],
        0,
    ),
    "functions of partial maxima": (
        [Input((3, 3), "float", "X", requires_grad=True)],
        ["v0 = x0 * -2", "v1 = x0.exp().sum(0)", "v2 = x0.mT @ x0", "v3 = x0.amin(0)", "v4 = x0.cumsum(0)"],
        1,
    ),
    "complex convolutions": (
        [Input((4, 1, 5), "complex", "S0", requires_grad=True), Input((2, 1, 3), "complex", "R", requires_grad=True)],
        ["v0 = F.conv1d(x0, x1)"],
        1,
    ),
    "no elements in another dtype": ([Input((0, 2), "float", "S1")], ["v0 = x0.long().view(torch.int32)"], 0),
    "products in another memory order": (
        [Input((2, 2), "float", "S0", is_transposed=True)],
        ["v0 = torch.kron(x0, x0)"],
        0,
    ),
}

RIGHT |= {
    "products of uneven shards in another memory order": (
        [Input((3, 2), "float", "S0", is_transposed=True)],
        ["v0 = torch.kron(x0, x0)"],
        0,
    ),
    "views of products of single rows": (
        [Input((2, 2), "float", "S0", requires_grad=True, is_transposed=True), Input((2, 2), "float", "S1")],
        [
            "v0 = x0[:, None, :, None] * x0[None, :, None, :]",
            "v1 = v0.flatten(0, 1).flatten(1)",
            "v1[0].mul_(2)",
            "v2 = v0 + 1",
            "v3 = torch.where(x0[:, None, :] > 0, x1[None, :, :1], x0[:, None, :]).flatten(0, 1)",
        ],
        1,
    ),
}

ON_SIX = {
    "products of shards in two dims": (
        [Input((5, 3), "float", "S0S1", is_transposed=True), Input((5, 3), "float", "S0S0", is_transposed=True)],
        ["v0 = (x0[:, None, :, None] * x1[None, :, None, :]).flatten(0, 1).flatten(1)", "v1 = torch.kron(x0, x1)"],
        0,
    ),
    "shards that are empty only where an operator needs them": (
        [Input((4, 2), "float", "S1R")],
        ["v2 = torch.fft.fft(x0, dim=-1).abs()"],
        0,
    ),
    "a write to a conjugate of partial sums": ([Input((2,), "complex", "PS0")], ["x0.conj().mul_(1j)"], 0),
    "sums that are compared": (
        [Input((4, 4), "float", "S0P", requires_grad=True, is_transposed=True)],
        ["v0 = x0[..., :-1]", "v2 = v0 * v0", "v3 = v2.amin(0, keepdim=True)"],
        1,
    ),
    "products of complex numbers": (
        [Input((4, 3), "complex", "S0S0", requires_grad=True)],
        ["v0 = x0.prod(0)", "v1 = v0.real + 1", "v2 = v0.conj() * 2", "v3 = v0.abs()", "v4 = x0.prod(1).imag"],
        1,
    ),
    "sorted sums": (
        [Input((6,), "float", "RP")],
        ["v0 = torch.outer(x0, x0)", "v1 = torch.searchsorted(v0.sort().values, v0)"],
        0,
    ),
}

RIGHT |= {
    "bags of embeddings": (
        [Input((5, 3), "float", "S0", requires_grad=True), Input((4, 2), "int5", "S0")],
        ["v0 = F.embedding_bag(x1, x0, mode='mean')"],
        1,
    ),
    "given singular values": (
        [Input((4, 3), "float", "S0")],
        ["v0 = x0.new_empty(3)", "torch.linalg.svdvals(x0, out=v0)"],
        0,
    ),
    "integers of 16 bits": (
        [Input((1, 1, 1), "float", "S1"), Input((1, 1, 1), "bool", "R")],
        ["v0 = x0.short() * x1"],
        0,
    ),
    "gradients of blocks": ([Input((1, 2, 2), "float", "S0", requires_grad=True)], ["v0 = x0.flatten()"], 1),
    "sums in the operand itself": ([Input((4, 3), "float", "S0")], ["torch.cumsum(x0, 0, out=x0)"], 0),
    "parts of one tensor": ([Input((4, 2, 3), "float", "S0")], ["x0[:, 0].add_(x0[:, 1])", "x0[:, :, 0] *= 2"], 0),
}

RIGHT |= {
    "a squeezed tensor without elements": (
        [Input((0, 3, 2), "float", "S2"), Input((1, 0, 3), "float", "S2")],
        ["v0 = x0.squeeze()", "v1 = v0.scatter_reduce(0, x0.long(), v0, 'sum')", "v2 = x1.squeeze((0, 1))"],
        0,
    ),
    "losses of two dtypes": (
        [Input((2, 3), "int3", "S0"), Input((3,), "float", "R")],
        ["v0 = x0 * 0.5", "v1 = F.huber_loss(v0, x1, reduction='sum')", "v2 = F.mse_loss(v0, x1, reduction='none')"],
        0,
    ),
    "windows that are filled": ([Input((4, 2), "float", "S1")], ["v0 = x0.unfold(0, 3, 1)", "v0.fill_(2)"], 0),
    "complex numbers as arguments": (
        [Input((4, 3), "complex", "S0", requires_grad=True), Input((4, 3), "float", "P", requires_grad=True)],
        [
            "v0 = x0.masked_fill(x1 > 0, 1j)",
            "v1 = torch.pow(1j, x1) + x1.pow(1j) + x1.float_power(0.3j)",
            "v2 = torch.lerp(x0, x0 * 2, 0.5j) + torch.rsub(x1, 1j)",
            "v3 = torch.eq(x0, 1j)",
            "v4 = x0.scatter(0, (x1 > 9).long(), 1j)",
            "v5 = x1.new_full((2, 3), 1j, dtype=torch.complex128)",
            "v6 = v0.clone().masked_fill_(x1 > 0, 2j)",
        ],
        1,
    ),
    "real parts of interleaved shards": (
        [Input((2, 2, 1), "complex", "S1", requires_grad=True)],
        [
            "v0 = x0.ravel()",
            "v1 = v0.real + v0.imag",
            "v2 = x0.flatten(0, 1).imag",
            "v3 = x0.clone().view(4)",
            "v3.real.mul_(2)",
        ],
        1,
    ),
    "small integers that are compared": (
        [Input((4, 3), "int5", "S0")],
        ["v0 = x0.short().argmax(0)", "v1 = x0.short().argmin()"],
        0,
    ),
    "an integral over no interval": (
        [Input((1, 3), "float", "S1")],
        ["v0 = torch.trapezoid(x0[1:], dim=0)", "v1 = move(v0, [Replicate()])", "v2 = torch.trapz(x0, x0, dim=-1)"],
        0,
    ),
    "the first of equal numbers": (
        [Input((2, 2, 4), "int4", "S1"), Input((4, 6), "int4", "S0")],
        ["v0 = x0.argmax()", "v1 = x0[:1].argmin(keepdim=True)", "v2 = x1.argmax()", "v3 = x1.t().argmin()"],
        0,
    ),
    "the second gradient of moved signs": (
        [Input((4, 3), "float", "R", requires_grad=True)],
        ["v0 = x0.softmax(0)", "v1 = move(v0, [Replicate()]).abs()", "v2 = v0.softmax(1)"],
        2,
    ),
    "functions that squeeze their result": (
        [Input((4, 3), "float", "S0", requires_grad=True)],
        ["v0 = x0.quantile(0.3, 1)", "v1 = torch.nanquantile(x0, 0.5)", "v2 = x0.view(2, 2, 3) @ x0[0]"],
        1,
    ),
    "a gradient that is a sum, of a mean": (
        [
            Input((1,), "float", "S0", requires_grad=True),
            Input((1,), "float", "A", requires_grad=True),
            Input((1,), "float", "R", requires_grad=True),
        ],
        ["v0 = move(x1, [Shard(0)])", "v1 = torch.outer(x0, v0)"],
        1,
    ),
    "a column of a square in the second gradient": (
        [Input((2,), "float", "S0", requires_grad=True), Input((2,), "float", "S0", requires_grad=True)],
        [
            "v0 = x1.to(torch.complex128)",
            "v1 = torch.einsum('i,j->ij', v0, x0)",
            "v2 = v1.split(4, -2)[0]",
            "v3 = F.elu(x1)",
            "v4 = torch.matrix_power(v2, 2)",
        ],
        2,
    ),
    "random complex numbers without elements": (
        [Input((1, 0), "complex", "R")],
        ["x0.bernoulli_(0.4)", "x0.exponential_()"],
        0,
    ),
    "one row of losses, with a target of one dim": (
        [Input((2,), "float", "S0"), Input((1,), "int2", "S0"), Input((1,), "float", "S0", requires_grad=True)],
        [
            "v0 = F.cross_entropy(x0, x1)",
            "v1 = F.cross_entropy(move(x0, [Replicate()]), x1, reduction='none')",
            "v2 = F.nll_loss(x0, x1, reduction='none')",
            "v3 = F.nll_loss(x2, x1 * 0, reduction='none')",
        ],
        1,
    ),
    "the extreme of a view of a written tensor": (
        [Input((3, 2), "float", "S0", requires_grad=True)],
        ["v0 = x0.t()", "v0.detach().mul_(2)", "v1 = v0.argmax(-1)"],
        1,
    ),
    "the shape of a tensor without views in place": (
        [Input((2, 2), "float", "S0"), Input((2, 2), "float", "R", requires_grad=True)],
        ["v0 = x0 * 1", "v0.t_()", "v0.mul_(x1)", "v1 = (x0 > 0).t()", "v1.unsqueeze_(0)"],
        1,
    ),
    "a sum that is a factor": ([Input((3, 3), "float", "S0")], ["v0 = x0 * 1", "torch.addmm(v0, x0, x0, out=v0)"], 0),
}

ON_THREE = {
    f"pairs of numbers as complex ones, {shape} in {placement}": (
        [Input(shape, "float", placement)],
        [
            "v0 = torch.view_as_complex(x0)",
            "v1 = x0.view(torch.complex128)",
            "v2 = x0.float().view(torch.float64)",
            f"v3 = x0.view({shape[::-1]})",
        ],
        0,
    )
    for shape in ((0, 2), (1, 2), (0, 3, 2), (2, 0, 2))
    for placement in ("S0", "S1", "S2")[: len(shape)]
}

RIGHT |= {
    "vectors without elements beside matrices": (
        [Input((0,), "float32", "S0"), Input((4, 3), "float", "S1", requires_grad=True), Input((0,), "complex", "R")],
        ["v0 = torch.cat([x0, x1], 0)", "v1 = torch.cat([x1, x1, x0], -1)", "v2 = torch.cat([x2, x1.float()])"],
        1,
    ),
}

ON_THREE |= {
    "the least of shards with gaps, where one is empty": (
        [Input((3, 1, 2), "float", "R", requires_grad=True)],
        ["v0 = move(x0, [Shard(2)]).view(-1)", "v1 = v0.amin(-1)", "v2 = v0.argmax()", "v3 = v0.std()"],
        1,
    ),
}

REFUSED = {
    "products in windows": ([Input((4, 1), "float", "R")], ["v0 = x0.unfold(-2, 3, 1)", "v0.cumprod_(-3)"], 0),
    "a product in its factor": ([Input((3, 3), "float", "S0")], ["v0 = x0 * 1", "torch.mm(v0, x0, out=v0)"], 0),
    "a product added to its factor": ([Input((3, 3), "float", "R")], ["x0.addmm_(x0, x0.view(3, 3))"], 0),
    "bags at plain offsets": (
        [Input((6, 3), "float", "S0"), Input((4,), "int6", "R")],
        ["v0 = F.embedding_bag(x1, x0, torch.tensor([0, 2]))"],
        0,
    ),
    "windows that are doubled": ([Input((4, 2), "float", "S1")], ["v0 = x0.unfold(0, 3, 1)", "v0.mul_(2)"], 0),
    "the shape of a result in place": (
        [Input((2, 2), "float", "S0", requires_grad=True)],
        ["v0 = x0 @ x0", "v0.t_()", "v0.mul_(2)", "v1 = x0.view(4).view(2, 2)", "v2 = v1.t() * v0"],
        1,
    ),
    "the shape of a view in place": (
        [Input((2, 2), "float", "R", requires_grad=True)],
        ["v0 = torch.chain_matmul(x0, x0)", "v0.t_()", "with torch.no_grad(): v0.mul_(2)"],
        1,
    ),
    "the shape of a viewed tensor in place": (
        [Input((2, 2), "float", "R", requires_grad=True)],
        ["v0 = x0 + x0", "v1 = v0.movedim(-1, -2)", "v0.transpose_(-2, 1)"],
        1,
    ),
    "the shape of a view that gets a gradient": (
        [Input((2, 2), "float", "R"), Input((2, 2), "float", "R", requires_grad=True)],
        ["v0 = x0.t()", "v0.transpose_(0, 1)", "x0.mul_(x1)"],
        1,
    ),
    "the shape of a viewed tensor that gets a gradient": (
        [Input((2, 2), "float", "R"), Input((2, 2), "float", "R", requires_grad=True)],
        ["v0 = x0.t()", "x0.transpose_(0, 1)", "x0.mul_(x1)"],
        1,
    ),
    "what is read is written": (
        [Input((3, 2, 3), "float", "S0")],
        ["v0 = x0.tensor_split(2, 1)[1]", "x0.add_(v0, alpha=0.5)"],
        0,
    ),
    "a triangle of an expanded tensor": (
        [Input((1, 1), "float", "R")],
        ["v0 = x0.expand(2, *x0.shape)", "v0.tril_(-1)"],
        0,
    ),
    "a result of another shape than the operand": ([Input((4, 3), "float", "P")], ["torch.sum(x0, -1, out=x0)"], 0),
    "an element of an expanded tensor": (
        [Input((1, 2), "float", "S1")],
        ["v0 = x0.expand(2, *x0.shape)", "v1 = v0[..., -1]", "v1[0] = v1[-1] * 2"],
        0,
    ),
    "an expanded tensor with a view": (
        [Input((1, 1), "float", "S1")],
        ["v0 = x0.expand(2, *x0.shape)", "v1 = v0[..., -1]", "v0.masked_fill_(v0 > 0, 0.5)"],
        0,
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("programs", "kind", "mesh"),
    [(RIGHT, "right", (2,)), (ON_THREE, "right", (3,)), (ON_SIX, "right", (2, 3)), (REFUSED, "refused", (2,))],
)
def test_a_found_program_is_equal_or_refused(programs, kind, mesh):
    ranks = referee.Referee(mesh)
    try:
        for name, (inputs, lines, order) in programs.items():
            found = program.Program(mesh, tuple(inputs), tuple(lines), order)
            expected = program.is_steady(found)
            assert expected is not None, name
            verdict = ranks.judge(found, expected)
            assert verdict.kind == kind, (name, verdict)
    finally:
        ranks.end()
