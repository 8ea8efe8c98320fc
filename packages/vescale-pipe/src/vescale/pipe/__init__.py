"""Pipeline parallelism for unmodified PyTorch models: schedules as data, a split by stubs, and the engine.

``PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=8))`` returns a callable that runs a full step and
returns its loss. ``loss.backward()`` and the rest of the training loop stay unchanged.
"""

from ._run.program import Transfer
from ._run.recorder import RandomOperatorError
from ._run.timing import Timing
from ._run.values import PipelineError
from ._schedule.actions import Action, Overlap, Schedule
from ._schedule.csv_files import from_csv, to_csv
from ._schedule.draw import draw, format_table, to_trace
from ._schedule.errors import ScheduleError
from ._schedule.lower import lower
from ._schedule.simulate import Costs, Simulation, simulate
from ._schedule.timeline import Timeline
from ._schedule.validate import validate
from ._stages.balance import balanced_split
from ._stages.split import SplitError, StageSplit, split_units
from ._stages.stub import Stub
from ._torch_range import warn_if_untested
from .engine import PipelineEngine
from .plan import PipelinePlan
from .schedules import (
    dual_pipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    search_schedule,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)

__all__ = [
    "Action",
    "Costs",
    "Overlap",
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
    "Timeline",
    "Timing",
    "Transfer",
    "balanced_split",
    "draw",
    "dual_pipe_v",
    "format_table",
    "from_csv",
    "gpipe",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "looped_bfs",
    "lower",
    "one_f_one_b",
    "search_schedule",
    "simulate",
    "split_units",
    "to_csv",
    "to_trace",
    "v_half",
    "v_min",
    "validate",
    "zb_h1",
    "zb_h2",
    "zb_v",
]

warn_if_untested()
