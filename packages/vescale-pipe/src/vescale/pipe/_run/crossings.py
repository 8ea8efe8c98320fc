"""The values that cross stages in one forward: sent, received, and kept for the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch.distributed.device_mesh import DeviceMesh

from .backward import Boundary, attach
from .mail import Mail
from .program import Program
from .values import PipelineError, TensorMeta, from_local_part, local_part, meta_of


class Crossings:
    """Send and receive the values of a micro-batch.

    Args:
        mail: this rank's messages.
        program: the recorded transfers.
        stages: those that run.
        microbatch: index of the micro-batch.
        find_mesh: returns this rank's mesh with the given axis names.

    Attributes:
        boundaries: what each stage sent and received.
    """

    def __init__(
        self,
        mail: Mail,
        program: Program,
        stages: Collection[int],
        microbatch: int,
        find_mesh: Callable[[tuple[str, ...]], DeviceMesh],
    ) -> None:
        self.boundaries = {stage: Boundary() for stage in stages}
        self._mail, self._program, self._microbatch, self._find_mesh = mail, program, microbatch, find_mesh

    def send(self, index: int, tensor: torch.Tensor) -> None:
        """Begin to send a value.

        Raises:
            PipelineError: it is of another form than the recorded one.
        """
        transfer = self._program.transfers[index]
        expected = transfer.meta
        if not (meta := meta_of(tensor)).same_data(expected):
            raise PipelineError(
                f"{transfer.value}: expected {expected}, "
                f"requires_grad={expected.requires_grad}, as recorded, got {meta}, requires_grad={meta.requires_grad}; "
                "shapes of values that cross stages may depend on input shapes only"
            )
        self._mail.send(local_part(tensor), (index, self._microbatch, False), stride=expected.local_layout[1])
        if expected.requires_grad:
            self.boundaries[transfer.source].add_sent(index, tensor)

    def receive(self, index: int) -> torch.Tensor:
        """Return a received value, the input of an autograd graph if it requires a gradient."""
        transfer = self._program.transfers[index]
        meta, mesh = transfer.meta, self.mesh_for(transfer.meta)
        tensor = from_local_part(self._mail.receive((index, self._microbatch, False)), meta, mesh)
        if not meta.requires_grad:
            return tensor
        tensor, edge = attach(tensor)
        self.boundaries[transfer.destination].add_received(index, edge)
        return tensor

    def mesh_for(self, meta: TensorMeta) -> DeviceMesh | None:
        """Return this rank's mesh for a value; None for a plain tensor."""
        return None if meta.sharded is None else self._find_mesh(meta.sharded.axis_names)
