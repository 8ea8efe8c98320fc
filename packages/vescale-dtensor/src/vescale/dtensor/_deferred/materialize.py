"""Turn the deferred tensors of a module into jobs, check them, replay their tape, and collect the results.

Each `Job` is one tensor object with its layout. The jobs of one tape share one replay. Tensors that share memory and
geometry still share memory afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .._layout.shards import local_shape, pieces
from .._random.global_position import WINDOWS
from .liveness import needed_calls
from .record import Recording
from .replay import Replay, stream_entries, unskippable_draws
from .shards import Region, plan_shards
from .slots import Target, check_replaceable, replace
from .tensor import DeferredTensorError

__all__ = ["Job", "Layout", "compute", "place_real", "target_device"]


@dataclass(frozen=True)
class Layout:
    """The target of a tensor: placements on a mesh (None: full), and a device (None: that of the constructor)."""

    mesh: DeviceMesh | None
    placements: tuple[Placement, ...] | None
    device: torch.device | None

    def region(self, shape: tuple[int, ...]) -> Region:
        """Return the part of a tensor that this rank holds."""
        if self.placements is None:
            return Region(shape, shape, pieces(shape, (), (), ()))
        coord = self.mesh.get_coordinate()
        if coord is None:  # this rank is not part of the mesh
            return Region(shape, tuple(0 for _ in shape), ())
        where = (shape, tuple(self.mesh.shape), tuple(coord), self.placements)
        return Region(shape, local_shape(*where), pieces(*where))

    def moved(self, local: Tensor) -> Tensor:
        """Return this rank's part on the target device."""
        return local if self.device is None else local.to(self.device)

    def wrap(self, local: Tensor, like: Tensor) -> Tensor:
        """Return this rank's part as the tensor that replaces `like` in a module."""
        if self.placements is not None:
            options = {"run_check": False, "shape": like.shape, "stride": like.stride()}
            local = DTensor.from_local(local, self.mesh, self.placements, **options)
        if isinstance(like, nn.Parameter):
            return nn.Parameter(local, like.requires_grad)
        return local.requires_grad_(like.requires_grad)


class Job:
    """A tensor of a module and its target layout."""

    def __init__(self, target: Target, layout: Layout):
        self.target = target
        self.layout = layout
        self.region = layout.region(tuple(target.tensor.shape))

    @property
    def name(self) -> str:
        """FQN for messages."""
        return self.target.names[0]


