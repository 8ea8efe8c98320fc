"""Every ordered pair of 19 layouts: a training that one saves goes on in the other as if it had not been stopped.

    one process                     5 steps of plain torch: the reference
    each layout                     2 steps, save, 3 steps: equal to the reference (below 1e-10)
    each layout, each checkpoint    load, save again: no bit of any tensor differs; 3 steps: equal to the reference

By default each layout of two groups goes on from its own checkpoint and from that of one other. All 361 pairs:
`nox -s "integration(ckpt)" -- -m thorough -n 0`.
"""

import importlib
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, diff
from vescale_testing import assert_same_training, run_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("training_in_layouts")
sys.path.pop(0)

GROUPS, LAYOUTS, STEPS, STOP = training.GROUPS, training.LAYOUTS, training.STEPS, training.STOP


@pytest.fixture(scope="module")
def expected():
    """The last steps of the training in one process."""
    (record,) = run_ranks(training.train_on_one, 1)
    return record


# ---------------------------------------------------------------------------------------------------------- on ranks


def difference(record, expected, **bound):
    """Return the first difference of two trainings, or nothing."""
    try:
        assert_same_training(record, expected, **bound)
    except AssertionError as error:
        return [str(error).splitlines()[0]]
    return []


def go_on(run, folder, expected, **bound):
    """Load a checkpoint into a run that is elsewhere, compare what was loaded, and train; return what is wrong."""
    try:
        run.load(folder)
        run.save(f"{folder}-again")
    except CheckpointError as error:  # on all ranks
        return [str(error)]
    wrong = list(map(str, diff(folder, f"{folder}-again"))) if dist.get_rank() == 0 else []
    return wrong + difference(run.train(STEPS), expected, **bound)


def save_and_go_on(layout, folder, others, expected):
    """Train, save and train; then go on from this checkpoint and from others. Return what is wrong, by layout."""
    run = training.Run(layout)
    run.train(STOP)
    run.save(folder)
    record = run.train(STEPS)
    wrong = {"uninterrupted": difference(record, expected, rtol=1e-10)}
    wrong |= {"itself": go_on(run, folder, record, bitwise=True)}
    return wrong | {name: go_on(run, other, expected, rtol=1e-10) for name, other in others.items()}


def go_on_from_all(layout, folders, expected):
    """Go on from each checkpoint, the first of them before anything has been trained."""
    run = training.Run(layout, seed=99)
    return {name: go_on(run, folder, expected, rtol=1e-10) for name, folder in folders.items()}


def failures(function, layout, *arguments):
    """Call a function on the ranks of a layout; return what is wrong, by rank and layout that saved."""
    every = run_ranks(function, layout.plan.world_size, layout, *arguments, timeout=900)
    return [
        f"{name}, rank {rank}: {text}" for rank, wrong in enumerate(every) for name, ts in wrong.items() for text in ts
    ]


# ------------------------------------------------------------------------------------------------------------- tests


def test_the_layouts_are_of_all_kinds():
    plans = [layout.plan for layout in LAYOUTS.values()]
    assert len(plans) >= 12
    assert {*GROUPS} == {"width", "modes", "depth", "shards", "sequence"}
    assert {plan.world_size for plan in plans} == set(range(1, 9))
    assert {plan.zero for plan in plans} == {0, 1, 2, 3}
    assert {plan.schedule for plan in plans} == {"1f1b", "interleaved_1f1b", "zb_v", "dual_pipe_v"}
    assert {plan.mode for plan in plans} == {"eager", "static", "compile"}


@pytest.mark.parametrize(
    "group",
    ["width", "modes", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("depth", "shards", "sequence"))],
)
def test_each_layout_goes_on_from_another(group, expected, tmp_path):
    """From the one before it in a group; and the first one, started anew, from the last."""
    before = {}
    for name, layout in GROUPS[group].items():
        folder = str(tmp_path / name)
        assert failures(save_and_go_on, layout, folder, before, expected) == [], name
        before = {name: folder}
    first = next(iter(GROUPS[group]))
    assert failures(go_on_from_all, LAYOUTS[first], before, expected) == [], first


@pytest.fixture(scope="module")
def checkpoints(expected, tmp_path_factory):
    """A checkpoint of each layout, whose training without an interruption is that of one process."""
    folders = {name: str(tmp_path_factory.mktemp("saved") / name) for name in LAYOUTS}
    for name, folder in folders.items():
        assert failures(save_and_go_on, LAYOUTS[name], folder, {}, expected) == [], name
    return folders


@pytest.mark.thorough
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_ordered_pair(target, checkpoints, expected):
    assert failures(go_on_from_all, LAYOUTS[target], checkpoints, expected) == []


# ------------------------------------------------------------------------------------ differences that must be found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The checkpoint of one process."""
    folder = str(tmp_path_factory.mktemp("one") / "saved")

    def save():
        run = training.Run(LAYOUTS["one"])
        run.train(STOP)
        run.save(folder)

    run_ranks(save, 1)
    return folder


def on_two_ranks(function):
    """Return what a function returns on both ranks, which is the same."""
    first, second = run_ranks(function, 2)
    assert first == second
    return first


def test_without_the_random_streams_the_losses_differ(saved, expected):
    def go_on_elsewhere():
        run = training.Run(LAYOUTS["tp2"], seed=99)
        run.load(saved, without="random")
        return difference(run.train(STEPS), expected, rtol=1e-10)

    (text,) = on_two_ranks(go_on_elsewhere)
    assert text.startswith("loss of step 1 differs by")


@pytest.mark.parametrize("part", ["model", "optimizer", "scheduler"])
def test_without_a_part_of_the_state_the_training_differs(part, saved, expected):
    def go_on_without():
        run = training.Run(LAYOUTS["tp2"], seed=99)
        run.load(saved, without=part)
        return difference(run.train(STEPS), expected, rtol=1e-10)

    (text,) = on_two_ranks(go_on_without)
    assert "differs by" in text


def test_one_changed_element_is_found(saved, expected, tmp_path):
    def change():
        run = training.Run(LAYOUTS["tp2"], seed=99)
        run.load(saved)
        with torch.no_grad():
            run.model.get_parameter("model.norm.weight")[3] += 2.0**-20
        run.save(str(tmp_path))
        return difference(run.train(STEPS), expected, rtol=1e-10)

    (text,) = on_two_ranks(change)
    assert text.startswith("loss of step 1 differs by")
    (found,) = diff(saved, str(tmp_path))
    assert found.name == "model/model.norm.weight"
    assert found.text.startswith("1 of 32 elements differ")
