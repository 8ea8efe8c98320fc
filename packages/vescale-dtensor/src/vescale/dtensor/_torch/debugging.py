"""Collectives, implicit redistributions and the position in backward, for the debugging tools."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .. import _containers

__all__ = [
    "Backward",
    "DTensorSpec",
    "TorchDispatchMode",
    "Watch",
    "backward_position",
    "base_name",
    "cause_of",
    "group_of",
    "is_visible_collective",
    "mesh_in",
    "sequence_number",
    "tensors_in",
    "without_modes",
]

#: Context manager: dispatch modes, such as logs and counters, do not see the operators inside.
without_modes = _disable_current_modes

COLLECTIVE_NAMESPACES = ("_c10d_functional", "c10d", "_dtensor")
NO_COMMUNICATION = ("wait_tensor", "_wrap_tensor_autograd", "check_for_nan")


# ------------------------------------------------------------------------------------------------- redistribution

MESH_ARGUMENTS = {"redistribute_local_tensor": "current_spec", "mesh_scatter": "mesh", "mesh_broadcast": "mesh"}

Observer = Callable[[DTensorSpec, DTensorSpec], None]


class Watch(ExplicitRedistributionContext):
    """A context in which ``observer(source, target)`` is called before every implicit redistribution.

    It is one of torch's contexts, and the innermost of them decides. Torch stores its contexts per Python thread. The
    backward pass of other devices runs in threads of the autograd engine. Those inherit only the engine's thread-local
    state, so the watch is also stored there.
    """

    KEY = "vescale.dtensor.watch"
    _lock = threading.Lock()
    _num_open = 0
    _stock = staticmethod(ExplicitRedistributionContext.observe_redistribution)

    def __init__(self, observer: Observer):
        super().__init__(enable=True, strict=True)
        self.observer = observer

    def __enter__(self) -> Watch:
        super().__enter__()
        self._inherited = Watch._inherited_watch()
        torch._C._stash_obj_in_tls(self.KEY, self)
        with Watch._lock:
            Watch._num_open += 1
            ExplicitRedistributionContext.observe_redistribution = staticmethod(_observe)
        return self

    def __exit__(self, *exc: object) -> None:
        with Watch._lock:
            Watch._num_open -= 1
            if not Watch._num_open:
                ExplicitRedistributionContext.observe_redistribution = Watch._stock
        torch._C._stash_obj_in_tls(self.KEY, self._inherited)
        super().__exit__(*exc)

    @classmethod
    def _inherited_watch(cls) -> Watch | None:
        return torch._C._get_obj_in_tls(cls.KEY) if torch._C._is_key_in_tls(cls.KEY) else None


def _observe(source: DTensorSpec, target: DTensorSpec, message: object) -> None:
    """Stand in for torch's own observer while a watch is open."""
    active = getattr(ExplicitRedistributionContext._local, "_active", None)
    if active is None and torch._C._current_graph_task_id() != -1:  # perhaps a thread of the autograd engine
        active = Watch._inherited_watch()
    if isinstance(active, Watch):
        active.observer(source, target)
    else:
        Watch._stock(source, target, message)


def mesh_in(frame: FrameType) -> DeviceMesh | None:
    """Return the mesh if ``frame`` is a function in which DTensor communicates over a mesh, else None."""
    argument = MESH_ARGUMENTS.get(frame.f_code.co_name)
    if argument is None or not frame.f_globals.get("__name__", "").startswith("torch.distributed.tensor"):
        return None
    found = frame.f_locals[argument]
    return found.mesh if argument == "current_spec" else found


def cause_of(frame: FrameType) -> str:
    """Return the name of the operator if ``frame`` is a function that redistributes operands implicitly, else ""."""
    name = frame.f_code.co_name
    if name == "redistribute_local_args" and "suggested_input_schema" in frame.f_locals:
        return str(frame.f_locals["suggested_input_schema"].op)
    if name == "redistributed" and frame.f_globals.get("__name__") == "vescale.dtensor._torch.dispatch":
        return str(frame.f_locals["for_op"] or "")
    return ""


# ------------------------------------------------------------------------------------------------- collectives


def is_visible_collective(op: object) -> bool:
    """Return whether ``op`` communicates: a functional collective, one of c10d's, or one of DTensor's own."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    packet = op._schema.name.partition("::")
    return packet[0] in COLLECTIVE_NAMESPACES and packet[2] not in NO_COMMUNICATION


def base_name(op: torch._ops.OpOverload) -> str:
    """Return the name of an operator without namespace and overload."""
    return op._schema.name.partition("::")[2]


def group_of(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> dist.ProcessGroup | None:
    """Return the process group that a collective was called with."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    group = given.get("process_group", given.get("group_name"))
    if isinstance(group, str):
        return torch.distributed.distributed_c10d._resolve_process_group(group)
    return dist.ProcessGroup.unbox(group) if isinstance(group, torch.ScriptObject) else group


def tensors_in(
    op: torch._ops.OpOverload, args: tuple, kwargs: dict, result: object
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors that go into a collective and those that come out of it."""
    names = [argument.name for argument in op._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    inside: list[torch.Tensor] = []
    outside: list[torch.Tensor] = []
    for name, value in given.items():
        (outside if name.startswith("out") else inside).extend(_tensors(value))
    functional = op._schema.name.startswith(("_c10d_functional", "_dtensor"))
    return inside, outside or (_tensors(result) if functional else [])


def _tensors(value: object) -> list[torch.Tensor]:
    return list(_containers.tensors_in(value))


# ------------------------------------------------------------------------------------------------- autograd


@dataclass(frozen=True)
class Backward:
    """The current position of the backward pass.

    Attributes:
        node: name of the autograd node that runs, such as ``AddBackward0``.
        sequence_number: position of its operator in the forward pass of its thread, or None.
        variable: the tensor whose gradient it accumulates, or None.
        forward_stack: the stack of the forward pass, outermost first, if anomaly detection recorded it.
    """

    node: str
    sequence_number: int | None
    variable: torch.Tensor | None
    forward_stack: tuple[str, ...]


def sequence_number() -> int:
    """Return the number that the next operator recorded in this thread's forward pass will get."""
    return torch.autograd._get_sequence_nr()


def backward_position() -> Backward | None:
    """Return the position of the backward pass that runs in this thread, or None outside of one."""
    if torch._C._current_graph_task_id() == -1:
        return None
    node = torch._C._current_autograd_node()
    if node is None:
        return Backward("", None, None, ())
    variable = getattr(node, "variable", None)
    number = None if variable is not None else node._sequence_nr()
    return Backward(node.name(), number, variable, tuple(node.metadata.get("traceback_", ())))