def target_device(device: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device | None:
    """Return the target device: the requested one, else the mesh's, else None."""
    if device is None:
        device = None if mesh is None else mesh.device_type
    if device is None:
        return None
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def compute(jobs: Sequence[Job]) -> None:
    """Replay the tapes of deferred tensors, and store each tensor's replacement in its `deferred.result`.

    Raises:
        ValueError: a generator was used since the constructor, the tensors come from several constructors whose draws
            are still to be replayed, or a tensor was already materialized to another layout.
    """
    for job in jobs:
        check_replaceable(job.target)
        _check_earlier_result(job)
    jobs = [job for job in jobs if job.target.tensor.deferred.result is None]
    by_recording: dict[Recording, list[Job]] = {}
    for job in jobs:
        by_recording.setdefault(job.target.tensor.deferred.recording, []).append(job)
    _check_recordings(by_recording)
    for recording, own in by_recording.items():
        _replay(recording, own)


def _replay(recording: Recording, jobs: list[Job]) -> None:
    tape, log = recording.tape, recording.log
    wanted: dict[int, list[Job]] = {}
    for job in jobs:
        wanted.setdefault(tape.values[job.target.tensor.deferred.value].storage, []).append(job)
    for sharing in wanted.values():
        _check_sharing(sharing)

    needed, stream = needed_calls(tape, wanted), set()
    if not recording.is_replayed or any(tape.entries[index].draws is not None for index in needed):
        needed = needed_calls(tape, wanted, roots=unskippable_draws(tape))
        stream = stream_entries(tape, 0, len(tape.entries))
    regions = plan_shards(tape, needed, [(job.target.tensor.deferred.value, job.region) for job in jobs])
    replay = Replay(tape, log, needed, regions)
    results: list[tuple[Job, Tensor]] = []

    def hand_over(storage: int) -> None:
        local: Tensor | None = None
        geometry = None
        for job in wanted[storage]:
            if local is None or geometry != _geometry(job):
                local, geometry = job.layout.moved(_part(replay, storage, job)), _geometry(job)
            results.append((job, job.layout.wrap(local, job.target.tensor)))

    with log.borrowed(log.initial), torch.no_grad():
        replay.run(stream=stream, wanted=wanted, hand_over=hand_over)
        final = log.states()
    for job, result in results:
        job.target.tensor.deferred.result = (job.layout, result)
    if not recording.is_replayed:
        for index in log.used:
            log.generators[index].set_state(final[index])
        recording.is_replayed = True


def _part(replay: Replay, storage: int, job: Job) -> Tensor:
    """Return this rank's part of a finished tensor, without keeping the rest alive."""
    if storage in replay.regions:
        return replay.shard(storage)
    tensor = replay.value(job.target.tensor.deferred.value).detach()
    return tensor if job.region.is_whole else job.region.cut(tensor)


def place_real(job: Job) -> None:
    """Give a real tensor its layout; DTensors and tensors on `meta` are unchanged."""
    tensor, layout = job.target.tensor, job.layout
    if isinstance(tensor, DTensor) or tensor.is_meta:
        return
    if layout.placements is None and layout.device in (None, tensor.device):
        return
    check_replaceable(job.target)
    part = tensor.detach() if job.region.is_whole else job.region.cut(tensor.detach())
    replace(job.target, layout.wrap(layout.moved(part), tensor))


# ------------------------------------------------------------------------------------------------- checks


def _geometry(job: Job) -> tuple:
    tensor = job.target.tensor
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), job.region)


def _check_sharing(jobs: list[Job]) -> None:
    """Refuse to shard tensors that share one storage with different geometry: their shards would not share memory."""
    if len({_geometry(job) for job in jobs}) > 1 and not all(job.region.is_whole for job in jobs):
        described = ", ".join(f"'{job.name}' {tuple(job.target.tensor.shape)} {job.layout.placements}" for job in jobs)
        raise NotImplementedError(
            f"these tensors share memory, but their shards could not: {described}. Leave them full (placements None), "
            "or give all of them the same shape and placements"
        )


def _check_earlier_result(job: Job) -> None:
    state = job.target.tensor.deferred
    if state.result is None or not job.target.is_registered or state.result[0] == job.layout:
        return
    before = state.result[0]
    raise ValueError(
        f"'{job.name}' is tied to a tensor that was materialized before with placements {before.placements} on device "
        f"{before.device}; now placements {job.layout.placements} on device {job.layout.device} were given. Give both "
        "the same"
    )


def _check_recordings(recordings: Iterable[Recording]) -> None:
    if any(recording.read is not None for recording in recordings):
        raise DeferredTensorError(
            "materialize was called inside deferred_init; call it on the result, after deferred_init"
        )
    if WINDOWS.get():
        raise ValueError(
            "materialize was called inside random.local_batch, where it would draw parts of a larger batch; call it "
            "outside"
        )
    drawing = [recording.log for recording in recordings if not recording.is_replayed and recording.log.used]
    if len(drawing) > 1:
        raise ValueError(
            f"the module has tensors of {len(drawing)} calls of deferred_init that drew random numbers from the same "
            "state; construct it in one deferred_init, or materialize each part before the next deferred_init"
        )
    for log in drawing:
        changed = [
            log.generators[i] for i in log.used if not torch.equal(log.generators[i].get_state(), log.initial[i])
        ]
        if changed:
            raise ValueError(
                f"the random generator of {changed[0].device} is not in the state that deferred_init found: random "
                "numbers were drawn, or a seed was set, between deferred_init and materialize, so the parameters would "
                "not be those of the eager constructor. Call materialize before any other random operator, or restore "
                "the state first (torch.set_rng_state(state) with the state from before deferred_init)"
            )
