"""The inputs of a search: the devices (`Cluster`) and the training run (`Constraints`).

Both are plain data. Nothing here inspects the local machine: a plan for 1,024 GPUs can be generated on a laptop.
"""

from dataclasses import dataclass

from ._checked import checked_names
from ._checks import ALL_SCHEDULES, DEVICES, MAX_BATCH, MAX_DEVICES, ZERO_STAGES, check_bool, check_choice, check_int
from ._plan_checks import DTYPES, MODES
from ._states import StateBytes
from ._units import format_bytes


@checked_names
@dataclass(frozen=True)
class Cluster:
    """The devices of a plan.

    Args:
        num_devices: total number of devices (= processes), >= 1.
        memory_bytes: memory of one device in bytes. For ``device="cpu"``: memory of one process.
        device: ``"cuda"`` or ``"cpu"``; becomes the plan's device.
        devices_per_host: devices with a fast link between them. Tensor parallelism inside a host is preferred.

    Raises:
        ValueError: a count is below 1, there are more than 16 million devices, or the device is neither ``"cuda"`` nor
            ``"cpu"``.

    Example:
        >>> print(Cluster(64, memory_bytes=80 * 2**30))
        Cluster: 64 x cuda with 80.00 GiB, 8 per host
    """

    num_devices: int
    memory_bytes: int
    device: str = "cuda"
    devices_per_host: int = 8

    def __post_init__(self) -> None:
        check_int("Cluster", "num_devices", self.num_devices, at_least=1, at_most=MAX_DEVICES)
        for name in ("memory_bytes", "devices_per_host"):
            check_int("Cluster", name, getattr(self, name), at_least=1)
        check_choice("Cluster", "device", self.device, DEVICES)

    def __str__(self) -> str:
        memory = format_bytes(self.memory_bytes)
        return f"Cluster: {self.num_devices} x {self.device} with {memory}, {self.devices_per_host} per host"


@checked_names
@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The requirements of a training run, and its fixed choices.

    Args:
        global_batch_size: sequences per optimizer step over all ranks.
        sequence_length: tokens per sequence.
        dp, tp, pp, ep, zero, num_microbatches, sequence_parallel: fix a choice; ``None`` leaves it to the search.
        recompute: ``"auto"`` leaves it to the search; otherwise as in `Plan`: ``None``, or k for every k-th block.
        dp_replicate: number of replicas of the shards.
        param_dtype: dtype of parameters in forward and backward.
        schedule: pipeline schedule, such as ``"1f1b"`` or ``"zb_v"``.
        stages_per_rank: pipeline stages of each rank, for schedules that take other numbers.
        mode: execution mode of the plan.
        max_microbatches: maximum number of micro-batches per rank in the search.
        memory_fraction: maximum fraction of the device memory for the estimate. The rest is for memory that the
            estimate does not cover: allocator fragmentation, workspaces, communication buffers.
        state_bytes: bytes per parameter for parameters, gradients and optimizer; ``None`` derives them from the
            model's dtype (`StateBytes.for_dtype`).

    Raises:
        ValueError: a count is below 1, the schedule, dtype or mode is unknown, the ZeRO stage is outside 0..3, or the
            fraction is outside (0, 1].

    Example:
        >>> Constraints(global_batch_size=64, sequence_length=4096, tp=8).tp
        8
    """

    global_batch_size: int
    sequence_length: int
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    zero: int | None = None
    num_microbatches: int | None = None
    sequence_parallel: bool | None = None
    recompute: int | str | None = "auto"
    dp_replicate: int = 1
    param_dtype: str | None = None
    schedule: str = "1f1b"
    stages_per_rank: int | None = None
    mode: str = "static"
    max_microbatches: int = 32
    memory_fraction: float = 0.9
    state_bytes: StateBytes | None = None

    def __post_init__(self) -> None:
        check_int("Constraints", "global_batch_size", self.global_batch_size, at_least=1, at_most=MAX_BATCH)
        for name in ("sequence_length", "max_microbatches", "dp_replicate"):
            check_int("Constraints", name, getattr(self, name), at_least=1)
        for name in ("dp", "tp", "pp", "ep", "num_microbatches", "stages_per_rank"):
            if getattr(self, name) is not None:
                check_int("Constraints", name, getattr(self, name), at_least=1)
        if self.zero is not None:
            check_choice("Constraints", "zero", self.zero, ZERO_STAGES)
        if self.sequence_parallel is not None:
            check_bool("Constraints", "sequence_parallel", self.sequence_parallel)
        if not isinstance(self.recompute, int) or isinstance(self.recompute, bool):
            check_choice("Constraints", "recompute", self.recompute, ("auto", None))
        else:
            check_int("Constraints", "recompute", self.recompute, at_least=1)
        check_choice("Constraints", "param_dtype", self.param_dtype, (None, *DTYPES))
        check_choice("Constraints", "schedule", self.schedule, ALL_SCHEDULES)
        check_choice("Constraints", "mode", self.mode, MODES)
        if self.state_bytes is not None and not isinstance(self.state_bytes, StateBytes):
            raise ValueError(f"Constraints: expected StateBytes or None for state_bytes, got {self.state_bytes!r}")
        fraction = self.memory_fraction
        if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
            raise ValueError(f"Constraints: expected a number in (0, 1] for memory_fraction, got {fraction!r}")
