"""Random programs of several operators give what one device gives, or are refused; the hunt finds those that do not."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import vescale.dtensor  # noqa: F401 - the package under test
from vescale.dtensor._placements import hooks

FOLDER = Path(__file__).resolve().parents[1] / "coverage"
sys.path.insert(0, str(FOLDER))
generate, hunt, program, script = map(importlib.import_module, ("generate", "hunt", "program", "script"))
Mismatch = program.Mismatch
sys.path.pop(0)

NUM = {(2,): 12, (2, 2): 6}


@pytest.mark.filterwarnings("ignore")  # of torch, about what random programs do
def test_programs_are_right_or_refused():
    made = [
        (f"{n} on {mesh}", generate.make_program(f"test.{n}", mesh)) for mesh, num in NUM.items() for n in range(num)
    ]
    told = []
    tally = hunt.hunt(((name, each) for name, each in made if each is not None), shrink_s=5, tell=told.append)
    assert [line for line in told if not line.startswith("hunt: ")] == []  # it also tells how far it is
    assert tally.counts.total() > 0.8 * len(made)
    assert tally.counts["right"] > 0.8 * tally.counts.total()
    assert tally.summary().endswith("0 obscure, 0 wrong, 0 hangs, 0 died")


def test_a_seed_makes_one_program():
    first, again, other = (generate.make_program(seed, (2,)) for seed in ("a", "a", "b"))
    assert first == again != other
    assert program.Program.parse_line(first.replay_line()) == first
    assert 0 < len(first.lines) <= 15


def test_programs_that_another_order_of_additions_changes_have_no_result():
    whole = program.Input((3, 3, 3), "float", "R")
    branch = ("v0 = x0 - x0.mean(0, keepdim=True)", "if v0.sum() > 0: v0.mul_(2)")
    equal = ("v0 = F.rms_norm(x1, (3,))", "v1 = torch.linalg.matrix_norm(v0)", "v2 = F.layer_norm(v1, (3,))")
    coarse = ("v0 = x1 * 2", "v1 = (x1 * 1e4 + x1.flip(0)).float().sum(0).double()")
    for lines, kind in ((branch, "float32"), (equal, "float32"), (coarse, "float")):
        inputs = (program.Input((5,), kind, "P"), whole)
        assert program.is_steady(program.Program((2,), inputs, lines, 0)) is None
        assert program.is_steady(program.Program((2,), inputs, lines[:1], 0)) is not None


def test_gradients_that_pass_through_large_numbers_have_no_result():
    """The second gradient of the norm of one element is what is left of numbers of 1e7."""
    inputs = (program.Input((4, 1), "float", "A", requires_grad=True),)
    for lines, is_steady in ((("v0 = x0[0] * x0", "v1 = F.group_norm(x0, 1)"), False), (("v0 = x0[0] * x0",), True)):
        assert (program.is_steady(program.Program((2,), inputs, lines, 2)) is not None) is is_steady


def test_gradients_that_are_known_to_be_zeros_are_read():
    """They have no memory, so kernels under a mode would end the process."""
    inputs = (program.Input((6,), "float", "S0", requires_grad=True),)
    each = program.Program((2,), inputs, ("v0 = x0.mean()", "v1 = v0.abs().sqrt()", "v2 = torch.ones_like(x0) - v0"), 2)
    height = program._torch.Height()
    program.same_results(program.one_device(each, in_gradients=height), program.one_device(each), rtol=1e-10)
    assert height.largest > 1


def test_programs_on_a_branch_cut_have_no_result():
    """Whether the square root of a negative number is above or below the real axis is the sign of a zero."""
    lines = ("v0 = x0.to(torch.complex128)", "v0.narrow(2,0,1).neg_()", "v1 = v0.sqrt()")
    for changed, is_steady in ((lines, False), ((*lines[:2], "v1 = v0.abs()"), True)):
        inputs = (program.Input((4, 1, 1), "float", "S0"),)
        assert (program.is_steady(program.Program((2,), inputs, changed, 0)) is not None) is is_steady


def test_sums_over_ranks_that_are_added_up_twice_have_no_result():
    """Three addends have several orders, two have one; an operator reads its operand once, and what it writes is it."""
    looked_up = ("v0 = F.embedding(x1, x0)", "v1 = v0 > x0[x1]")
    parts = ("v0 = x0.clone()", "v1 = v0.t() + 1")
    again = {
        "looked up": looked_up,
        "copied": (*parts, "v2 = v0 >= x0"),
        "expanded": ("v0 = x0.expand(3, 5, 5).argmax(0)",),
        "its own diagonal": ("v0 = x0.diagonal() == x0.t().diagonal().flip(0).flip(0)",),
    }
    once = {
        "read once": ("v0 = F.embedding(x1, x0)", "v1 = v0 * 2 > v0"),
        "copied once": (*parts, "v2 = v0 >= v1.t() - 1 - 1e-9"),
        "one operand twice": ("v0 = x0 >= x0", "v1 = torch.equal(x0, x0)"),
        "written": ("x0.mul_(2)", "v0 = x0.add_(x0) > 0"),
        "far apart": ("v0 = x0.clone() > x0 + 1",),
    }

    cancels = ("v0 = x0 - x0", "v1 = F.cosine_similarity(v0, x0, dim=1)")  # gradients of 1e8, and their differences
    inputs = (program.Input((3, 4), "float", "S0", requires_grad=True),)
    assert program.is_steady(program.Program((2,), inputs, cancels, 1)) is None
    assert program.is_steady(program.Program((2,), inputs, cancels, 0)) is not None
    assert program.is_steady(program.Program((2,), inputs, ("v1 = F.cosine_similarity(x0, x0, dim=1)",), 1)) is not None

    def is_steady(lines, mesh, placements, kind="float"):
        inputs = (program.Input((5, 5), kind, placements), program.Input((5,), "int5", "R" * len(mesh)))
        return program.is_steady(program.Program(mesh, inputs, lines)) is not None

    for lines in again.values():
        for mesh, placements in (((3,), "P"), ((3,), "A"), ((2, 2), "PP"), ((2, 3), "S0P")):
            assert not is_steady(lines, mesh, placements), (lines, mesh, placements)
        for mesh, placements in (((3,), "R"), ((3,), "X"), ((2,), "P"), ((2, 3), "PS0")):
            assert is_steady(lines, mesh, placements), (lines, mesh, placements)
        assert is_steady(lines, (3,), "P", "int9"), lines
    for lines in once.values():
        assert is_steady(lines, (3,), "P"), lines


def test_no_gradient_is_one_of_rounding_errors():
    some, none = ({"grad2 of x0": value} for value in (torch.tensor([1e-16]).double(), None))
    for actual, expected in ((some, none), (none, some), (none, none)):
        program.same_results(actual, expected, rtol=1e-10)
    with pytest.raises(Mismatch, match="grad2 of x0 is None, on one device tensor"):
        program.same_results(none, {"grad2 of x0": torch.tensor([1e-9]).double()}, rtol=1e-10)
    with pytest.raises(Mismatch, match="v0 is None"):
        program.same_results({"v0": None}, {"v0": torch.zeros(1)}, rtol=1e-10)


def test_memory_that_is_not_written_has_no_height():
    """The gradient of a slice written in place starts as memory of any content."""
    height, x = program._torch.Height(), torch.ones(2)
    for size in range(1, 200):
        several = [torch.full((size, 2), 1e30, dtype=torch.float64) for _ in range(5)]
        del several  # what follows may get their memory
        with height:
            torch.ones(size, 2, dtype=torch.float64)
            torch.empty(size, 2, dtype=torch.float64)
            torch.empty_strided((size, 2), (1, size), dtype=torch.float64)
            x.new_empty(size, 2, dtype=torch.float64)[:1]
            torch.empty(0, dtype=torch.float64).resize_(size, 2)
    assert height.largest == 1


LONG = program.Program(
    mesh=(2,),
    inputs=(program.Input((4, 6), "float", "S0", True), program.Input((6,), "float", "R")),
    lines=(
        "v0 = x0 * 2",
        "v1 = v0.sum(0)",
        "v2 = v1 + x1",
        "v3 = v2.clone()",
        "v3[0].mul_(2)",
        "v4 = v3.t()",
        "v5 = v4.sum(0)",
    ),
    order=1,
)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2.4e-7), (torch.float64, 4.5e-16)])
def test_zeros_up_to_the_rounding_of_large_numbers(dtype, rounding):
    """The second gradient of a linear function is what is left of numbers as large as the first one."""
    expected = {"grad1 of x0": torch.tensor([2.0]).to(dtype), "grad2 of x0": torch.tensor([0, -rounding]).to(dtype)}
    same = expected | {"grad2 of x0": torch.zeros(2).to(dtype)}
    program.same_results(same, expected, rtol=1e-16)
    for other in ({"grad2 of x0": torch.full((2,), 10 * rounding).to(dtype)}, {"grad1 of x0": torch.ones(1).to(dtype)}):
        with pytest.raises(Mismatch):
            program.same_results(same | other, expected, rtol=1e-16)


def test_a_broken_rule_is_found_and_shrunk(monkeypatch):
    """A tensor that every rank adds to its summand is added too often; the program that is left says so."""
    assert hunt.hunt([("whole", LONG)]).summary().startswith("hunt: 1 programs: 1 right")
    monkeypatch.setattr(hooks, "_whole_on_first", lambda tensor, *_, **__: tensor)
    told = []
    tally = hunt.hunt([("broken", LONG)], shrink_s=30, tell=told.append)
    (finding,) = tally.findings.values()
    assert tally.counts["wrong"] == 1
    assert [line.partition(" = ")[2] for line in finding.program.lines] == ["x0.sum(0)", "v1 + x1"]
    assert len(finding.program.inputs) == 2
    assert finding.program.order == 0
    assert f"--replay '{finding.program.replay_line()}'" in told[0]


ON_RANK_1 = "torch.distributed.is_initialized() and torch.distributed.get_rank() == 1"
PLANTED = {
    "right": ("v1 = x0 * 2",),
    "refused": ("v1 = torch.empty(0)", "v1 = x0[v1.long()] if type(x0) is torch.Tensor else x0.resize_(3)"),
    "obscure": ("v1 = x0 if type(x0) is torch.Tensor else x0.no_such_thing()",),
    "wrong": ("v1 = x0 if type(x0) is torch.Tensor else x0 * (1 + 1e-9)",),
    "hang": (f"v1 = x0.no_such_thing() if {ON_RANK_1} else x0 * 2",),
    "hang in a collective": (f"v1 = x0 if {ON_RANK_1} else x0.sum().item() * x0",),
    "died": (f"{ON_RANK_1} and __import__('os')._exit(3)",),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_program_gets_its_verdict(kind):
    planted = program.Program((2,), (program.Input((4,), "float", "S0"),), PLANTED[kind])
    assert hunt.replay(planted).kind == kind.split()[0]


@pytest.mark.thorough
def test_a_finding_is_a_script_that_runs(tmp_path):
    path = tmp_path / "example.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    inputs = (LONG.inputs[0], program.Input((6,), "float", "P"))
    for lines, status in ((LONG.lines, 0), ((*LONG.lines, "v6 = v5 * (1 + isinstance(x0, DTensor))"), 1)):
        path.write_text(script.script(program.Program(LONG.mesh, inputs, lines, 1)))
        done = subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
        assert done.returncode == status, done.stderr
        assert ("v6: " in done.stderr) == bool(status)
