"""Links: which block of a tensor in a file is which block of a tensor of a module.

Most tensors have one name and shape in both. Others are made of several, as experts, which are matrices in files and
one stacked tensor in memory. With two experts, whose gate and up projections have shape (I, H):

    in the files                      in the module
    experts.0.w1.weight  (I, H)       experts.gate_up_proj  [0:1, 0:I, 0:H]
    experts.0.w3.weight  (I, H)                             [0:1, I:2*I, 0:H]
    experts.1.w1.weight  (I, H)                             [1:2, 0:I, 0:H]
    experts.1.w3.weight  (I, H)                             [1:2, I:2*I, 0:H]

Names come from `Names` (``hf_rules.py``, ``hf_transformers.py``). Pure functions.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from .._errors import CheckpointError, format_some
from .._format.boxes import Box
from .._format.manifest import TensorMeta
from .._format.strided import row_major
from .._typed_json import Size


@dataclass(frozen=True)
class InModule:
    """The place of a tensor of a file in a module.

    Attributes:
        names: the tensors of the module that it has values of; several if it is their concatenation.
        stack: the dim of the module's tensor along which tensors of files are stacked.
        index: its number in the stack.
        concatenate: the dim of the concatenation: of the module's tensor, or of the file's if there are several names.
        part: its number in the concatenation that the module's tensor is.
        parts: how many these are.
    """

    names: tuple[str, ...]
    stack: int | None = None
    index: int = 0
    concatenate: int | None = None
    part: int = 0
    parts: int = 1


@dataclass(frozen=True)
class InFiles:
    """The place of a tensor of a module in files.

    Attributes:
        keys: names of tensors of files: a row for each part of a concatenation, with one for each index of a stack.
        stack: as for `InModule`.
        concatenate: the dim of the concatenation: of the module's tensor, or of the file's if that has several.
        part: its number in the concatenation that the file's tensor is.
        parts: how many these are.
    """

    keys: tuple[tuple[str, ...], ...]
    stack: int | None = None
    concatenate: int | None = None
    part: int = 0
    parts: int = 1


class Names(Protocol):
    """How a module's tensors are named in files, and made of those."""

    def in_module(self, key: str) -> InModule:
        """Return the place of a tensor of a file."""

    def in_files(self, name: str, shape: tuple[int, ...]) -> InFiles:
        """Return the place of a tensor of the module."""


@dataclass(frozen=True)
class Link:
    """A block that a tensor of a file and one of a module have in common.

    Attributes:
        name: of the module's tensor.
        box: in it.
        key: of the file's tensor.
        first: the element of the file's tensor, in row-major order, with which the block begins.
        strides: of the block in the file's tensor, for each dim of the box.
    """

    name: str
    box: Box
    key: str
    first: Size
    strides: tuple[Size, ...]


def links_to_load(
    tensors: Mapping[str, TensorMeta], names: Names, wanted: Collection[str]
) -> tuple[dict[str, TensorMeta], list[Link]]:
    """Return what files hold by the module's names, and where.

    Args:
        tensors: of the files, in any order.
        names: gives their places.
        wanted: names of the module. A name of files that is one of these, but of which ``names`` make another one that
            is not, stays as it is: then the files have the module's names already.

    Raises:
        CheckpointError: tensors that are made of several miss one, or have shapes that do not fit.
    """
    whole: dict[str, str] = {}
    pieces: dict[str, list[tuple[str, InModule]]] = defaultdict(list)
    metas: dict[str, TensorMeta] = {}
    links: list[Link] = []
    for key in tensors:
        place = names.in_module(key)
        if key in wanted and not set(place.names).issubset(wanted):
            place = InModule((key,))
        for name in place.names:
            first = whole.setdefault(name, key)
            is_piece = place.stack is not None or place.parts > 1
            if first != key and not (is_piece and name in pieces):
                raise CheckpointError(
                    f"tensor {name!r}: expected it once in the files, got {first!r} and {key!r}; remove one of them"
                )
            if is_piece:
                pieces[name].append((key, place))
        if not (place.stack is not None or place.parts > 1):
            for link in _split(key, tensors[key].shape, place):
                metas[link.name] = TensorMeta(tensors[key].dtype, link.box.sizes)
                links.append(link)
    for name, own in pieces.items():
        metas[name], found = _merged(name, own, tensors)
        links += found
    return metas, links


