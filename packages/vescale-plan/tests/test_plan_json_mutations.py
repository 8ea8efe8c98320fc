"""Any text either reads as the plan that it says, or is refused with a ValueError that says where and why."""

import dataclasses
import json

import pytest

from vescale.plan import Cluster, Constraints, Plan, generate_plan
from vescale_testing.json_mutations import check_reader


def generated(build_mixtral):
    """Return a generated plan with the first rows of its table."""
    run = Constraints(global_batch_size=16, sequence_length=128, pp=2, num_microbatches=4)
    plan = generate_plan(build_mixtral(), Cluster(8, memory_bytes=80 * 2**30), run)
    return dataclasses.replace(plan, table=plan.table[:2])


def test_every_mutation_of_a_generated_plan(build_mixtral):
    tried = check_reader(generated(build_mixtral).to_json(), Plan.from_json, Plan.to_json, error=ValueError)
    assert tried > 3000


@pytest.mark.parametrize("split", [["layers.1", "layers.2"], [["embed"], ["layers.0", "layers.1"], ["head"]]])
def test_every_mutation_of_a_split(split):
    check_reader(Plan(pp=3, split=split).to_json(), Plan.from_json, Plan.to_json, error=ValueError, max_examples=300)


def test_every_mutation_of_names_and_numbers():
    plan = Plan(
        dp=4,
        zero=3,
        ep=2,
        recompute=["a"],
        param_dtype="bfloat16",
        clip_grad_norm=1.5,
        units=["a"],
        granularity={"a": "rows", "b": ("dim0", 2)},
    )
    check_reader(plan.to_json(), Plan.from_json, Plan.to_json, error=ValueError, max_examples=300)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"format": 2, "dp": 1})[:-1] + ', "dp": 2}', "the key 'dp' twice in one object"),
        ('{"format": 2, "dp": ' + "1" * 5000 + "}", "expected JSON, got other text"),
        ('{"format": 2, "split": ' + "[" * 10**5, "expected JSON, got other text (maximum recursion depth"),
        (None, "expected JSON text, got NoneType; pass the text of to_json"),
    ],
)
def test_texts_that_no_tree_gives(text, message):
    with pytest.raises(ValueError) as error:
        Plan.from_json(text)
    assert message in str(error.value)
