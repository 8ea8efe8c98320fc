"""Schedules as CSV: torch's own loader reads ours, we read torch's, and what is no computation is refused."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from vescale.pipe import (
    Costs,
    dual_pipe_v,
    from_csv,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    lower,
    one_f_one_b,
    search_schedule,
    simulate,
    to_csv,
    validate,
    zb_h2,
    zb_v,
)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("p, m", [(1, 1), (2, 1), (4, 8), (4, 2), (3, 7)])
def test_round_trip(tmp_path, make, p, m):
    to_csv(make(p, m), tmp_path / "schedule.csv")
    assert from_csv(tmp_path / "schedule.csv") == make(p, m)


class Stage:
    """As much of a torch pipeline stage as the loader looks at."""

    def __init__(self, index, num_stages, home):
        self.stage_index = index
        self.num_stages = num_stages
        self.group_size = 1 + max(home.values())
        self.group_rank = home[index]
        self.group = None
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.has_backward = True
        self.stage_index_to_group_rank = home


OURS = {
    "gpipe": lambda: gpipe(4, 8),
    "1f1b": lambda: one_f_one_b(4, 8),
    "bfs": lambda: looped_bfs(4, 8),
    "interleaved": lambda: interleaved_1f1b(4, 8),
    "zb_h2": lambda: zb_h2(4, 8),
    "interleaved_zb": lambda: interleaved_zero_bubble(4, 8, 3),
    "zb_v": lambda: zb_v(4, 8),
    "dual_pipe_v": lambda: dual_pipe_v(4, 8),
    "searched": lambda: search_schedule(4, 8, costs=Costs(1.0, 1.4, 0.6, 0.1), effort=50_000),
}


def runtime_of(schedule):
    """Return torch's runtime for rank 0 of a schedule."""
    home = {action.stage: rank for rank, action in schedule}
    stages = [Stage(s, schedule.num_stages, home) for s, rank in home.items() if rank == 0]
    return torch_schedules._PipelineScheduleRuntime(stages, n_microbatches=schedule.num_microbatches)


def words_of(actions):
    return [str(action) for action in actions if action is not None]


@pytest.mark.parametrize("name", OURS)
def test_torch_runtime_loads_our_file(tmp_path, name):
    schedule = OURS[name]()
    to_csv(schedule, tmp_path / "schedule.csv")
    runtime = runtime_of(schedule)
    runtime._load_csv(str(tmp_path / "schedule.csv"))
    for rank, cells in enumerate(schedule.ranks):
        theirs = words_of(runtime.pipeline_order_with_comms[rank])
        computed = [word for word in theirs if "OVERLAP" in word or ("_" not in word and "SHARD" not in word)]
        assert computed == [str(cell) for cell in cells]


@pytest.mark.parametrize("name", OURS)
def test_torch_runtime_takes_our_communication(tmp_path, name):
    schedule = lower(OURS[name](), unshard=True, reduce_grad=True)
    to_csv(schedule, tmp_path / "schedule.csv")
    runtime = runtime_of(schedule)
    runtime._load_csv(str(tmp_path / "schedule.csv"), format="compute_comms")
    for rank, cells in enumerate(schedule.ranks):
        assert words_of(runtime.pipeline_order_with_comms[rank]) == [str(cell) for cell in cells]


TORCHS = {
    "Interleaved1F1B": lambda: interleaved_1f1b(4, 8),
    "InterleavedZeroBubble": lambda: interleaved_zero_bubble(4, 8),
    "LoopedBFS": lambda: looped_bfs(4, 8),
    "ZBVZeroBubble": lambda: zb_v(4, 8),
    "DualPipeV": lambda: dual_pipe_v(4, 8),
}


@pytest.mark.parametrize("name", TORCHS)
def test_schedules_of_torch_are_read_and_as_good_as_ours(tmp_path, name):
    rows = get_schedule_ops(name, 4, 8, num_stages_per_rank=2, with_comms=False)
    lines = [",".join("" if action is None else str(action) for action in row) for row in rows]
    (tmp_path / "torch.csv").write_text("\n".join(lines))
    theirs, ours = from_csv(tmp_path / "torch.csv"), TORCHS[name]()
    validate(lower(theirs), buffers=1)
    costs = Costs(0.5, 0.6, 0.4, 0.05)
    assert simulate(ours, costs).makespan == pytest.approx(simulate(theirs, costs).makespan)
    assert max(simulate(ours).peak_activations) <= max(simulate(theirs).peak_activations)


def test_torch_refuses_a_broken_file(tmp_path):
    (tmp_path / "schedule.csv").write_text("0F0,0B0\n1B0,1F0\n")
    runtime = torch_schedules._PipelineScheduleRuntime([Stage(0, 2, {0: 0, 1: 1})], n_microbatches=1)
    with pytest.raises(AssertionError):
        runtime._load_csv(str(tmp_path / "schedule.csv"))


def test_idle_cells_are_dropped(tmp_path):
    (tmp_path / "schedule.csv").write_text("0F0,,,0B0\n,1F0,1B0,\n")
    assert str(from_csv(tmp_path / "schedule.csv")) == "0F0 0B0\n1F0 1B0"


def test_a_torch_zero_bubble_file_is_read(tmp_path):
    (tmp_path / "zbv.csv").write_text("0F0,,,3F0,3I0,3W0,,,0I0,0W0\n,1F0,2F0,,,,2I0,1I0,2W0,1W0\n")
    schedule = from_csv(tmp_path / "zbv.csv")
    validate(schedule)
    assert schedule.num_stages == 4


@pytest.mark.parametrize("cell", ["0SEND_F0", "0UNSHARD"])
def test_communication_is_refused_with_its_place(tmp_path, cell):
    (tmp_path / "schedule.csv").write_text(f"0F0,0B0\n1F0,{cell}\n")
    with pytest.raises(ValueError, match=r"row 2, column 2: expected a computation, got .*compute_only.*lowered=True"):
        from_csv(tmp_path / "schedule.csv")
    assert str(from_csv(tmp_path / "schedule.csv", lowered=True)).endswith(cell)


def test_other_text_is_refused_with_its_place(tmp_path):
    (tmp_path / "schedule.csv").write_text("0F0,0B0\n1F0,forward\n")
    with pytest.raises(ValueError, match=r"row 2, column 2: expected an action like '2F0'.*got the text 'forward'"):
        from_csv(tmp_path / "schedule.csv")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "schedule.csv").write_text("\n")
    with pytest.raises(ValueError, match="expected one row per rank with cells like '0F0', got no action"):
        from_csv(tmp_path / "schedule.csv")
