"""Choose a parallel layout of a model, as data.

    from vescale.plan import Cluster, Constraints, Plan, generate_plan

`generate_plan` runs a model on tensors without data (never its memory), enumerates data x tensor x pipeline x expert x
ZeRO layouts with and without recomputation, and returns the first one, in a documented order of preference, that fits
the devices. The result is a `Plan`: it prints, saves, loads and explains itself. Read in this order: ``_profile.py``
(sizes and activations of a model), ``_memory.py`` (bytes per rank), ``cluster.py``, ``plan.py``, ``_search.py``.
"""

from ._flops import count_flops
from ._layout import Layout
from ._memory import StageMemory, estimate_memory
from ._parameters import ParameterInfo
from ._profile import ModelProfile, blocks_of, build_model, profile, repeated_blocks
from ._search import NoPlanFitsError, generate_plan
from ._states import StateBytes, model_state_bytes
from ._table import Candidate
from ._torch_range import warn_if_untested
from .cluster import Cluster, Constraints
from .plan import Plan

__all__ = [
    "Candidate",
    "Cluster",
    "Constraints",
    "Layout",
    "ModelProfile",
    "NoPlanFitsError",
    "ParameterInfo",
    "Plan",
    "StageMemory",
    "StateBytes",
    "blocks_of",
    "build_model",
    "count_flops",
    "estimate_memory",
    "generate_plan",
    "model_state_bytes",
    "profile",
    "repeated_blocks",
]

warn_if_untested()
