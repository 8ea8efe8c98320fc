"""A wrong argument is named where it was given: expected, got."""

import math
import re

import pytest
from torch import nn

from vescale.plan import Cluster, Constraints, Plan, StateBytes, generate_plan, profile

RUN = {"global_batch_size": 2, "sequence_length": 4}
CLUSTER, MODEL = Cluster(2, memory_bytes=2**30), nn.Linear(2, 2)

ROWS = {
    "axis_order, other types": (
        lambda: Plan(axis_order=(1, "dp", "tp")),
        "'pp', 'dp' and 'tp' once each in axis_order",
    ),
    "axis_order, a number": (lambda: Plan(axis_order=3), "once each in axis_order, got 3"),
    "zero, a list": (lambda: Plan(zero=[]), "expected one of 0, 1, 2, 3 for zero, got []"),
    "dp, nan": (lambda: Plan(dp=math.nan), "expected an integer >= 1 for dp, got nan"),
    "dp, huge": (lambda: Plan(dp=2**64), "expected an integer of 64 bits for dp, got 18446744073709551616"),
    "memory": (lambda: Plan(memory=3), "expected a tuple of StageMemory for memory, got 3"),
    "table": (lambda: Plan(table=(1,)), "expected a tuple of Candidate for table, got (1,)"),
    "limit_bytes": (lambda: Plan(limit_bytes="a"), "expected an integer >= 1 for limit_bytes, got 'a'"),
    "split": (
        lambda: Plan(split={}),
        "expected 'uniform', a list of FQNs or one list of FQNs per stage for split, got {}",
    ),
    "check_batch, text": (lambda: Plan().check_batch("a"), "expected an integer >= 1 for global_batch_size, got 'a'"),
    "check_batch, 0": (lambda: Plan().check_batch(0), "expected an integer >= 1 for global_batch_size, got 0"),
    "num_devices": (lambda: Cluster("a", memory_bytes=1), "expected an integer >= 1 for num_devices, got 'a'"),
    "memory_fraction": (lambda: Constraints(**RUN, memory_fraction="a"), "(0, 1] for memory_fraction, got 'a'"),
    "memory_fraction, nan": (lambda: Constraints(**RUN, memory_fraction=math.nan), "for memory_fraction, got nan"),
    "state_bytes": (lambda: Constraints(**RUN, state_bytes=3), "expected StateBytes or None for state_bytes, got 3"),
    "negative bytes": (lambda: StateBytes(-1, 0, 0), "expected an integer >= 0 for params, got -1"),
    "model": (
        lambda: generate_plan(None, CLUSTER, Constraints(**RUN)),
        "expected Module or ModelProfile for model, got N",
    ),
    "cluster": (lambda: generate_plan(MODEL, None, Constraints(**RUN)), "expected Cluster for cluster, got None"),
    "constraints": (lambda: generate_plan(MODEL, CLUSTER, None), "expected Constraints for constraints, got None"),
    "tp_sharded": (
        lambda: profile(MODEL, tp_sharded="weight"),
        "expected Sequence or None for tp_sharded, got 'weight'",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_refused(row):
    call, message = ROWS[row]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call()


def test_right_arguments_pass():
    assert profile(MODEL, tp_sharded=["weight"]).num_parameters == 6
