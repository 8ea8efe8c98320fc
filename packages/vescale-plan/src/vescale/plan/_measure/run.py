"""Run forward and backward of a model on tensors without data, and return its activations as numbers per row.

    1  find        which matrices tensor parallelism can split, and which modules are experts; again if it was wrong
    2  measure     with one row and with two: what grows is per row, the rest is fixed

Hooks on the blocks say where in the chain the model is, in forward and in backward. What a part keeps is what is live
when the next part begins, less what was live when it began. Gradients of parameters are dropped at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._blocks import find_blocks
from .._torch import tree_leaves
from .attention import DeviceFunctions
from .build import fake_copy
from .experts import lists_of_equals, stacks_of_experts
from .inputs import Inputs, candidates, without_data
from .memory import Counts, bytes_of
from .recorder import Phase, Recorder
from .repeats import Template, measured_as, remember, same_parameters, skip
from .result import EMPTY, KINDS, Activations, Bytes, Linear, PartActivations
from .split import Memory, Split

LossFn = Callable[..., Tensor]

ROWS = 1
#: Moments of a part that are kept.
MOMENTS = 12


@dataclass
class Found:
    """What runs have found out so far.

    Attributes:
        unsplittable: parameters that tensor parallelism cannot split.
        experts: modules of a part of the tokens, by name.
    """

    unsplittable: set[str] = field(default_factory=set)
    experts: set[str] = field(default_factory=set)


@dataclass
class Run:
    """A run of the model.

    Attributes:
        recorder: what happened at each position.
        last: live bytes by kind between forward and backward.
        inputs: number of the inputs that the model has accepted.
        measured: for each block the number of the one that is measured in its place.
        blocks: their names.
    """

    recorder: Recorder
    last: Counts
    inputs: int
    measured: Sequence[int] = ()
    blocks: Sequence[str] = ()


def measure(
    model: nn.Module,
    *,
    sequence_length: int,
    splittable: Iterable[str],
    inputs: Inputs | None = None,
    loss_fn: LossFn | None = None,
) -> tuple[Activations, dict[str, tuple[int, ...]], frozenset[str]]:
    """Return the activations of a model, the positions of its parameters, and the names of those of experts.

    Args:
        model: any module; it is not modified, and its memory is not read.
        sequence_length: tokens of a row.
        splittable: names of the parameters that tensor parallelism may split.
        inputs: see `inputs`.
        loss_fn: computes a scalar from the model's output, and from the batch's ``target`` if it has one; by default
            its ``loss``, itself if it is a scalar, or the sum of its tensors.

    Raises:
        Exception: the model's own, if it cannot run without data.
    """
    found, splittable = Found(), frozenset(splittable)
    arguments: dict[str, Any] = {"sequence_length": sequence_length, "given": inputs, "loss_fn": loss_fn}
    for _ in range(4):
        before = len(found.unsplittable), len(found.experts)
        first = _run(model, ROWS, found, splittable, **arguments)
        if before == (len(found.unsplittable), len(found.experts)):
            break
    second = _run(model, ROWS + 1, found, splittable, choice=first.inputs, **arguments)
    experts = frozenset(_names_within(model, found.experts))
    return _activations(first, second, sequence_length), _positions(first), experts


def count(model: nn.Module, batch: Mapping[str, Any], loss_fn: LossFn) -> int:
    """Return the multiplications and additions of forward and backward for a batch.

    Args:
        model: as for `measure`.
        batch: keyword arguments of the model, and ``target`` of the loss function.
        loss_fn: computes a scalar from the model's output, and from the target if there is one.

    Raises:
        Exception: the model's own, if it cannot run without data.
    """
    recorder = Recorder(Split(frozenset()))
    run = _step(model, without_data(batch, recorder.values), recorder, Found(), loss_fn)
    total = 0
    for position in recorder.phases:
        is_block = 0 <= position < len(run.measured)
        phase = recorder.phases[run.measured[position] if is_block else position]
        total += phase.forward_flops + phase.backward_flops
    return total


def _names_within(model: nn.Module, modules: Iterable[str]) -> Iterable[str]:
    prefixes = tuple(f"{name}." for name in modules)
    return (name for name, _ in model.named_parameters(remove_duplicate=False) if name.startswith(prefixes or ("\0",)))


def _run(
    model: nn.Module,
    rows: int,
    found: Found,
    splittable: frozenset[str],
    *,
    sequence_length: int,
    given: Inputs | None,
    loss_fn: LossFn | None,
    choice: int | None = None,
) -> Run:
    """Run the model once, with the first inputs that it accepts, or those of a ``choice``."""
    recorder = Recorder(Split(splittable, unsplittable=found.unsplittable))
    batches = list(candidates(model, rows, sequence_length, recorder.values, given))
    errors: list[Exception] = []
    for number, batch in enumerate(batches):
        if choice not in (None, number):
            continue
        recorder = Recorder(Split(splittable, unsplittable=found.unsplittable))
        batch = list(candidates(model, rows, sequence_length, recorder.values, given))[number]
        try:
            return dataclasses.replace(_step(model, batch, recorder, found, loss_fn), inputs=number)
        except Exception as error:
            errors.append(error)
    raise errors[0]


def _step(
    model: nn.Module,
    batch: dict[str, Any],
    recorder: Recorder,
    found: Found,
    loss_fn: LossFn | None,
) -> Run:
    """Run forward and backward of a fake copy of the model."""
    model = fake_copy(model, recorder.values)
    for name, parameter in model.named_parameters():
        recorder.ledger.hold(parameter, Memory(0, parameter=name, kind="sequence"))
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(_drop)
    for value in tree_leaves(batch):
        if isinstance(value, Tensor) and recorder.ledger.of(value) is None:
            recorder.ledger.add(value, Memory(value.untyped_storage().nbytes(), kind="whole"))
    blocks = {name: model.get_submodule(name) for name in find_blocks(model).names}
    measured, recorder.last = measured_as(blocks), len(blocks)
    templates = [Template() for _ in blocks]
    for position, (fqn, block) in enumerate(blocks.items()):
        if measured[position] == position:
            _watch_experts(fqn, block, recorder, found)
            remember(block, templates[position])
        else:
            skip(block, templates[measured[position]], recorder)
        _watch_block(block, position, len(blocks), recorder)
    if not blocks:
        _watch_experts("", model, recorder, found)
    target = [batch.pop("target")] if loss_fn is not None and "target" in batch else []
    recorder.enter(-1)
    with _silent(), DeviceFunctions(recorder), recorder, torch.enable_grad():
        loss = _loss(model(**batch), loss_fn, target)
        last = tuple(recorder.ledger.counts)
        recorder.enter(max(recorder.phases), backward=True)
        loss.backward()
        del loss
    return Run(recorder, last, 0, measured, list(blocks))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Suppress what torch logs about operators that it cannot run without data; they raise, too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was_disabled


def _drop(parameter: Tensor) -> None:
    parameter.grad = None


def _loss(output: Any, loss_fn: LossFn | None, target: Sequence[Any]) -> Tensor:
    if loss_fn is not None:
        return loss_fn(output, *target)
    if isinstance(loss := getattr(output, "loss", None), Tensor):
        return loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    scalars = [tensor for tensor in tensors if not tensor.dim()]
    return scalars[0] if scalars else torch.stack([tensor.sum() for tensor in tensors]).sum()


# ------------------------------------------------------------------------------------------------------------ hooks


def _watch_block(block: nn.Module, position: int, num_blocks: int, recorder: Recorder) -> None:
    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        for value in _with_gradient((args, kwargs)):
            value.register_hook(lambda _: recorder.enter(position - 1, backward=True))
        recorder.enter(position)

    def end(_: nn.Module, __: Any, output: Any) -> None:
        outputs = list(_with_gradient(output))
        memories = [recorder.ledger.of(value) for value in outputs]
        recorder.phases[position].outputs = [memory for memory in memories if memory is not None]
        for value in outputs:
            value.register_hook(lambda _: recorder.enter(position, backward=True))
        if position == num_blocks - 1:
            recorder.enter(num_blocks)

    block.register_forward_pre_hook(begin, with_kwargs=True)
    block.register_forward_hook(end)


def _with_gradient(values: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.requires_grad)


def _watch_experts(fqn: str, block: nn.Module, recorder: Recorder, found: Found) -> None:
    for name, module in stacks_of_experts(block):
        found.experts.add(_join(fqn, name))
        _watch_expert(module, recorder)
    for name, entries in lists_of_equals(block):
        if _join(fqn, name) in found.experts:
            for entry in entries:
                _watch_expert(entry, recorder)
        else:
            _find_experts(_join(fqn, name), block, entries, found)


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


def _watch_expert(module: nn.Module, recorder: Recorder) -> None:
    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        recorder.begin_experts(next(_floats((args, kwargs)), None))

    def end(_: nn.Module, __: Any, output: Any) -> None:
        recorder.end_experts(_floats(output))

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end)


def _floats(values: Any) -> Any:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point)


def _find_experts(name: str, block: nn.Module, entries: nn.ModuleList, found: Found) -> None:
    """Note a list as experts if its entries run on fewer tokens than the block."""
    tokens = [0]

    def begin_block(_: nn.Module, args: Any, kwargs: Any) -> None:
        value = next(_floats((args, kwargs)), None)
        tokens[0] = 0 if value is None else value.shape[:-1].numel()

    def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
        value = next(_floats((args, kwargs)), None)
        if value is not None and value.shape[:-1].numel() < tokens[0]:
            found.experts.add(name)

    block.register_forward_pre_hook(begin_block, with_kwargs=True)
    for entry in entries:
        entry.register_forward_pre_hook(begin, with_kwargs=True)


# ---------------------------------------------------------------------------------------------------------- results


def _activations(first: Run, second: Run, sequence_length: int) -> Activations:
    positions = sorted(first.recorder.phases)
    of_position = {position: _part(first, second, positions, place) for place, position in enumerate(positions)}
    parts: dict[PartActivations, int] = {}
    order = []
    for position in positions:
        is_block = 0 <= position < len(first.measured)
        part = of_position[first.measured[position] if is_block else position]
        order.append(parts.setdefault(part, len(parts)))
    if not first.measured:  # nothing is after blocks that are not there
        order.append(parts.setdefault(EMPTY, len(parts)))
    heads = first.recorder.heads or [(0, 0)]
    return Activations(
        sequence_length=sequence_length,
        parts=tuple(parts),
        order=tuple(order),
        split=tuple(sorted(same_parameters(list(first.recorder.split.found), first.blocks, first.measured))),
        heads=min(query for query, _ in heads),
        kv_heads=min(key for _, key in heads),
    )


def _part(first: Run, second: Run, positions: Sequence[int], place: int) -> PartActivations:
    phases = [run.recorder.phases[positions[place]] for run in (first, second)]
    ends = [
        run.recorder.phases[positions[place + 1]].before if place + 1 < len(positions) else run.last
        for run in (first, second)
    ]
    kept = [bytes_of(end, phase.before) for phase, end in zip(phases, ends, strict=True)]
    return PartActivations(
        kept=_linear(*kept),
        output=_linear(*(_sum(phase.outputs) for phase in phases)),
        products=tuple(
            _linear(_sum([a]), _sum([b])) for a, b in zip(phases[0].products, phases[1].products, strict=False)
        ),
        peaks=_peaks(*phases),
        forward_flops=phases[1].forward_flops - phases[0].forward_flops,
        backward_flops=phases[1].backward_flops - phases[0].backward_flops,
    )


def _peaks(one: Phase, two: Phase) -> tuple[Linear, ...]:
    """Return the moments of which none other has more bytes of every kind, for all numbers of rows."""
    first, second = ([bytes_of(peak, phase.before) for peak in phase.peaks] for phase in (one, two))
    if len(first) != len(second):  # the runs differ: compare the largest alone
        first, second = ([max(peaks, key=lambda each: each.total)] for peaks in (first, second))
    kept: list[tuple[int, ...]] = []
    for moment in sorted({_vector(*pair) for pair in zip(first, second, strict=True)}, key=sum, reverse=True):
        if not any(all(map(int.__ge__, other, moment)) for other in kept):
            kept.append(moment)
    return tuple(_line(moment) for moment in kept[:MOMENTS])


def _vector(one: Bytes, two: Bytes) -> tuple[int, ...]:
    return (*(getattr(one, kind) for kind in KINDS), *(getattr(two, kind) - getattr(one, kind) for kind in KINDS))


def _line(moment: tuple[int, ...]) -> Linear:
    now, more = moment[: len(KINDS)], moment[len(KINDS) :]
    return Linear(Bytes(*(a - ROWS * b for a, b in zip(now, more, strict=True))), Bytes(*more))


def _sum(memories: Sequence[Memory]) -> Bytes:
    counts = dict.fromkeys(KINDS, 0)
    for memory in memories:
        counts[memory.kind] += memory.num_bytes
    return Bytes(**counts)


def _linear(one: Bytes, two: Bytes) -> Linear:
    """Return bytes as a line through those of two numbers of rows."""
    return _line(_vector(one, two))


def _positions(run: Run) -> dict[str, tuple[int, ...]]:
    """Return where in the chain each parameter is used."""
    found: dict[str, set[int]] = {}
    for position, phase in run.recorder.phases.items():
        for name in phase.parameters:
            found.setdefault(name, set()).add(position)
    return {name: tuple(sorted(positions)) for name, positions in found.items()}
