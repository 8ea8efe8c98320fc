"""Random numbers as on one device.

Importing ``vescale.dtensor`` makes random operators on DTensors draw the values that stock torch draws on one device.
Call :func:`torch.manual_seed` with the same seed on every rank. This module adds information that placements do not
hold (`local_batch`, `micro_batches`, `forbidden`), a second stream (`stream`), and seeds and states (`fork`,
`manual_seed`, `get_state`, `set_state`, and `Streams` for checkpoints).

Two streams of random numbers exist:

==========================  =========================================  =============================================
\\                           ``"torch"`` (default)                      ``"philox"``
==========================  =========================================  =============================================
equal to                    the unmodified program on one device       one device inside ``stream("philox")``
a value depends on          all draws before it                        (seed, number of the draw, global index)
work per rank on CPU        O(elements of the global tensor)           O(elements held)
on another kind of device   other values                               same values; ``normal_`` and other functions
                                                                       of real numbers up to the last bit
micro-batching              same values inside `micro_batches`         same
activation checkpointing    same masks                                 same masks
==========================  =========================================  =============================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._checked import Count, checked, one_of
from ._random import state as _random_state
from ._random import streams as _streams
from ._random.batch import MicroBatches, window
from ._random.checkpointed import Streams
from ._random.global_position import BatchWindow
from ._torch.dispatch import Op
from .errors import UnsupportedRandomOperator

__all__ = [
    "Streams",
    "current_stream",
    "forbidden",
    "fork",
    "get_state",
    "local_batch",
    "manual_seed",
    "micro_batches",
    "set_state",
    "set_stream",
    "stream",
]


Stream = Annotated[str, one_of("torch", "philox")]

# ------------------------------------------------------------------------------------------------- streams


@checked
@contextlib.contextmanager
def stream(name: Stream, *, seed: int | None = None) -> Iterator[None]:
    """Draw from a stream of random numbers in this context, on plain tensors and on DTensors.

    In ``"philox"`` draw number ``n`` of seed ``s`` has its own key, and element ``i`` of the global tensor its own
    words of Philox4x32-10 under that key (conventions of ``torch.func._random``: draw ``n`` of ``uniform_`` is
    ``uniform(fold_in(key(s), n), shape)`` there). Elements are counted in logical order for any strides.

    The position in the stream is part of the state of torch's CPU generator. Code that restores the generator restores
    the position: activation checkpointing of both kinds, `torch.random.fork_rng`, `torch.set_rng_state`. Call
    ``backward()`` inside the context, too. Operators with a ``generator=`` created by the program draw from it, as in
    the stream "torch".

    Args:
        name: ``"torch"`` or ``"philox"``.
        seed: start a stream with this seed, and drop it at the end of the context. None continues the stream of
            the program from where it was left; `manual_seed` seeds it, else it starts with torch's seed.

    Raises:
        ValueError: unknown name, or a seed that is not a 64-bit integer.
        UnsupportedRandomOperator: inside, for a random operator that has no rule (``poisson``, ``binomial``, fused
            attention with dropout).

    Note:
        While it is in force, every operator on plain tensors passes through Python, which takes some microseconds.

        The stream belongs to the process, as torch's default generator does. Plain tensors follow it in the thread
        that entered the context and in backward passes started there. Inside :func:`vescale.dtensor.disabled`,
        operators draw from the stock generator.

    Example:
        >>> import torch
        >>> with stream("philox", seed=0):
        ...     whole, again = torch.rand(4), torch.rand(4)
        >>> with stream("philox", seed=0):
        ...     torch.equal(torch.rand(2), whole[:2]), torch.equal(whole, again)
        (True, False)
    """
    with _streams.stream(name, seed=seed):
        yield


@checked
def set_stream(name: Stream, *, seed: int | None = None) -> None:
    """Draw from a stream for the rest of the program, or until the next call; see `stream`.

    Args:
        name: ``"torch"`` or ``"philox"``.
        seed: seed of the stream; None continues it from where it was left.

    Raises:
        ValueError: unknown name, or a seed that is not a 64-bit integer.
        RuntimeError: inside of `stream` or `fork`.

    Example:
        >>> import torch
        >>> set_stream("philox", seed=0)
        >>> drawn = torch.rand(3)
        >>> set_stream("torch")
    """
    _streams.set_stream(name, seed=seed)


def current_stream() -> str:
    """Return the name of the stream in force, ``"torch"`` or ``"philox"``.

    Example:
        >>> with stream("philox"):
        ...     current_stream()
        'philox'
    """
    return _random_state.current()


@checked
def manual_seed(seed: int) -> None:
    """Seed both streams: all of torch's default generators, and the stream "philox".

    Args:
        seed: the same 64-bit integer on every rank.

    Raises:
        ValueError: not a 64-bit integer.

    Example:
        >>> manual_seed(0)
    """
    _random_state.manual_seed(seed)


# ------------------------------------------------------------------------------------------------- states


@checked
@contextlib.contextmanager
def fork(seed: int | None = None) -> Iterator[None]:
    """Restore all generators at the end of this context.

    For evaluation between steps of training. It covers both streams on all devices, also if an exception is raised.

    Args:
        seed: seed both streams inside, see `manual_seed`; None continues them.

    Raises:
        ValueError: ``seed`` is not a 64-bit integer.

    Example:
        >>> import torch
        >>> before = torch.get_rng_state()
        >>> with fork(seed=0):
        ...     drawn = torch.rand(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    with _random_state.fork(seed):
        yield


def get_state() -> dict[str, Any]:
    """Return the state of all random streams as a flat dict of tensors and integers, to resume later.

    It holds torch's CPU generator, the generators of the accelerators in use, and seed and counters of the stream
    "philox", whichever stream is in force. Batch windows are not part of it.

    Example:
        >>> import torch
        >>> state = get_state()
        >>> drawn = torch.rand(3)
        >>> set_state(state)
        >>> torch.equal(torch.rand(3), drawn)
        True
    """
    return _random_state.get_state()


@checked
def set_state(state: dict[str, Any]) -> None:
    """Restore a state returned by `get_state`, in this process or another.

    Args:
        state: the dict, complete and unchanged.

    Raises:
        TypeError: not a dict.
        ValueError: of another version, with missing, unknown or malformed entries, or of another number of devices.
            Nothing has changed then.
    """
    _random_state.set_state(state)


# ------------------------------------------------------------------------------------------------- batches


@checked
@contextlib.contextmanager
def local_batch(mesh_axis: DeviceMesh) -> Iterator[None]:
    """Declare that dim 0 of every tensor drawn in this context is this rank's part of a global batch.

    Plain data parallelism runs each rank on its local batch. Inside this context a random operator on a tensor of shape
    ``(b, ...)`` (plain, or a DTensor over other axes) returns rows ``[coord * b, (coord + 1) * b)`` of what one device
    draws for shape ``(n * b, ...)``, where ``n`` is the size of the axis; the generator ends as on one device. Contexts
    nest: the inner axis divides the parts of the outer one.

    Args:
        mesh_axis: 1-D mesh of the data-parallel ranks. All of them must hold local batches of equal size.

    Raises:
        ValueError: the mesh has more than one axis.
        UnsupportedRandomOperator: inside, for a random operator that cannot be sliced, on a tensor without dims, or on
            a DTensor whose own mesh spans the axis.

    Note:
        Activation checkpointing draws again during backward, when this context may have been left: what it repeats has
        the parts of its first run.

    Example:
        >>> with random.local_batch(mesh["dp"]):            # doctest: +SKIP
        ...     loss = model(local_input_ids)               # dropout masks are slices of the global batch's
    """
    if mesh_axis.ndim != 1:
        raise ValueError(f"local_batch expects a 1-D mesh axis such as mesh['dp'], got axes {mesh_axis.mesh_dim_names}")
    if mesh_axis.size() == 1:
        yield
        return
    with window(BatchWindow(mesh_axis.get_local_rank(), mesh_axis.size(), tuple(mesh_axis.mesh.tolist()))):
        yield


@checked
@contextlib.contextmanager
def micro_batches(count: Count) -> Iterator[MicroBatches]:
    """Draw in ``count`` micro-batches the values that one forward over the batch draws.

    Yields a function that returns a context for each micro-batch. In the context of micro-batch ``m`` dim 0 of every
    tensor drawn is part ``m`` of ``count`` equal parts of the batch, and every micro-batch starts at the same position
    of the stream. It may be left and entered again, for another pipeline stage or for backward, and continues where
    it was left. At the end the stream is where one forward over the batch would have left it.

    Inside `local_batch` a micro-batch is a part of the rank's batch, whichever context is entered first.

    Args:
        count: number of micro-batches; they have equal sizes and run the same random operators.

    Raises:
        ValueError: ``count`` is less than one.
        IndexError, RuntimeError: from the function: no such micro-batch, or one inside of another.

    Note:
        What activation checkpointing repeats belongs to the micro-batch of its first run, wherever backward runs.

    Example:
        >>> import torch
        >>> with stream("philox", seed=0):
        ...     whole = torch.rand(4)
        >>> with stream("philox", seed=0), micro_batches(2) as micro_batch:
        ...     parts = []
        ...     for m in range(2):
        ...         with micro_batch(m):
        ...             parts.append(torch.rand(2))
        >>> torch.equal(torch.cat(parts), whole)
        True
    """
    made = MicroBatches(count)
    yield made
    made.finish()


@checked
@contextlib.contextmanager
def forbidden(reason: str) -> Iterator[None]:
    """Refuse every random operator on plain tensors in this context.

    For code on local shards whose global position is unknown.

    Raises:
        UnsupportedRandomOperator: inside, naming the operator and ``reason``.

    Example:
        >>> with random.forbidden("this region is local"):  # doctest: +SKIP
        ...     torch.rand(3)                               # UnsupportedRandomOperator: ...; this region is local
    """

    def refuse(op: Op, args: tuple, _kwargs: dict) -> object:
        tensor = next((a for a in args if isinstance(a, Tensor)), None)
        raise UnsupportedRandomOperator.for_tensor(op, tensor, reason)

    with _streams.RandomMode(refuse):
        yield
