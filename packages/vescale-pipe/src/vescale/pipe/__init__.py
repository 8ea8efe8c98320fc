"""Pipeline parallelism for unmodified PyTorch models: schedules as data, splitting by stubs, and the engine.

``PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=8))`` makes a callable that runs a whole step and
returns its loss; ``loss.backward()`` and the rest of the training loop stay as they are.
"""

from ._actions import Action, Schedule
from ._csv import from_csv, to_csv
from ._draw import draw, format_table
from ._program import Transfer
from ._recorder import RandomOperatorError
from ._simulate import Costs, Simulation, simulate
from ._split import SplitError, StageSplit, split_units
from ._stub import Stub
from ._values import PipelineError
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
