"""Search for islands: operators that give another result on local tensors than this rank's part of the recorded one.

The module runs forward on local tensors. Each call of a torch function is compared with the recorded call at the same
place. Where a result differs, the function is an island, and the search goes on with the recorded result::

    recording    x.mean(-1)  ->  Replicate     h - mean    weight * h
    local        differs: an island            equal       equal

So the cause does not matter: communication, a number of heads, a size in a formula, an offset of indices. The results
of all ranks are compared, because an island communicates: it is one on all ranks or on none.

Code also makes tensors of sizes that it reads: zeros for a state, a mask, positions. In the recording these are whole
on all ranks, and local code makes this rank's part. If the values of the part are those of the whole tensor, as for
zeros, local code is right. If not (positions, random numbers), the island makes the whole tensor and returns the part.

Code that asks for a size may leave out a call on local tensors, or make one more (``if rows != 1``). A call is compared
with the next recorded one of its function, and not compared if there is none. The check, which follows, compares all.
"""

from __future__ import annotations

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.overrides import TorchFunctionMode

from ... import _torch
from ..._boundary.values import copied
from ..local_modules import local_forward
from ..operators import Operand, Part
from ..parts import Parts, describe
from .calls import CallRecorder, Island, KeptCall, Place, is_metadata
from .compare import is_close, raise_together
from .dry_run import Run, call_locally, without_side_effects
from .local_sizes import LocalSizes
from .memory import initialized
from .names import Names

__all__ = ["SUMS", "search"]

logger = logging.getLogger("vescale.dmodule")

SUMS = {getattr(Tensor, f"__{kind}{name}__") for kind in ("", "r", "i") for name in ("add", "sub")}
SUMS |= {Tensor.add, Tensor.sub, Tensor.add_, Tensor.sub_, torch.add, torch.sub}


def search(
    run: Run, recorder: CallRecorder, parts: Parts, args: tuple, kwargs: dict, *, local_means: bool = False
) -> dict[Place, Island]:
    """Run a call forward on local tensors to find the operators that must run on DTensors. Collective over the mesh.

    Args:
        run: receives nothing of interest.
        recorder: of the recorded call.
        parts: the module.
        args: of the call.
        kwargs: of the call.
        local_means: whether local code may have a mean of its own values where the recording has one over ranks.

    Raises:
        NotLocalFriendlyError: the module raises on local tensors.
    """
    found, error = _Search(recorder, run.names, parts, recorder.mesh, local_means=local_means), None
    try:
        with without_side_effects(parts.module), run.names.watching(parts.modules):
            arguments, keywords = copied(args), copied(kwargs)
            with found.running():
                call_locally(run, parts, arguments, keywords)
    except Exception as failed:  # the others go on to a collective
        error = failed
    raise_together(error, recorder.mesh)
    islands = found.islands()
    if islands:
        texts = [f"{recorder.kept[place].operator} in {describe(run.names.calls[place[0]].name)}" for place in islands]
        logger.info("static mode runs %d operators on DTensors, as islands: %s", len(texts), "; ".join(sorted(texts)))
    return islands


