"""Records of the same run under other layouts agree, say what they lack, and refuse what is no record."""

import functools
import json
import shutil

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import vescale
from vescale.__main__ import main
from vescale._compare.digest import block_digests, row_sums
from vescale._compare.file import RecordError
from vescale.dtensor import Replicate, Shard
from vescale_testing import run_ranks

MODULE_PLAN = {
    "parameter": {
        r"layers\.\d+\.up\.(weight|bias)": {"tp": Shard(0)},
        r"layers\.\d+\.down\.weight": {"tp": Shard(1)},
    },
    "forward": {r"layers\.\d+\.up\.input": [{"tp": Replicate()}], r"layers\.\d+\.down\.output": [{"tp": Replicate()}]},
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.1)

    def forward(self, x):
        return x + self.down(self.inner(self.up(x).tanh()))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Net().double()


def batches(num_steps=3):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
        yield {"x": x, "target": x[:, :2].sin()}


def plain(record, *, lr=0.02, num_steps=3):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with record(model, optimizer):
        for batch in batches(num_steps):
            nn.functional.mse_loss(model(batch["x"]), batch["target"]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()


def by_plan(record, **plan):
    adamw = functools.partial(torch.optim.AdamW, lr=0.02)
    model, optimizer = vescale.parallelize(
        vescale.Plan(**plan),
        build(),
        adamw,
        clip_grad_norm=0.5,
        loss_fn=nn.functional.mse_loss,
        module_plan=MODULE_PLAN,
    )
    with record(model, optimizer):
        for batch in batches():
            model(**model.local_batch(batch)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def saved(folder, run, **settings):
    run(functools.partial(vescale.record, folder, **settings))
    return folder


# --- the same run ---

LAYOUTS = [
    {"dp": 4, "zero": 2},
    {"dp": 2, "tp": 2, "zero": 3, "mode": "static"},
    {"dp": 2, "pp": 2, "zero": 3, "num_microbatches": 2},
    {"dp": 2, "tp": 2, "num_microbatches": 4, "mode": "static"},
    {"tp": 2, "pp": 2, "num_microbatches": 4, "schedule": "zb_v", "mode": "static"},
    {"dp": 2, "pp": 2, "zero": 1, "num_microbatches": 4, "schedule": "interleaved_1f1b"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: " ".join(f"{k}={v}" for k, v in layout.items()))
def test_no_layout_differs(layout, tmp_path):
    saved(tmp_path / "plain", plain)
    run_ranks(functools.partial(saved, tmp_path / "layout", functools.partial(by_plan, **layout)), 4, timeout=200)
    comparison = vescale.compare(tmp_path / "plain", tmp_path / "layout")
    assert comparison.is_same, str(comparison)
    assert comparison.steps == [0, 1, 2]
    assert comparison.compared >= 279  # all but the model itself, which no rank of a pipeline calls
    assert not comparison.bits
    saved(tmp_path / "other", functools.partial(plain, lr=0.021))
    first = vescale.compare(tmp_path / "other", tmp_path / "layout").first
    assert (first.step, first.kind, first.what) == (0, "parameter", "values")


def test_two_parallel_layouts_without_a_plain_one(tmp_path):
    for name, layout in (("a", {"dp": 2, "zero": 1}), ("b", {"pp": 2, "num_microbatches": 4})):
        run_ranks(functools.partial(saved, tmp_path / name, functools.partial(by_plan, **layout)), 2, timeout=200)
    comparison = vescale.compare(tmp_path / "a", tmp_path / "b")
    assert comparison.is_same, str(comparison)
    assert comparison.compared >= 279


def test_a_record_changes_nothing():
    def losses(record):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        with record(model, optimizer):
            for batch in batches():
                loss = nn.functional.mse_loss(model(batch["x"]), batch["target"])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
        hooks = [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]
        return found, sum(hooks)

    without, _ = losses(lambda *_: torch.enable_grad())
    with_record = []
    vescale.compare(lambda record: with_record.append(losses(record)), plain)
    assert with_record[0] == (without, 0)


def test_calls_that_backward_repeats_are_recorded_once(tmp_path):
    class Again(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    class Once(nn.Sequential):
        def forward(self, x):
            return super().forward(x)

    def train(kind):
        torch.manual_seed(0)
        model = kind(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4))
        with vescale.record(tmp_path / kind.__name__, model):
            model(torch.ones(3, 4)).sum().backward()

    train(Again)
    train(Once)
    comparison = vescale.compare(tmp_path / "Again", tmp_path / "Once", bits=True)
    assert comparison.is_same, str(comparison)
    assert {what: count for what, count in comparison.uncompared.items() if "only" in what} == {}


# --- digests ---


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_digests_add_up_over_any_parts(dtype):
    torch.manual_seed(0)
    whole = torch.randn(6, 5, 4) > 0 if dtype == torch.bool else (torch.randn(6, 5, 4) * 3).to(dtype)

    def digest(value, offsets=(0, 0, 0)):
        return block_digests([(row_sums(value, offsets, (6, 5, 4)), offsets[0], 6)])[0]

    parts = [digest(whole[a : a + 3, b : b + n], (a, b, 0)) for a in (0, 3) for b, n in ((0, 2), (2, 3))]
    total = functools.reduce(lambda a, b: a + b, parts)
    assert total.hashes == digest(whole).hashes
    assert total.norm == pytest.approx(whole.double().norm().item())
    changed = whole.clone()
    changed[4, 1, 2] = ~changed[4, 1, 2] if dtype == torch.bool else changed[4, 1, 2] + 1
    other = digest(changed).hashes
    assert sum(a != b for a, b in zip(other, total.hashes, strict=True)) == 1  # one block of rows
    assert digest(whole.flip(0)).hashes != total.hashes
    assert digest(whole.roll(1, 2)).hashes != total.hashes


# --- what is not there ---


def test_what_only_one_run_recorded_is_not_taken_as_equal(tmp_path):
    a, b = saved(tmp_path / "a", plain), saved(tmp_path / "b", functools.partial(plain, num_steps=1))
    comparison = vescale.compare(a, b)
    assert comparison.is_same
    assert comparison.steps == [0]
    assert comparison.uncompared["step recorded by A only"] == 2
    assert "nothing is said about it" in str(comparison)


def test_the_bound_of_a_file_is_kept_and_said(tmp_path):
    whole, bound = saved(tmp_path / "whole", plain), saved(tmp_path / "bound", plain, max_bytes=60_000)
    assert (whole / "rank00000.jsonl").stat().st_size > 60_000
    assert (bound / "rank00000.jsonl").stat().st_size < 70_000
    comparison = vescale.compare(whole, bound)
    assert comparison.is_same
    assert comparison.steps == [0]
    assert comparison.uncompared["B: steps after max_bytes was reached"] == 1


def test_a_run_that_dies_leaves_its_record(tmp_path):
    def dies(record):
        model = build()
        with record(model):
            model(torch.ones(2, 8).double())
            raise OverflowError("loss is too large")

    with pytest.raises(OverflowError):
        saved(tmp_path / "a", dies)
    path = tmp_path / "a" / "rank00000.jsonl"
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    text = (tmp_path / "b" / "rank00000.jsonl").read_text()
    (tmp_path / "b" / "rank00000.jsonl").write_text(text[: text.rindex('{"step"') + 5])  # killed while it wrote
    comparison = vescale.compare(tmp_path / "a", tmp_path / "b")
    assert "OverflowError: loss is too large" in path.read_text()
    assert comparison.uncompared["A: the record ends with OverflowError: loss is too large"] == 1
    assert comparison.uncompared["step recorded by A only"] == 1
    assert "nothing was compared" in str(comparison)


def test_chosen_steps_and_values(tmp_path):
    chosen = {"steps": [1], "values": ["layers.2.up"]}
    a = saved(tmp_path / "a", plain, **chosen)
    b = saved(tmp_path / "b", functools.partial(plain, lr=0.03), **chosen)
    first = vescale.compare(a, b).first
    assert (first.step, first.kind) == (1, "initial parameter")
    assert first.fqn == "layers.0.up.weight"
    assert first.index is None
    runs = vescale.compare(plain, functools.partial(plain, lr=0.03)).first
    assert (runs.step, runs.kind, runs.fqn, runs.index) == (0, "parameter", "layers.0.up.weight", (0, 0))
    assert runs.values[0] != runs.values[1]


# --- the command ---


def test_the_command_shows_the_first_difference(tmp_path, capsys):
    a, b = saved(tmp_path / "a", plain), saved(tmp_path / "b", functools.partial(plain, lr=0.03))
    assert main(["compare", str(a), str(a), "--bits"]) == 0
    assert "the same bits" in capsys.readouterr().out
    assert main(["compare", str(a), str(b)]) == 1
    assert "layers.0.up.weight of step 0, parameter: differs first (values)" in capsys.readouterr().out
    assert main(["compare", str(a), str(tmp_path / "c")]) == 2
    assert "expected a folder with the files rank00000.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "expected a record of format 1 in line 1, got None; record the run again with this version of vescale"),
        ("not a record\n", "line 1 is no JSON"),
        ('{"vescale_record": 7, "rank": 0, "world": 1}\n', "expected a record of format 1 in line 1, got 7"),
        ('{"vescale_record": 1, "rank": 0, "world": 3}\n', "expected the files of ranks 0 to 2, got those of [0]"),
    ],
)
def test_the_command_names_what_is_no_record(text, message, tmp_path, capsys):
    a, b = saved(tmp_path / "a", functools.partial(plain, num_steps=1)), tmp_path / "b"
    b.mkdir()
    (b / "rank00000.jsonl").write_text(text)
    assert main(["compare", str(a), str(b)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert str(b) in error
    assert main(["compare", str(b / "rank00000.jsonl"), str(a)]) == 2
    assert "compare: a: expected a folder with the files rank00000.jsonl, ... of a record" in capsys.readouterr().err


# --- bad records ---


def lines_of(folder):
    return [json.loads(line) for line in (folder / "rank00000.jsonl").read_text().splitlines()]


def write(folder, lines):
    (folder / "rank00000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: lines[0].update(vescale_record=2), r"expected a record of format 1 in line 1, got 2"),
        (lambda lines: lines[0].update(world=2), r"expected the files of ranks 0 to 1, got those of \[0\]"),
        (lambda lines: lines[0].update(rank="0"), r"expected numbers as rank and world in line 1"),
        (lambda lines: lines[3].update(c="x"), r"line 4: expected int at 'c', got 'x'"),
        (lambda lines: lines[3].update(h="AAAA"), r"line 4: expected 8 packed numbers"),
        (lambda lines: lines.__setitem__(2, [1]), r"line 3: expected an object, got ..1"),
    ],
)
def test_what_is_no_record_is_refused(change, message, tmp_path):
    folder = saved(tmp_path / "a", functools.partial(plain, num_steps=1))
    lines = lines_of(folder)
    change(lines)
    write(folder, lines)
    with pytest.raises(RecordError, match=message):
        vescale.compare(folder, folder)


def test_names_of_values_are_checked(tmp_path):
    with pytest.raises(ValueError, match=r"record: expected names of modules or parameters of Net in values, got"):
        vescale.record(tmp_path, build(), values=["layers.9"])


def test_what_is_neither_a_record_nor_a_run_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"expected the folder of a record, or a function that records a run, for b"):
        vescale.compare(tmp_path, 3)
