"""What goes into a recorded call and what comes out: rows of all ranks, and this rank's part of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from vescale.dtensor.extension import Fact, checksum, chunk, tensors_in

from .. import _torch
from .._boundary.convert import is_plain
from .._boundary.values import copied, describe_value, map_leaves
from .._static.recording.compare import is_close

__all__ = [
    "WAY_OUT",
    "Output",
    "all_rows",
    "argument_facts",
    "attributes_before",
    "difference",
    "has_rows",
    "left_in_attributes",
    "num_rows",
    "outputs_of",
]

WAY_OUT = (
    "if results need not be those of one device, pass per_rank=True to DDP: then every rank is a world of its own, as "
    "in torch's DDP"
)
_SAME_ROWS = (
    "give all ranks the same number of rows (drop_last=True of a DataLoader), which are equal parts of the rows of one "
    "device; or sum the losses and multiply them by DDP.global_mean_scale(count), called before the forward"
)
_SAME_CALL = f"call the module on all ranks with the same shapes, dtypes and plain arguments; {WAY_OUT}"
_SAME_VALUES = "a tensor whose dim 0 is not that of the rows belongs to all rows, so all ranks must pass the same one"


# ------------------------------------------------------------------------------------------------- arguments


def argument_facts(args: tuple, kwargs: dict) -> Iterator[list[Fact]]:
    """Yield what must be equal on all ranks: numbers of rows, shapes, then values that belong to all rows."""
    rows, common = num_rows(args, kwargs), []
    yield [Fact("the number of rows (dim 0 of the first input) of the module given to DDP", f"{rows}", _SAME_ROWS)]
    yield [Fact("the call of the module given to DDP", str(describe_value((args, kwargs))), _SAME_CALL)]

    def note(tensor: Tensor, where: str) -> Tensor:
        if is_plain(tensor) and not has_rows(tensor, rows):
            value = f"values with checksum {checksum(tensor).item():016x}"
            common.append(Fact(f"the values of {where}", value, _SAME_VALUES))
        return tensor

    map_leaves(note, (args, kwargs), "arguments")
    yield common


def all_rows(args: tuple, kwargs: dict, mesh: DeviceMesh) -> tuple[tuple, dict]:
    """Return the arguments of a call on the rows of all ranks: tensors of rows are DTensors, sharded on dim 0."""
    rows = num_rows(args, kwargs)

    def distribute(tensor: Tensor, _where: str) -> Tensor:
        if not is_plain(tensor) or not has_rows(tensor, rows):
            return tensor
        return DTensor.from_local(tensor.detach(), mesh, [Shard(0)], run_check=False)

    return map_leaves(distribute, (copied(args), copied(kwargs)), "")


def num_rows(args: tuple, kwargs: dict) -> int | None:
    """Return dim 0 of the first tensor that has dims; None if there is none."""
    sizes: list[int] = []

    def note(tensor: Tensor, _where: str) -> Tensor:
        sizes.extend(tensor.shape[:1])
        return tensor

    map_leaves(note, (args, kwargs), "")
    return sizes[0] if sizes else None


def has_rows(tensor: Tensor, rows: int | None) -> bool:
    """Return whether dim 0 of a tensor is that of the rows."""
    return tensor.ndim > 0 and tensor.shape[0] == rows


# ------------------------------------------------------------------------------------------------- results

Attribute = tuple[str, str]  # names of a module and of its attribute


@dataclass(frozen=True)
class Output:
    """A tensor that a call returns, or that it leaves, or writes, in an attribute.

    Attributes:
        value: what this rank has of it.
        shape: global shape.
        placements: None if it is a plain tensor.
        attribute: names of the module and of its attribute; None if it is returned.
    """

    value: Tensor
    shape: torch.Size
    placements: tuple[Placement, ...] | None
    attribute: Attribute | None = None

    def without_value(self) -> Output:
        """Return the same without the value, to be kept."""
        return replace(self, value=self.value.new_empty(0))

    @property
    def is_loss(self) -> bool:
        """Whether it may be a loss, each rank with a summand of it."""
        return not self.shape and all(p.is_partial("sum") for p in self.placements or ())

    @property
    def must_be_reduced(self) -> bool:
        """Whether the value on all rows is neither this rank's, nor a loss, of which the mean over ranks counts."""
        may_be_a_loss = self.attribute is None and not self.shape
        return any(p.is_partial() and not (may_be_a_loss and p.is_partial("avg")) for p in self.placements or ())


def outputs_of(result: object) -> list[Output]:
    """Return the tensors of a result, in order."""
    found: list[Output] = []

    def note(tensor: Tensor, _where: str) -> Tensor:
        found.append(_output(tensor))
        return tensor

    map_leaves(note, result, "")
    return found


