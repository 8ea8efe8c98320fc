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

REFUSED = {
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
@pytest.mark.parametrize(("programs", "kind"), [(RIGHT, "right"), (REFUSED, "refused")])
def test_a_found_program_is_equal_or_refused(programs, kind):
    ranks = referee.Referee((2,))
    try:
        for name, (inputs, lines, order) in programs.items():
            found = program.Program((2,), tuple(inputs), tuple(lines), order)
            expected = program.is_steady(found)
            assert expected is not None, name
            verdict = ranks.judge(found, expected)
            assert verdict.kind == kind, (name, verdict)
    finally:
        ranks.end()
