"""Schedules as CSV: torch's own loader reads ours, we read torch's, and what is no computation is refused."""

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from vescale.pipe import from_csv, gpipe, one_f_one_b, to_csv, validate


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("p, m", [(1, 1), (2, 1), (4, 8), (4, 2), (3, 7)])
def test_round_trip(tmp_path, make, p, m):
    to_csv(make(p, m), tmp_path / "schedule.csv")
    assert from_csv(tmp_path / "schedule.csv") == make(p, m)


class Stage:
    """As much of a torch pipeline stage as the loader looks at."""

    def __init__(self, index, num_stages):
        self.stage_index = index
        self.num_stages = num_stages
        self.group_size = num_stages
        self.group_rank = index
        self.group = None
        self.is_first = index == 0
        self.is_last = index == num_stages - 1
        self.has_backward = True
        self.stage_index_to_group_rank = {i: i for i in range(num_stages)}


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_torch_runtime_loads_our_file(tmp_path, make):
    schedule = make(4, 8)
    to_csv(schedule, tmp_path / "schedule.csv")
    runtime = torch_schedules._PipelineScheduleRuntime([Stage(0, 4)], n_microbatches=8)
    runtime._load_csv(str(tmp_path / "schedule.csv"))
    for rank, actions in enumerate(schedule.ranks):
        theirs = [str(action) for action in runtime.pipeline_order_with_comms[rank]]
        computed = [word for word in theirs if word.lstrip("0123456789")[0] in "FB" and "_" not in word]
        assert computed == [str(action) for action in actions]


def test_torch_refuses_a_broken_file(tmp_path):
    (tmp_path / "schedule.csv").write_text("0F0,0B0\n1B0,1F0\n")
    runtime = torch_schedules._PipelineScheduleRuntime([Stage(0, 2)], n_microbatches=1)
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


@pytest.mark.parametrize("cell", ["0SEND_F0", "0UNSHARD", "(0F3;3B1)OVERLAP_F_B", "forward"])
def test_other_cells_are_refused_with_their_place(tmp_path, cell):
    (tmp_path / "schedule.csv").write_text(f"0F0,0B0\n1F0,{cell}\n")
    with pytest.raises(ValueError, match=r"row 2, column 2: expected an action like '2F0'.*compute_only format"):
        from_csv(tmp_path / "schedule.csv")


def test_an_empty_file_is_refused(tmp_path):
    (tmp_path / "schedule.csv").write_text("\n")
    with pytest.raises(ValueError, match="expected one row per rank with cells like '0F0', got no action"):
        from_csv(tmp_path / "schedule.csv")
