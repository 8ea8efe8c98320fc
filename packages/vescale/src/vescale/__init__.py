"""Train large PyTorch models on many devices as if on one device.

    import vescale

    plan = vescale.Plan(dp=2, tp=2, pp=2, zero=1, num_microbatches=4)         # or vescale.generate_plan(...)
    model, optimizer = vescale.parallelize(plan, model, torch.optim.AdamW)
    vescale.save("checkpoint", {"model": model, "optimizer": optimizer})

This package composes the parts. Each part (``vescale.dtensor``, ``vescale.dmodule``, ``vescale.optim``,
``vescale.pipe``, ``vescale.ckpt``, ``vescale.plan``) is its own distribution and works without this package. ``import
vescale`` imports no part and no torch; the first use of a name imports it.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

# The parts are portions of this namespace in their own distributions, possibly in other folders of sys.path.
__path__ = pkgutil.extend_path(__path__, __name__)
__version__ = "0.1.0"

if TYPE_CHECKING:
    from vescale import checkpoint, ckpt, dmodule, dtensor, optim, pipe, plan
    from vescale._compare.api import compare
    from vescale._compare.record import record
    from vescale._compare.result import Comparison
    from vescale._emulate import emulate
    from vescale._generate import generate_plan
    from vescale._launch import launch_file
    from vescale._metrics import Metrics
    from vescale._optimizer import MuonWithAdamW
    from vescale._output import StepOutput
    from vescale._parallel_model import ParallelModel
    from vescale._parallelize import parallelize
    from vescale.ckpt import CheckpointError, load, save
    from vescale.dmodule import ImplicitRedistributionError, NotLocalFriendlyError, PlanError
    from vescale.dtensor import (
        UnsupportedOperator,
        UnsupportedPlacement,
        UnsupportedRandomOperator,
        deferred_init,
        init_device_mesh,
    )
    from vescale.pipe import PipelineError, RandomOperatorError, ScheduleError, SplitError
    from vescale.plan import Cluster, Constraints, NoPlanFitsError, Plan, count_flops

_HOMES = {
    "CheckpointError": "vescale.ckpt",
    "Cluster": "vescale.plan",
    "Comparison": "vescale._compare",
    "Constraints": "vescale.plan",
    "ImplicitRedistributionError": "vescale.dmodule",
    "Metrics": "vescale._metrics",
    "MuonWithAdamW": "vescale._optimizer",
    "NoPlanFitsError": "vescale.plan",
    "NotLocalFriendlyError": "vescale.dmodule",
    "ParallelModel": "vescale._parallel_model",
    "PipelineError": "vescale.pipe",
    "Plan": "vescale.plan",
    "PlanError": "vescale.dmodule",
    "RandomOperatorError": "vescale.pipe",
    "ScheduleError": "vescale.pipe",
    "SplitError": "vescale.pipe",
    "StepOutput": "vescale._output",
    "UnsupportedOperator": "vescale.dtensor",
    "UnsupportedPlacement": "vescale.dtensor",
    "UnsupportedRandomOperator": "vescale.dtensor",
    "compare": "vescale._compare",
    "count_flops": "vescale.plan",
    "deferred_init": "vescale.dtensor",
    "emulate": "vescale._emulate",
    "generate_plan": "vescale._generate",
    "init_device_mesh": "vescale.dtensor",
    "launch_file": "vescale._launch",
    "load": "vescale.ckpt",
    "parallelize": "vescale._parallelize",
    "record": "vescale._compare",
    "save": "vescale.ckpt",
}
_MODULES = ("checkpoint", "ckpt", "dmodule", "dtensor", "optim", "pipe", "plan")

__all__ = [
    "CheckpointError",
    "Cluster",
    "Comparison",
    "Constraints",
    "ImplicitRedistributionError",
    "Metrics",
    "MuonWithAdamW",
    "NoPlanFitsError",
    "NotLocalFriendlyError",
    "ParallelModel",
    "PipelineError",
    "Plan",
    "PlanError",
    "RandomOperatorError",
    "ScheduleError",
    "SplitError",
    "StepOutput",
    "UnsupportedOperator",
    "UnsupportedPlacement",
    "UnsupportedRandomOperator",
    "checkpoint",
    "ckpt",
    "compare",
    "count_flops",
    "deferred_init",
    "dmodule",
    "dtensor",
    "emulate",
    "generate_plan",
    "init_device_mesh",
    "launch_file",
    "load",
    "optim",
    "parallelize",
    "pipe",
    "plan",
    "record",
    "save",
]


def __getattr__(name: str) -> Any:
    """Import a name on its first use and store it, so that this runs once per name."""
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module 'vescale' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
