"""Master weights: parameters of few bits, kept and updated in a wider dtype by the optimizer.

An update is often smaller than half the spacing of bfloat16 numbers, and would be lost. So the optimizer updates a wide
copy of this rank's part, and the parameter is the rounded copy:

    gradient --wide--> optimizer --> master (float32) --round--> value (bfloat16) --gather--> parameters

A write into the parameters between steps (``load_state_dict``, an initialization) counts. Before a step, the master
takes each value that differs from the rounded master. The version counters of the tensors show whether a comparison is
necessary, and ``param.data = tensor`` is noticed by its address (`_parameters/home.py`). A write into the memory of
``param.data`` is not: call ``refresh``. The same holds for masters that begin from values that were never rounded
(`_parameters/precast.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .. import _torch
from .._parameters.home import bring_home
from .pieces import Piece

__all__ = ["MasterWeights"]


class MasterWeights:
    """The wide copies of the pieces that have one.

    Args:
        pieces: All pieces of a model.
        original: Function that returns the values of a piece's parameter before rounding, or None.
    """

    def __init__(self, pieces: Iterable[Piece], original: Callable[[nn.Parameter], Tensor | None] = lambda _: None):
        pieces = list(pieces)
        self._homes = [piece.home for piece in pieces if piece.home is not None]
        self.pieces = [piece for piece in pieces if piece.value is not None]
        self._begin(original)
        self._seen = self._versions()

    @torch.no_grad()
    def _begin(self, original: Callable[[nn.Parameter], Tensor | None]) -> None:
        began = False
        for piece in self.pieces:
            values = original(piece.param)
            if values is not None:
                piece.tensor.copy_(values.view(piece.tensor.shape))
                began = True
        if began:
            self.refresh()

    def _versions(self) -> list[tuple[int, int]]:
        shared = [(_torch.local_tensor(piece.param), piece.value) for piece in self.pieces]
        return [(_torch.version(param), _torch.version(value)) for param, value in shared]

    def follow(self) -> None:
        """Before a step: copy values that have been written since the last one into what the optimizer updates.

        Raises:
            RuntimeError: If ``param.data`` was replaced by a tensor that does not fit.
        """
        bring_home(self._homes)
        if self._versions() != self._seen:
            self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy every value that is not the rounded master into the master."""
        for piece in self.pieces:
            master, value = piece.tensor, piece.value
            master.copy_(torch.where(master.to(value.dtype) == value, master, value.to(master.dtype)))

    @torch.no_grad()
    def store(self) -> None:
        """After a step: round the masters into the values."""
        if self.pieces:
            _torch.foreach_copy_([piece.value for piece in self.pieces], [piece.tensor for piece in self.pieces])

    def remember(self) -> None:
        """After a step and its gather: record the versions of the values."""
        self._seen = self._versions()
