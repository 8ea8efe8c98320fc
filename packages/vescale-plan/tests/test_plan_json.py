"""A plan survives JSON exactly, and what is not a plan is refused with the place."""

import json

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
        (
            {"num_microbatch": 4},
            "Plan: expected a field of Plan, got 'num_microbatch'; did you mean 'num_microbatches'?",
        ),
        ({"xyz": 4}, "Plan: expected a field of Plan, got 'xyz'; the fields are dp, tp, pp"),
        ({"dp": "2"}, "Plan: expected an integer >= 1 for dp, got '2'"),
        ({"format": 2}, "Plan.from_json: expected an object with 'format': 1, got 2"),
        (
            {"memory": [{"parameters": 1}]},
            "Plan.memory[0]: expected field 'gradients' of StageMemory, got none; add it",
        ),
        ({"table": [{"layout": {"dq": 1}}]}, "Plan.table[0]: expected field 'verdict' of Candidate, got none; add it"),
        (
            {"table": [{"layout": {"zer": 1}, "verdict": ""}]},
            "Plan.table[0].layout: expected a field of Layout, got 'zer'; did you mean 'zero'?",
        ),
        ({"table": [3]}, "Plan.table[0]: expected an object with the fields of Candidate, got int"),
    ],
)
def test_damaged_plans_are_refused(change, message):
    data = {**json.loads(Plan(dp=2).to_json()), **change}
    with pytest.raises(ValueError) as error:
        Plan.from_json(json.dumps(data))
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "3"])
def test_text_that_is_no_plan_is_refused(text):
    with pytest.raises(ValueError, match=r"Plan\.from_json: expected (JSON, got other text|an object with)"):
        Plan.from_json(text)


def test_load_names_the_file(tmp_path):
    path = tmp_path / "broken.json"
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"broken\.json: Plan\.from_json: expected an object"):
        Plan.load(path)
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        Plan.load(tmp_path / "absent.json")
