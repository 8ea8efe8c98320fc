"""The only file of the sweep that touches private torch names: the operator database, and DTensors without autograd."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch._dynamo  # otherwise every rank imports it at its first DTensor
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = [
    "Height",
    "NoisySums",
    "collectives_started",
    "count_gathers",
    "database",
    "gathers",
    "largest",
    "local_tensor",
    "make",
    "sizes",
    "split_factor",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

SUMS = frozenset(
    {"_fft_c2c", "_fft_c2r", "_fft_r2c", "_fused_rms_norm", "_log_softmax", "_softmax", "addmm", "addmv", "baddbmm"}
    | {"bmm", "convolution", "cumprod", "cumsum", "dot", "linalg_vector_norm", "logcumsumexp", "logsumexp", "mean"}
    | {"mm", "mv", "nansum", "native_batch_norm", "native_group_norm", "native_layer_norm", "norm", "prod", "std"}
    | {"std_mean", "sum", "trace", "var", "var_mean", "vdot"}
)
"""Operators whose results another order of additions changes."""

# The collectives that give a rank elements of other ranks.
GATHERING = ("all_gather_tensor", "all_gather_single", "all_to_all_single", "all_gather_into_tensor_coalesced")
GATHERING += ("permute_tensor", "broadcast", "all_gather_tensor_autograd", "all_to_all_single_autograd")

_gathers = 0


# ------------------------------------------------------------------------------------------------- operators


@functools.cache
def database() -> tuple:
    """Return torch's operator database: a tuple of ``OpInfo``. Imported at the first call: it takes a second."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

    # Each iterator over samples, and each sample, looks through the sources of all frames of the stack for a test case
    # of unittest. There is none, and under pytest-xdist that takes a tenth of a second.
    common_utils.extract_test_fn = core.extract_test_fn = lambda: None
    return tuple(op_db)


@contextlib.contextmanager
def sizes(small: int, medium: int) -> Iterator[None]:
    """Generate samples with other sizes than torch's 5 and 10, which a mesh of four divides unevenly."""
    database()
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.testing._internal.") and ("opinfo" in name or "methods_invocations" in name)
    ]
    saved = []
    for module in modules:
        for name, old, new in (("S", 5, small), ("M", 10, medium)):
            if vars(module).get(name) == old:
                saved.append((module, name, old))
                setattr(module, name, new)
    try:
        yield
    finally:
        for module, name, old in saved:
            setattr(module, name, old)


# ------------------------------------------------------------------------------------------------- DTensors