def links_to_save(tensors: Mapping[str, TensorMeta], names: Names) -> tuple[dict[str, TensorMeta], list[Link]]:
    """Return the tensors of files that hold a module's tensors, and what is where.

    Raises:
        CheckpointError: names of files occur twice, or tensors that are stored as one do not fit.
    """
    metas: dict[str, TensorMeta] = {}
    links: list[Link] = []
    joined: dict[str, list[tuple[str, InFiles]]] = defaultdict(list)
    owner: dict[str, str] = {}
    for name, meta in tensors.items():
        place = names.in_files(name, meta.shape)
        if place.parts > 1:
            joined[place.keys[0][0]].append((name, place))
            continue
        for key, box in _boxes_of(name, meta.shape, place):
            if key in owner:
                raise CheckpointError(
                    f"expected distinct names in the files, got {key!r} for {owner[key]!r} and {name!r}; rename one of "
                    "them"
                )
            owner[key] = name
            sizes = tuple(size for dim, size in enumerate(box.sizes) if dim != place.stack)
            metas[key] = TensorMeta(meta.dtype, sizes)
            links.append(Link(name, box, key, 0, _strides(box.sizes, place.stack)))
    for key, own in joined.items():
        if key in metas:
            raise CheckpointError(f"expected distinct names in the files, got {key!r} twice; rename one of them")
        metas[key], found = _joined(key, own, tensors)
        links += found
    return metas, links


def _strides(sizes: tuple[int, ...], stack: int | None) -> tuple[int, ...]:
    """Return the strides in a file's tensor, which lacks the dim of the stack, where the box has one index."""
    return tuple(0 if dim == stack else stride for dim, stride in enumerate(row_major(sizes)))


