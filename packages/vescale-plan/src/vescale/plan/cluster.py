"""The inputs of a search: the devices (`Cluster`) and the training run (`Constraints`).

Both are plain data. Nothing here inspects the local machine: a plan for 1,024 GPUs can be generated on a laptop.
"""

from dataclasses import dataclass

from ._checks import DEVICES, MAX_BATCH, MAX_DEVICES, SCHEDULES, ZERO_STAGES, check_bool, check_choice, check_int
from ._memory import StateBytes
from ._units import format_bytes


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


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """The requirements of a training run, and its fixed choices.

    Args:
        global_batch_size: sequences per optimizer step over all ranks.
        sequence_length: tokens per sequence.
        dp, tp, pp, zero, num_microbatches, sequence_parallel: fix a choice; ``None`` leaves it to the search.
        schedule: pipeline schedule, ``"1f1b"`` or ``"gpipe"``.
        max_microbatches: maximum number of micro-batches per rank in the search.
        memory_fraction: maximum fraction of the device memory for the estimate. The rest is for memory that the
            estimate does not cover: allocator fragmentation, workspaces, communication buffers.
        state_bytes: bytes per parameter for parameters, gradients and optimizer; ``None`` derives them from the
            model's dtype (`StateBytes.for_dtype`).

    Raises:
        ValueError: a count is below 1, the schedule is unknown, the ZeRO stage is outside 0..3, or the fraction is
            outside (0, 1].

    Example:
        >>> Constraints(global_batch_size=64, sequence_length=4096, tp=8).tp
        8
    """

    global_batch_size: int
    sequence_length: int
    dp: int | None = None
    tp: int | None = None
    pp: int | None = None
    zero: int | None = None
    num_microbatches: int | None = None
    sequence_parallel: bool | None = None
    schedule: str = "1f1b"
    max_microbatches: int = 32
    memory_fraction: float = 0.9
    state_bytes: StateBytes | None = None

    def __post_init__(self) -> None:
        check_int("Constraints", "global_batch_size", self.global_batch_size, at_least=1, at_most=MAX_BATCH)
        for name in ("sequence_length", "max_microbatches"):
            check_int("Constraints", name, getattr(self, name), at_least=1)
        for name in ("dp", "tp", "pp", "num_microbatches"):
            if getattr(self, name) is not None:
                check_int("Constraints", name, getattr(self, name), at_least=1)
        if self.zero is not None:
            check_choice("Constraints", "zero", self.zero, ZERO_STAGES)
        if self.sequence_parallel is not None:
            check_bool("Constraints", "sequence_parallel", self.sequence_parallel)
        check_choice("Constraints", "schedule", self.schedule, SCHEDULES)
        if self.state_bytes is not None and not isinstance(self.state_bytes, StateBytes):
            raise ValueError(f"Constraints: expected StateBytes or None for state_bytes, got {self.state_bytes!r}")
        fraction = self.memory_fraction
        if not isinstance(fraction, int | float) or isinstance(fraction, bool) or not 0 < fraction <= 1:
            raise ValueError(f"Constraints: expected a number in (0, 1] for memory_fraction, got {fraction!r}")
