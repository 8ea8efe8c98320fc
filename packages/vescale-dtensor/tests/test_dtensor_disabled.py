"""`disabled()` gives stock torch back while it is open, and everything is in place again afterwards."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from vescale.dtensor import Shard, _install, disabled, init_device_mesh, random
from vescale.dtensor._install import FAMILIES, ROWS
from vescale.dtensor._torch import patches
from vescale_testing import ranks

PROGRAM = Path(__file__).with_name("stock_program.py")
PAGE = Path(__file__).parents[1] / "INTERNALS.md"
BY_FAMILY = {family: [row for row in ROWS if row.family == family] for family in FAMILIES}


def run_program(folder, mode):
    """Run the program of stock_program.py in a process of its own; return what each rank found, by run."""
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # errors of torch print sets
    command = [sys.executable, str(PROGRAM), str(folder), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return [pickle.loads(folder.joinpath(f"{rank}.pickle").read_bytes()) for rank in range(4)]


def test_a_process_that_never_imported_us(tmp_path):
    never, imported = (run_program(tmp_path / mode, mode) for mode in ("never", "imported"))
    for rank, (stock, runs) in enumerate(zip(never, imported, strict=True)):
        expected = stock["never"]
        for name in ("disabled", "disabled again"):
            different = [case for case in expected if runs[name][case] != expected[case]]
            assert different == [], f"rank {rank}, {name}: {[(expected[c], runs[name][c]) for c in different]}"
        assert [case for case in runs["ours"] if runs["ours"][case] != runs["ours again"][case]] == []
    pairs = [(stock["never"], runs["ours"]) for stock, runs in zip(never, imported, strict=True)]
    ours = {case for stock, other in pairs for case in stock if stock[case] != other[case]}
    changed = {"two sums", "repr", "dropout", "rand", "topk of three", "cross entropy", "write to a row", "boxes"}
    assert changed <= ours, "the program uses what this package changes"


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_change_is_removed_and_comes_back(row):
    attributes = vars(row.patch).values()
    replaced = [p for p in (row.patch, *attributes) if isinstance(p, patches.AttributePatch)]
    assert row.patch.is_installed()
    with disabled():
        assert not row.patch.is_installed()
        for p in replaced:
            for owner in p.owners:
                assert vars(owner).get(p.name, patches.ABSENT) is p.stock, p.place
        with disabled(row.family), disabled():
            pass
        assert not row.patch.is_installed()
    assert row.patch.is_installed()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_alone(family):
    assert BY_FAMILY[family], "no family is empty"
    with disabled(family):
        assert [row.family for row in ROWS if not row.patch.is_installed()] == [family] * len(BY_FAMILY[family])
        with disabled():
            assert not any(row.patch.is_installed() for row in ROWS)
        assert {row.family for row in ROWS if row.patch.is_installed()} == {*FAMILIES} - {family}
    assert all(row.patch.is_installed() for row in ROWS)


def test_an_unknown_family_is_refused():
    with (
        pytest.raises(ValueError, match=r"expected names among random, operators, .* got randomness"),
        disabled("randomness"),
    ):
        pass


def test_stock_attributes_of_torch_inside():
    """Independent of how patches remember it: the code that runs is torch's."""
    with disabled():
        for method in ("redistribute", "__repr__", "__create_chunk_list__"):
            assert getattr(DTensor, method).__module__.startswith("torch."), method
        dispatcher = type(DTensor._op_dispatcher)
        assert dispatcher._propagate_op_sharding_dispatch_slow_path.__code__.co_filename.endswith("_dispatch.py")
        assert all(handler.__module__.startswith("torch.") for handler in patches.handler_table().values())
    assert any(handler.__module__.startswith("vescale.") for handler in patches.handler_table().values())


def test_rows_are_named_once_and_give_a_reason():
    assert len({row.name for row in ROWS}) == len(ROWS)
    assert all(row.reason and row.patch.place for row in ROWS)
    assert {row.family for row in ROWS} == set(FAMILIES)


def table_of_changes() -> str:
    """Return the table of process-wide changes as the page must have it."""
    lines = ["| change | family | what is replaced | reason |", "|---|---|---|---|"]
    lines += [f"| {row.name.strip('_')} | `{row.family}` | `{row.patch.place}` | {row.reason} |" for row in ROWS]
    return "\n".join(lines)


def test_the_table_of_process_wide_changes_is_the_one_that_is_installed():
    shown = PAGE.read_text().partition("<!-- rows -->\n")[2].partition("\n<!-- end of rows -->")[0]
    assert shown == table_of_changes(), f"put this table into the page:\n{table_of_changes()}"


def test_a_row_that_this_torch_does_not_need_is_not_installed(monkeypatch):
    installed = []
    monkeypatch.setattr(_install, "_install", installed.extend)
    old = [_install.Row("old", "repr", "fixed", ROWS[0].patch, until=(2, 5))]
    new = [_install.Row("new", "repr", "not fixed", ROWS[0].patch, until=(99, 0))]
    monkeypatch.setattr(_install, "ROWS", (*old, *new))
    _install.register()
    assert installed == new


@ranks(2)
def test_random_operators_are_stock_inside(shard, shard_of):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(torch.ones(8, 8), mesh, (Shard(0),))

    def masks():
        torch.manual_seed(1)
        plain = F.dropout(torch.ones(8, 8))
        torch.manual_seed(1)
        return F.dropout(x).to_local(), shard_of(plain, mesh, (Shard(0),))

    ours, whole = masks()
    assert torch.equal(ours, whole)
    with disabled():
        stock, whole = masks()
        assert torch.equal(stock, whole) == (mesh.get_local_rank() == 0)  # every rank draws the first rows
        with disabled():
            pass
        assert not torch.equal(masks()[0], ours) or mesh.get_local_rank() == 0
    ours, whole = masks()
    assert torch.equal(ours, whole)


@ranks(2)
def test_an_exception_inside_restores_the_rules(assert_drawn_alike):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ZeroDivisionError), disabled():
        raise ZeroDivisionError
    assert_drawn_alike(torch.rand_like, torch.ones(5, 5), mesh, (Shard(1),))


@ranks(2)
def test_local_batch_does_nothing_inside():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def draw():
        torch.manual_seed(1)
        return torch.rand(4)

    plain = draw()
    with disabled(), random.local_batch(mesh):
        assert torch.equal(draw(), plain)
    with random.local_batch(mesh):
        assert torch.equal(draw(), plain) == (mesh.get_local_rank() == 0)
        with disabled():
            assert torch.equal(draw(), plain)


@ranks(2)
def test_a_decision_that_stock_has_cached_is_not_used_outside(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(torch.arange(20.0).view(4, 5), mesh, (Shard(0),))
    with disabled():
        assert torch.topk(x, 1).values.shape == torch.topk(x, 2).values.shape == (4, 1)
    assert [torch.topk(x, k).values.shape for k in (1, 2)] == [(4, 1), (4, 2)]
    with disabled():
        assert torch.topk(x, 2).values.shape == (4, 2), "nothing is left of the first time"
