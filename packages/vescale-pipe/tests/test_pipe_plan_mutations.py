"""Any text either reads as the pipeline plan that it says, or is refused with a ValueError that says where and why."""

import pytest

from vescale.pipe import Costs, PipelinePlan
from vescale_testing.json_mutations import check_reader


@pytest.mark.parametrize("split", ["uniform", ["layers.2", "layers.4"], [["embed", "layers.0"], ["layers.1", "head"]]])
def test_every_mutation(split):
    plan = PipelinePlan(num_microbatches=4, split=split)
    assert check_reader(plan.to_json(), PipelinePlan.from_json, PipelinePlan.to_json, error=ValueError) > 1000


def test_every_mutation_of_a_plan_with_costs():
    plan = PipelinePlan(
        "auto", 4, costs=Costs([1.0, 2.0], latency=0.5), activations=3.0, placement="V", stages_per_rank=2
    )
    assert check_reader(plan.to_json(), PipelinePlan.from_json, PipelinePlan.to_json, error=ValueError) > 1000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schedule": "auto", "costs": {"forward": [1, "a"]}}', r"a finite number at costs\.forward\[1\], got 'a'"),
        ('{"schedule": "auto", "costs": {"forward": -1}}', "expected a number of 0 or more for forward, got -1"),
        ('{"split": [["a"], ["b", 3]]}', r"expected a string at split\[1\]\[1\], got 3; pass the text of to_json"),
        ('{"num_microbatches": 1e3}', r"expected an integer at num_microbatches, got 1000\.0"),
        ('{"microbatches": 4}', r"one of the keys schedule, .*, got 'microbatches'; did you mean 'num_microbatches'\?"),
        ("[", "expected JSON, got other text"),
    ],
)
def test_the_error_says_where(text, message):
    with pytest.raises(ValueError, match=f"^PipelinePlan.from_json: .*{message}"):
        PipelinePlan.from_json(text)
