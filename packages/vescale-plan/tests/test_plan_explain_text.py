"""A plan explains itself as text: bars of memory within the limit, the ranks of each group and their hosts."""

import re

import pytest

from vescale.plan import Cluster, Constraints, Plan, StageMemory, generate_plan
from vescale.plan._explain.facts import KINDS

GIB = 2**30


def stage(*parts):
    return StageMemory(*(part * GIB for part in parts))


def bars(text):
    """Return the letters between the name of a stage and its total."""
    return dict(re.findall(r"^(stages? [\d-]+) +([a-z|][a-z |]*?) +\d", text, flags=re.MULTILINE))


def test_bars_are_as_long_as_the_memory():
    memory = (stage(10, 10, 20, 20, 0), stage(5, 5, 10, 10, 0), stage(5, 5, 10, 10, 0))
    text = Plan(pp=3, memory=memory, limit_bytes=60 * GIB).explain()
    found = bars(text)
    assert found == {
        "stage 0": "p" * 10 + "g" * 10 + "o" * 20 + "a" * 20 + "|",
        "stages 1-2": "p" * 5 + "g" * 5 + "o" * 10 + "a" * 10 + " " * 30 + "|",
    }
    assert "60.00 GiB  100.0%" in text
    assert "30.00 GiB  50.0%" in text


def test_a_bar_beyond_the_limit_crosses_its_mark():
    text = Plan(memory=(stage(60, 0, 0, 30, 30),), limit_bytes=60 * GIB).explain()
    assert bars(text) == {"stage 0": "p" * 30 + "|" + "a" * 15 + "b" * 15}
    assert "120.00 GiB  200.0%" in text


@pytest.mark.parametrize("numbers", [(1, 2, 3, 5, 7), (0, 0, 0, 0, 1), (997, 1, 1, 1, 1), (3, 3, 3, 3, 3)])
def test_rounding_changes_no_length(numbers):
    text = Plan(memory=(StageMemory(*numbers),)).explain()
    assert {len(bar) for bar in bars(text).values()} == {60}


def test_ranks_are_listed_by_groups_of_the_fastest_axis():
    lines = Plan(dp=2, tp=2, pp=2).explain(devices_per_host=4).splitlines()
    first = lines.index("ranks on the mesh pp 2 x dp 2 x tp 2, of 4 devices per host")
    assert lines[first + 1 : first + 5] == [
        "pp 0  dp 0  tp: 0 1   host 0",
        "pp 0  dp 1  tp: 2 3   host 0",
        "pp 1  dp 0  tp: 4 5   host 1",
        "pp 1  dp 1  tp: 6 7   host 1",
    ]


def test_a_group_over_two_hosts_names_both():
    text = Plan(tp=4, dp=2).explain(devices_per_host=2)
    assert "dp 1  tp: 4 5 6 7   host 2 3" in text


def test_axes_of_one_rank_are_left_out_and_large_meshes_shortened():
    assert "dp: 0 1 2" in Plan(dp=3).explain()
    assert "tp: 0\n" in Plan().explain()
    text = Plan(dp=64, tp=32).explain()
    assert "dp 0  tp: 0 to 31" in text
    assert "... and 48 groups more" in text
    assert "host" not in text


def test_order_of_axes_decides_the_ranks():
    assert "tp 1  pp: 2 3" in Plan(tp=2, pp=2, axis_order=("tp", "dp", "pp")).explain()


def test_a_generated_plan_shows_bars_mesh_and_table(build_mixtral):
    plan = generate_plan(
        build_mixtral(num_hidden_layers=4),
        Cluster(16, memory_bytes=80 * GIB),
        Constraints(global_batch_size=32, sequence_length=1024),
    )
    text = plan.explain(max_rows=3)
    assert text.startswith(str(plan))
    assert text.index("memory per rank: p parameters") < text.index("ranks on the mesh") < text.index("chosen")
    fullest = max(part.total for part in plan.memory) / plan.limit_bytes
    assert max(len(bar.replace("|", "").rstrip()) for bar in bars(text).values()) == round(60 * fullest)


def test_each_kind_has_a_letter_of_its_own():
    assert len({kind[0] for kind in KINDS}) == len(KINDS)
