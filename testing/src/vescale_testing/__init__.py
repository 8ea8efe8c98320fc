"""Test helpers of veScale: real ranks with hard time-outs, float64 throughout, and trainings compared by name."""

from vescale_testing.compare import TrainingRecord, assert_same_training
from vescale_testing.float64 import created_dtypes, keep_float64
from vescale_testing.gather import gather_full, gather_named, gather_state
from vescale_testing.halves import half_of, halved, in_halves
from vescale_testing.late import ask_again, begin_late
from vescale_testing.memory import held_bytes, settled_bytes
from vescale_testing.ranks import RankFailure, ranks, run_ranks
from vescale_testing.versions import torch_is_before, warnings_at_import

__all__ = [
    "RankFailure",
    "TrainingRecord",
    "ask_again",
    "assert_same_training",
    "begin_late",
    "created_dtypes",
    "gather_full",
    "gather_named",
    "gather_state",
    "half_of",
    "halved",
    "held_bytes",
    "in_halves",
    "keep_float64",
    "ranks",
    "run_ranks",
    "settled_bytes",
    "torch_is_before",
    "warnings_at_import",
]