def _split(key: str, shape: tuple[int, ...], place: InModule) -> Iterable[Link]:
    """Yield the links of a file's tensor that is one tensor of the module, or the concatenation of several."""
    if len(place.names) == 1:
        yield Link(place.names[0], Box.full(shape), key, 0, row_major(shape))
        return
    dim = _checked_dim(place.concatenate, shape, key)
    size, strides = -(-shape[dim] // len(place.names)), row_major(shape)
    for number, name in enumerate(place.names):
        start, end = min(number * size, shape[dim]), min((number + 1) * size, shape[dim])
        sizes = (*shape[:dim], end - start, *shape[dim + 1 :])
        yield Link(name, Box.full(sizes), key, start * strides[dim], strides)


def _merged(
    name: str, own: Iterable[tuple[str, InModule]], tensors: Mapping[str, TensorMeta]
) -> tuple[TensorMeta, list[Link]]:
    """Return a tensor of the module that is made of several of files."""
    found = {(place.index, place.part): (key, place) for key, place in own}
    key, place = next(iter(found.values()))
    stack, parts, dtype = place.stack, place.parts, tensors[key].dtype
    count = 1 + max(index for index, _ in found)
    if count > len(found):
        raise _incomplete(name, found)
    sizes: dict[int, tuple[int, ...]] = {}  # of the box, by part
    for index in range(count):
        for part in range(parts):
            if (index, part) not in found:
                raise _incomplete(name, found)
            key, _ = found[index, part]
            shape = tensors[key].shape
            if stack is not None:
                if stack > len(shape):
                    raise CheckpointError(f"tensor {key!r}: expected {stack} dims or more to stack, got {shape}")
                shape = (*shape[:stack], 1, *shape[stack:])
            if sizes.setdefault(part, shape) != shape or tensors[key].dtype != dtype:
                raise CheckpointError(
                    f"tensor {name!r}: expected tensors of one shape and dtype in the files to stack, got "
                    f"{tensors[key].dtype} {tensors[key].shape} of {key!r}; download them again"
                )
    dim = None if parts == 1 else _checked_dim(place.concatenate, sizes[0], key)
    if dim is not None and any(
        len(own) != len(sizes[0]) or (*own[:dim], *own[dim + 1 :]) != (*sizes[0][:dim], *sizes[0][dim + 1 :])
        for own in sizes.values()
    ):
        shapes = format_some(str(own) for own in sizes.values())
        raise CheckpointError(f"tensor {name!r}: expected shapes that are equal but in dim {dim}, got {shapes}")
    links, start = [], 0
    for part in range(parts):
        for index in range(count):
            offsets = [0] * len(sizes[part])
            if dim is not None:
                offsets[dim] = start
            if stack is not None:
                offsets[stack] = index
            box = Box(tuple(offsets), sizes[part])
            links.append(Link(name, box, found[index, part][0], 0, _strides(sizes[part], stack)))
        start += 0 if dim is None else sizes[part][dim]
    whole = list(sizes[0])
    if dim is not None:
        whole[dim] = start
    if stack is not None:
        whole[stack] = count
    return TensorMeta(dtype, tuple(whole)), links


def _incomplete(name: str, found: Mapping[tuple[int, int], tuple[str, InModule]]) -> CheckpointError:
    (_, place), *_ = found.values()
    count = 1 + max(index for index, _ in found)
    every = ((index, part) for index in range(count) for part in range(place.parts))
    gaps = list(itertools.islice((each for each in every if each not in found), 5))  # of a file that lies, many
    near = found[min(found, key=lambda each: abs(each[0] - gaps[0][0]))][0]
    what = format_some(f"number {index}" + (f", part {part}" if place.parts > 1 else "") for index, part in gaps)
    return CheckpointError(
        f"tensor {name!r}: expected {count} x {place.parts} tensors in the files to merge, got none for {what}, beside "
        f"{near!r}; download the folder again"
    )


def _boxes_of(name: str, shape: tuple[int, ...], place: InFiles) -> Iterable[tuple[str, Box]]:
    """Yield the tensors of files that one tensor of the module is made of, with their boxes."""
    parts = len(place.keys)
    dim = None if parts == 1 else _checked_dim(place.concatenate, shape, name)
    if dim is not None and shape[dim] % parts:
        raise CheckpointError(
            f"tensor {name!r}: expected a size of dim {dim} that {parts} parts divide, got shape {shape}"
        )
    for part, keys in enumerate(place.keys):
        for index, key in enumerate(keys):
            box = Box.full(shape)
            if dim is not None:
                size = shape[dim] // parts
                box = box.rows(dim, part * size, (part + 1) * size)
            yield key, box if place.stack is None else box.rows(place.stack, index, index + 1)


def _joined(
    key: str, own: Iterable[tuple[str, InFiles]], tensors: Mapping[str, TensorMeta]
) -> tuple[TensorMeta, list[Link]]:
    """Return a tensor of a file that several of the module are stored as."""
    by_part = {place.part: name for name, place in own}
    (_, place), *_ = own
    if len(by_part) != place.parts or len({tensors[name].dtype for name in by_part.values()}) > 1:
        raise CheckpointError(
            f"tensor {key!r} of the files: expected {place.parts} tensors of one dtype of the module, got "
            f"{format_some(map(repr, by_part.values()))}"
        )
    names = [by_part[part] for part in range(place.parts)]
    shapes = [tensors[name].shape for name in names]
    dim = _checked_dim(place.concatenate, shapes[0], names[0])
    total = sum(shape[dim] for shape in shapes)
    whole = (*shapes[0][:dim], total, *shapes[0][dim + 1 :])
    if any(shape != shapes[0] for shape in shapes):
        raise CheckpointError(
            f"tensor {key!r} of the files: expected equal shapes of parts, as a load splits it so, got "
            f"{format_some(map(str, shapes))}"
        )
    strides = row_major(whole)
    links, start = [], 0
    for name, shape in zip(names, shapes, strict=True):
        links.append(Link(name, Box.full(shape), key, start * strides[dim], strides))
        start += shape[dim]
    return TensorMeta(tensors[names[0]].dtype, whole), links


def _checked_dim(dim: int | None, shape: tuple[int, ...], name: str) -> int:
    if dim is None or not 0 <= dim < len(shape):
        raise CheckpointError(f"tensor {name!r}: expected a dim {dim} to concatenate, got shape {shape}")
    return dim