def make(local: Tensor, shape: Sequence[int], stride: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]):
    """Wrap a shard as a DTensor, without communication and outside autograd."""
    meta = TensorMeta(torch.Size(shape), tuple(stride), local.dtype)
    return DTensor(local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def local_tensor(tensor: DTensor) -> Tensor:
    """Return this rank's shard itself, outside autograd."""
    local = tensor._local_tensor
    return local.wait() if hasattr(local, "wait") else local


def split_factor(placement: Placement) -> int | None:
    """Return the split factor of a strided placement; None for all other placements."""
    return placement.split_factor if isinstance(placement, _StridedShard) else None


# ------------------------------------------------------------------------------------------------- communication


def collectives_started(mesh: DeviceMesh) -> int:
    """Return how many collectives this rank has started on the mesh's axes since the world began."""
    groups = {id(group): group for group in [dist.group.WORLD, *mesh.get_all_groups()]}
    return sum(group._get_sequence_number_for_group() for group in groups.values())


def gathers() -> int:
    """Return how many collectives have given this rank elements of other ranks since :func:`count_gathers`."""
    return _gathers


def count_gathers() -> None:
    """Count the functional collectives that gather, in this process and from now on."""
    for name in GATHERING:
        if hasattr(funcol, name):
            setattr(funcol, name, _counting(getattr(funcol, name)))


def _counting(function):
    @functools.wraps(function)
    def counted(*args, **kwargs):
        global _gathers
        _gathers += 1
        return function(*args, **kwargs)

    return counted


class NoisySums(TorchDispatchMode):
    """Changes the results of `SUMS`, and what each operator reads of some tensors, by a relative noise.

    Zeros in results of complex operands get one sign: kernels give them another one for one element than for several,
    and on a branch cut it decides. So do all zeros in results where a tensor is a sum over ranks: -0.0 + 0.0 is 0.0, so
    the product of such a tensor and 0 has no sign of its own, and ``atan2`` makes another angle of each.

    Args:
        share: How much of it, and with which sign.
        unit: How large it is; in coarse dtypes as large as rounding errors of sums.
        has_sums: Whether a tensor is a sum over ranks.
        partial: Those that are sums of more than two addends. Each operator that reads one, or a view of one, adds up
            anew, in an order that depends on where an element is; what it also writes to stays as it is.
    """

    def __init__(self, share: float, unit: float, *, has_sums: bool, partial: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._share, self._unit, self._generator = share, unit, torch.Generator().manual_seed(5)
        self._has_sums = has_sums
        self._partial = set(map(_memory, partial))

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator."""
        if self._partial and not op._schema._is_view_op():
            args, kwargs = self._read(op, args, kwargs or {})
        results = op(*args, **(kwargs or {}))
        if op.overloadpacket.__name__ in SUMS and "out" not in op._overloadname:
            for result in results if isinstance(results, tuple) else (results,):
                if result is not None and (result.is_floating_point() or result.is_complex()):
                    result.mul_(self._factor(result))
        if not op._schema._is_view_op():
            of_complex = any(isinstance(t, Tensor) and t.is_complex() for t in tree_leaves(args))
            for result in results if isinstance(results, tuple) else (results,):
                if isinstance(result, Tensor) and result.is_complex() and not result.is_conj() and of_complex:
                    self._give_sign(torch.view_as_real(result))
                elif isinstance(result, Tensor) and result.is_floating_point() and self._has_sums:
                    self._give_sign(result)
        return results

    def _give_sign(self, numbers: Tensor) -> None:
        """Let all zeros have one sign."""
        numbers.copy_(torch.where(numbers == 0, math.copysign(0.0, self._share), numbers))

    def _read(self, op: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments with what the operator reads of partial tensors; equal views are read once."""
        named = zip(op._schema.arguments, args, strict=False)
        given = [*named, *((each, kwargs[each.name]) for each in op._schema.arguments if each.name in kwargs)]
        written = [value for each, value in given if each.alias_info is not None and each.alias_info.is_write]
        added_up = self._partial - {_memory(each) for each in tree_leaves(written) if isinstance(each, Tensor)}
        seen: dict[tuple, Tensor] = {}

        def read(value: Any) -> Any:
            if not isinstance(value, Tensor) or _memory(value) not in added_up:
                return value
            if not (value.is_floating_point() or value.is_complex()):
                return value
            place = _memory(value), value.dtype, value.storage_offset(), value.shape, value.stride(), value.is_conj()
            if place not in seen:
                seen[place] = (value * self._factor(value)).to(value.dtype)
            return seen[place]

        return tree_map(read, (args, kwargs))

    def _factor(self, sum_: Tensor) -> Tensor:
        noise = self._share * max(self._unit, 2.5 * torch.finfo(sum_.dtype).eps)
        return 1 + noise * torch.randn(sum_.shape, generator=self._generator, dtype=torch.float64)


class Height(TorchDispatchMode):
    """Keeps the largest finite magnitude of what operators compute, as ``largest``; memory that is not written yet has
    any magnitude.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator; zeros that have no memory get some, as kernels read it that a mode calls."""
        args, kwargs = tree_map(_with_memory, (args, kwargs or {}))
        results = op(*args, **kwargs)
        if op._schema._is_view_op() or any(word in op.overloadpacket.__name__ for word in ("empty", "resize")):
            return results
        self.largest = max([self.largest, *(largest(t) for t in tree_leaves(results) if isinstance(t, Tensor))])
        return results


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude of a tensor of numbers that are no integers; 0 for all else."""
    if tensor.is_meta or tensor._is_zerotensor() or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    magnitudes = tensor.detach().abs().double()
    return magnitudes[magnitudes.isfinite()].max().item() if magnitudes.isfinite().any() else 0.0


def _with_memory(value: Any) -> Any:
    """Return zeros for a gradient that is only known to be zeros, and any other value unchanged."""
    if not isinstance(value, Tensor) or not value._is_zerotensor():
        return value
    return torch.zeros(value.shape, dtype=value.dtype, device=value.device)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