class _Search(TorchFunctionMode):
    """Compare each call of a torch function on local tensors with the recorded one.

    Args:
        recorder: of the recorded call, which has kept the values.
        names: the running modules.
        parts: of the program.
        mesh: of the recorded layouts.
        local_means: see :func:`search`.
    """

    def __init__(self, recorder: CallRecorder, names: Names, parts: Parts, mesh: DeviceMesh, *, local_means: bool):
        super().__init__()
        self._kept, self._names, self._parts, self._mesh = recorder.kept, names, parts, mesh
        # their local code makes other calls
        self._replaced = {name for name, part in parts.modules.items() if local_forward(part) is not None}
        self._number_of: Mapping[int, int] = defaultdict(int)  # of the next call in a call of a module
        self._found = recorder.communicating | recorder.apart()
        if not local_means:
            self._found |= {place for place, call in recorder.kept.items() if call.averages}
        self._constants: dict[Place, dict[int, tuple[object, object]]] = {}
        self._sizes = LocalSizes(recorder.kept, mesh)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Search while the context is open."""
        with torch.no_grad(), self:
            yield

    def islands(self) -> dict[Place, Island]:
        """Return what any rank has found, and the random operators beside islands. Collective over the mesh."""
        places = sorted(self._kept)
        mine = [*(place in self._found for place in places), *self._sizes.flags()]
        flags = torch.tensor(mine, dtype=torch.float32, device=self._mesh.device_type)
        every = DTensor.from_local(flags, self._mesh, [Partial("max")] * self._mesh.ndim, run_check=False)
        settled = iter(every.full_tensor().bool().tolist())
        found = {place for place in places if next(settled)}
        self._sizes.settle(settled)
        found |= {place for place in places if self._kept[place].operator.draws and self._sizes.operands(place)}
        if found:  # gradients between islands and random operators have the layouts of their values
            found |= {
                place for place, call in self._kept.items() if call.operator.is_sharded and not self._draws_rows(place)
            }
        found = {place for place in found if self._is_local(self._names.calls[place[0]].name)}
        return {place: self._island(place) for place in found}

    def _island(self, place: Place) -> Island:
        return Island(
            constants=self._constants.get(place, {}),
            written=tuple(self._kept[place].operands),
            part=self._sizes.part(place),
            operands=self._sizes.operands(place),
        )

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if is_metadata(func):
            return func(*args, **kwargs)
        place, call = self._next(func)
        if call is None or not self._is_local(self._names.running):
            return func(*args, **kwargs)
        leaves = _torch.tree_leaves((args, kwargs))
        operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._compare_constants(place, call, [leaf for leaf in leaves if not isinstance(leaf, Tensor)])
        self._sizes.note_operands(place, operands)
        if func is torch.autograd.grad:  # of values without a graph; the check takes it
            return _substitute(call, operands)
        if func in SUMS and len(set(map(_kind_of_summand, call.operator.operands))) > 1:
            self._found.add(place)  # equal values would be an accident: a state of zeros
            return _substitute(call, operands)
        if call.operator.draws and (operands or kwargs.get("generator") is not None):
            return _substitute(call, operands)
        try:
            result = initialized(func, func(*args, **kwargs))
        except Exception:
            if not (call.returned or call.operands):
                raise
            self._found.add(place)
            return _substitute(call, operands)
        is_whole = bool(call.whole) and isinstance(result, Tensor) and not call.communicates
        result = self._compared(place, call, result, operands, is_whole=is_whole)
        if is_whole:
            self._sizes.note_result(place, result)
        return result

    def _compared(
        self, place: Place, call: KeptCall, mine: object, operands: list[Tensor], *, is_whole: bool
    ) -> object:
        """Return the result to go on with."""
        if is_whole and (parts := self._sizes.parts(place, mine)):
            part = self._part(place, call, mine, parts)
            if part is not None:
                return part
        elif call.operator.draws:
            return _substitute(call, operands)
        elif not self._differs(call, mine, operands) or (call.is_inner and not call.communicates):
            return mine
        self._found.add(place)
        return _substitute(call, operands)

    def _part(self, place: Place, call: KeptCall, mine: Tensor, parts: list[Part]) -> Tensor | None:
        """Return what stands for a part of a whole tensor; None if local code has another one."""
        if not call.operator.draws and all(_same(mine, call.result.narrow(*part)) for part in parts):
            return mine
        self._found.add(place)
        return call.result.narrow(*parts[0]).clone() if len(parts) == 1 else None

    def _draws_rows(self, place: Place) -> bool:
        """Return whether a random operator draws for rows on dim 0, and local code calls it alike."""
        return self._kept[place].operator.draws_rows and not self._constants.get(place)

    def _is_local(self, name: str) -> bool:
        """Return whether the code of a module is the same on local tensors."""
        return self._parts.is_watched(name) and name not in self._parts.experts and name not in self._replaced

    def _next(self, function: Callable) -> tuple[Place, KeptCall | None]:
        """Return the place of the next call of a function in the recorded call of the module, None if there is none."""
        if not self._names.path:
            return (0, 0), None
        number = self._names.path[-1].number
        position = self._number_of[number]
        while (call := self._kept.get((number, position))) is not None and call.operator.function != function:
            position += 1
        if call is not None:
            self._number_of[number] = position + 1
        return (number, position), call

    def _compare_constants(self, place: Place, call: KeptCall, constants: list[object]) -> None:
        if len(constants) == len(call.constants):
            pairs = enumerate(zip(constants, call.constants, strict=True))
            self._constants[place] = {i: pair for i, pair in pairs if _is_other(*pair)}

    @staticmethod
    def _differs(call: KeptCall, result: object, operands: list[Tensor]) -> bool:
        leaves, expected = _torch.tree_leaves(result), _torch.tree_leaves(call.result)
        if len(leaves) != len(expected):
            return bool(call.returned)
        pairs = list(zip(leaves, expected, strict=True))
        pairs += [(operands[i], value) for i, value in call.operands.items() if i < len(operands)]
        tensors = [pair for pair in pairs if isinstance(pair[1], Tensor)]
        others = [pair for pair in pairs if not isinstance(pair[1], Tensor)]
        if call.communicates and (tensors or any(_is_other(*pair) for pair in others)):
            return True
        if not all(_same(*pair) for pair in tensors):
            return True
        for mine, theirs in tensors:
            if not torch.equal(mine, theirs):  # rounding errors of one call must not reach the next
                mine.copy_(theirs)
        return False


def _kind_of_summand(operand: Operand) -> tuple[bool, ...]:
    """Return along which mesh axes the ranks have summands of an operand: a sum with another kind adds that N times."""
    return tuple(placement.is_partial("sum") for placement in operand.placements)


def _same(mine: object, theirs: Tensor) -> bool:
    """Return whether two results of one operator on the same operands are equal up to rounding errors."""
    if not isinstance(mine, Tensor) or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return False
    return is_close(mine, theirs)


def _is_other(one: object, other: object) -> bool:
    return type(one) is not type(other) or (one is not other and one != other)


def _substitute(call: KeptCall, operands: list[Tensor]) -> object:
    """Return the recorded result, and write what the recorded call wrote."""
    for i, value in call.operands.items():
        if operands[i].shape == value.shape:
            operands[i].copy_(value)
    returned = iter(call.returned)

    def convert(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        place = next(returned)
        return leaf.clone() if place is None else operands[place]

    return _torch.tree_map(convert, call.result)