def _output(tensor: Tensor, attribute: Attribute | None = None) -> Output:
    placements = tuple(tensor.placements) if isinstance(tensor, DTensor) else None
    local = tensor if placements is None else _torch.local_of(tensor)
    return Output(local.detach().clone(), tensor.shape, placements, attribute)


def attributes_before(module: nn.Module) -> dict[Attribute, tuple[Tensor, Tensor | None]]:
    """Return the tensors in attributes of a module and of its parts, but no parameters, with copies of plain ones."""
    tensors = _tensor_attributes(module).items()
    return {where: (tensor, tensor.detach().clone() if _is_comparable(tensor) else None) for where, tensor in tensors}


def _is_comparable(tensor: Tensor) -> bool:
    return is_plain(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta"


def _tensor_attributes(module: nn.Module) -> dict[Attribute, Tensor]:
    return {
        (name, key): value
        for name, part in module.named_modules()
        for table in (_torch.tensor_tables(part)[1], vars(part))
        for key, value in table.items()
        if isinstance(value, Tensor)
    }


def left_in_attributes(before: dict[Attribute, tuple[Tensor, Tensor | None]], module: nn.Module) -> list[Output]:
    """Return the tensors that a call has left in attributes, or has written there, in the order of their names.

    Later operators may hide from its results what has gone into them: a norm hides an offset, which its running
    statistics have.

    Raises:
        RuntimeError: it has left a summand in a list or dict.
    """
    _refuse_summands_in_containers(module)

    def is_other(where: Attribute, now: Tensor) -> bool:
        tensor, values = before.get(where, (None, None))
        return tensor is not now or (values is not None and not torch.equal(values, now))

    now = _tensor_attributes(module).items()
    return sorted((_output(value, where) for where, value in now if is_other(where, value)), key=_name)


def _refuse_summands_in_containers(module: nn.Module) -> None:
    for name, part in module.named_modules():
        buffers = _torch.tensor_tables(part)[1]
        for key, value in vars(part).items():
            tensors = [] if isinstance(value, Tensor) or value is buffers else tensors_in(value)
            if any(isinstance(tensor, DTensor) and _output(tensor).must_be_reduced for tensor in tensors):
                where = f"{name}.{key}".removeprefix(".")
                raise RuntimeError(
                    f"it leaves values in {where!r}, a {type(value).__name__}, of which each rank has a summand; "
                    "return them, or leave each in an attribute"
                )


def _name(output: Output) -> tuple[str, str]:
    return output.attribute or ("", "")


def difference(
    expected: Sequence[Output],
    actual: Sequence[Output],
    mesh: DeviceMesh,
    nudged: Sequence[Output] | None = None,
) -> str | None:
    """Return a text about the first output of a call that is not the recorded one; None if all are.

    Args:
        expected: of the call on the rows of all ranks.
        actual: of the call on this rank's rows.
        mesh: of the ranks.
        nudged: of a call that shows how far rounding errors reach (see ``_static.recording.rounding``).
    """
    if [each.attribute for each in expected] != [each.attribute for each in actual]:
        whole, own = map(_described, (expected, actual))
        return f"it returns {whole} for the rows of all ranks, but {own} for those of one"
    for number, (theirs, mine) in enumerate(zip(expected, actual, strict=True)):
        name = f"output {number}" if mine.attribute is None else f"attribute {'.'.join(filter(None, mine.attribute))!r}"
        value = _part(theirs, theirs.value, mine.value, mesh)
        if value.shape != mine.value.shape:
            shapes = f"{tuple(value.shape)}, but on the rows of one {tuple(mine.value.shape)}"
            return f"{name} has on the rows of all ranks the local shape {shapes}"
        moved = None if nudged is None else _part(theirs, nudged[number].value, mine.value, mesh)
        if not is_close(mine.value, value, moved):
            distance = (mine.value.double() - value.double()).abs().max()
            return f"{name} is another one on the rows of one rank: it differs by up to {float(distance):.3g}"
    return None


def _described(outputs: Sequence[Output]) -> str:
    left = [".".join(filter(None, each.attribute)) for each in outputs if each.attribute is not None]
    others = f" and leaves others in {', '.join(left)}" if left else ""
    return f"{len(outputs) - len(left)} tensors{others}"


def _part(output: Output, whole: Tensor, mine: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of a value that all ranks have, if local code makes just that."""
    if any(p.is_partial() for p in output.placements or ()):
        return whole  # a summand has no part for a rank
    dims = [dim for dim, sizes in enumerate(zip(whole.shape, mine.shape, strict=False)) if sizes[0] != sizes[1]]
    if whole.ndim != mine.ndim or len(dims) != 1:
        return whole
    first, length = chunk(whole.shape[dims[0]], mesh.size(), mesh.get_local_rank())
    return whole.narrow(dims[0], first, length) if length == mine.shape[dims[0]] else whole
