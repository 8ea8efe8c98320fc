"""Ready plans for Hugging Face model families, and the parts from which they and plans of users are merged."""

from ._build import Plan, block, column, experts, merge, row, sequence, vocab
from ._derive import DerivedPlan, derive
from ._families import FAMILIES, plan_for
from .gpt import gpt2, gpt_neox
from .llama import llama, olmo2
from .mixture import mixtral, qwen2_moe, qwen3_moe
from .phi3 import phi3

__all__ = [
    "FAMILIES",
    "DerivedPlan",
    "Plan",
    "block",
    "column",
    "derive",
    "experts",
    "gpt2",
    "gpt_neox",
    "llama",
    "merge",
    "mixtral",
    "olmo2",
    "phi3",
    "plan_for",
    "qwen2_moe",
    "qwen3_moe",
    "row",
    "sequence",
    "vocab",
]
