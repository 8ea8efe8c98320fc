"""Pipeline parallelism for unmodified PyTorch models: schedules as data, a split by stubs, and the engine.

``PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=8))`` returns a callable that runs a full step and
returns its loss. ``loss.backward()`` and the rest of the training loop stay unchanged.
"""

from ._run.program import Transfer
from ._run.recorder import RandomOperatorError
from ._run.values import PipelineError
from ._schedule.actions import Action, Schedule
from ._schedule.csv_files import from_csv, to_csv
from ._schedule.draw import draw, format_table
from ._schedule.simulate import Costs, Simulation, simulate
from ._stages.split import SplitError, StageSplit, split_units
from ._stages.stub import Stub
from ._torch_range import warn_if_untested
from .engine import PipelineEngine
from .plan import PipelinePlan
from .schedules import ScheduleError, gpipe, one_f_one_b, validate

__all__ = [
    "Action",
    "Costs",
    "PipelineEngine",
    "PipelineError",
    "PipelinePlan",
    "RandomOperatorError",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "SplitError",
    "StageSplit",
    "Stub",
    "Transfer",
    "draw",
    "format_table",
    "from_csv",
    "gpipe",
    "one_f_one_b",
    "simulate",
    "split_units",
    "to_csv",
    "validate",
]

warn_if_untested()
