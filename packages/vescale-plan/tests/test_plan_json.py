"""A plan survives JSON exactly, and what is not a plan is refused with the place."""

import json
import re

import pytest

from vescale.plan import Cluster, Constraints, Plan, generate_plan


@pytest.fixture
def generated(build_mixtral):
    """A plan with estimates and a table."""
    run = Constraints(global_batch_size=64, sequence_length=4096)
    return generate_plan(build_mixtral(), Cluster(16, memory_bytes=80 * 2**30), run)


def test_hand_written_plans_round_trip():
    for plan in (
        Plan(),
        Plan(dp=2, tp=2, pp=2, zero=2, sequence_parallel=True, schedule="gpipe", num_microbatches=3, device="cuda"),
        Plan(pp=3, split=["layers.1", "layers.2"], axis_order=["tp", "pp", "dp"], module_plan="llama", bucket_bytes=1),
        Plan(pp=2, split=[["embed", "layers.0"], ["layers.1"]]),
    ):
        assert Plan.from_json(plan.to_json()) == plan


def test_generated_plan_round_trips_with_its_table(generated, tmp_path):
    generated.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == generated
    assert loaded.table == generated.table
    assert loaded.memory == generated.memory
    assert loaded.explain() == generated.explain()
    assert hash(loaded) == hash(generated)


def test_a_changed_plan_is_not_equal(generated):
    data = json.loads(generated.to_json())
    data["memory"][0]["activations"] += 1
    assert Plan.from_json(json.dumps(data)) != generated


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_microbatch": 4}, "one of the keys dp, tp, .*, got 'num_microbatch'; did you mean 'num_microbatches'?"),
        ({"xyz": 4}, "expected one of the keys dp, tp, pp, .*, got 'xyz'; remove it"),
        ({"dp": "2"}, "expected an integer at dp, got '2'; pass the text of to_json()"),
        ({"dp": 0}, "Plan: expected an integer >= 1 for dp, got 0"),
        ({"format": 3}, "expected 2 at format, got 3; pass the text of to_json() of this version or an earlier one"),
        ({"format": True}, "expected 2 at format, got True; pass the text of to_json() of this version"),
        ({"recompute": 0.5}, "expected an integer or a list or null at recompute, got 0.5; pass the text of to_json()"),
        ({"recompute": [3]}, "expected a string at recompute[0], got 3; pass the text of to_json()"),
        (
            {"zero": 1, "granularity": {"w": None}},
            "expected a string or an integer or a list at granularity.w, got",
        ),
        ({"memory": [{"parameters": 1}]}, "expected the key 'gradients' at memory[0], got no such key; add it"),
        ({"table": [{"layout": {"zer": 1}}]}, "expected the key 'verdict' at table[0], got no such key; add it"),
        (
            {"table": [{"layout": {"zer": 1}, "verdict": ""}]},
            "expected one of the keys .* at table[0].layout, got 'zer'; did you mean 'zero'?",
        ),
        ({"table": [3]}, "expected an object with the keys layout, .* at table[0], got 3; pass the text"),
    ],
)
def test_damaged_plans_are_refused(change, message):
    data = {**json.loads(Plan(dp=2).to_json()), **change}
    with pytest.raises(ValueError, match="^Plan.from_json: .*" + re.escape(message).replace(r"\.\*", ".*")):
        Plan.from_json(json.dumps(data))


def test_a_text_of_the_first_format_reads():
    """It has fewer fields; those that it lacks have their defaults."""
    text = """{"format": 1, "dp": 2, "tp": 2, "pp": 1, "zero": 1, "sequence_parallel": true, "schedule": "1f1b",
        "num_microbatches": 2, "stages_per_rank": null, "split": "uniform", "module_plan": "llama", "mode": "static",
        "device": "cpu", "bucket_bytes": 26214400, "axis_order": ["pp", "dp", "tp"], "memory": [], "limit_bytes": null,
        "table": []}"""
    expected = Plan(dp=2, tp=2, zero=1, sequence_parallel=True, num_microbatches=2, module_plan="llama", mode="static")
    assert Plan.from_json(text) == expected


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match=r"Plan\.from_json: expected (JSON, got other text|an object with)"):
        Plan.from_json(text)


def test_load_names_the_file(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json: Plan\.from_json: expected 2 at format"):
        Plan.load(path)
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        Plan.load(tmp_path / "absent.json")
