"""Products: every kernel call has the same shape on every layout, and parts of the inner dim are added by the tree.

A kernel adds the terms of one element in an order that it chooses by the shape of the call: of 16 columns it adds
otherwise than of 64. So all three dims are cut in blocks (`blocks.py`), and each kernel call takes one block of each::

    rows          inner        inner         columns         parts of the inner dim        the tree
    [m0 m1 ...] x [k0 k1 ...]  [k0 k1 ...] x [n0 n1 ...]  ->  [k, m, n]  -------------------> [m, n]

A rank computes the blocks that its shards hold. Each mesh axis shards one of the three dims::

    left operand   right operand   parts [k, m, n]
    inner          any             Shard(0): the tree gathers them
    rows           any             Shard(1)
    any            columns         Shard(2)

An operand in other placements is moved to these, which is an implicit redistribution. **Batches** of matrices are cut
along the batch alone, in any placement: each pair of matrices is a product by itself, of matrices that a rank holds
whole. **Convolutions** are cut along the batch, too, one kernel call for each of its blocks.

float16 and bfloat16 are multiplied in float32, in which their products are exact; the sum is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from .._torch import dispatch
from .blocks import block_size, num_blocks_of
from .kernels import batch_products, matrix_products, own
from .laid import Laid, Placements, is_whole_on, mesh_of, sharded_dim
from .tree import add_blocks, widened

__all__ = ["PRODUCTS"]

aten = torch.ops.aten

ROWS, INNER, COLUMNS = range(3)


# ------------------------------------------------------------------------------------------------- matrices


def _matrices(a: Tensor, b: Tensor, num_blocks: int) -> Tensor:
    """Return ``a @ b`` of two matrices, in the dtype of `widened`."""
    mesh = mesh_of((a, b))
    left, right = Laid.of(a, mesh), Laid.of(b, mesh)
    sizes = (*left.shape, right.shape[1])
    units = (block_size(sizes[0], num_blocks), block_size(sizes[1], num_blocks), block_size(sizes[2], num_blocks))
    roles = _whole_roles(left, _roles(left, right), sizes, units)
    left = left.moved(_placed(roles, {ROWS: 0, INNER: 1}))
    right = right.moved(_placed(roles, {COLUMNS: 1, INNER: 0}))
    parts = matrix_products(widened(left.local), widened(right.local), units)
    shape = (num_blocks_of(sizes[INNER], num_blocks), sizes[ROWS], sizes[COLUMNS])
    return _total(left.replaced(parts, shape, _placed(roles, {INNER: 0, ROWS: 1, COLUMNS: 2}))).tensor()


def _roles(left: Laid, right: Laid) -> list[int | None]:
    """Return which of the three dims each mesh axis shards."""
    roles: list[int | None] = []
    for dims in zip(map(sharded_dim, left.placements), map(sharded_dim, right.placements), strict=True):
        if dims[0] == 1 or dims[1] == 0:
            roles.append(INNER)
        elif dims == (0, 1):  # the larger operand stays
            roles.append(ROWS if torch.Size(left.shape).numel() >= torch.Size(right.shape).numel() else COLUMNS)
        else:
            roles.append(ROWS if dims[0] == 0 else COLUMNS if dims[1] == 1 else None)
    return roles


def _whole_roles(left: Laid, roles: list[int | None], sizes: Sequence[int], units: Sequence[int]) -> list[int | None]:
    """Return the roles without those of axes that cut blocks."""
    roles = list(roles)
    for role, (size, unit) in enumerate(zip(sizes, units, strict=True)):
        while not is_whole_on(left.mesh, _placed(roles, {role: 0}), 0, size, unit):
            roles[max(axis for axis, found in enumerate(roles) if found == role)] = None
    return roles


def _placed(roles: Sequence[int | None], dims: dict[int | None, int]) -> Placements:
    return tuple(Shard(dims[role]) if role in dims else Replicate() for role in roles)


def _total(parts: Laid) -> Laid:
    """Return the sum over dim 0, which goes."""
    total = add_blocks(parts, 0)
    dims = [sharded_dim(p) for p in total.placements]
    placements = [Replicate() if dim is None else Shard(dim - 1) for dim in dims]
    return total.replaced(total.local.squeeze(0), total.shape[1:], placements)


# ------------------------------------------------------------------------------------------------- batches


def _batches(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of ``(B, M, K)`` and ``(B, K, N)``, in the dtype of `widened`."""
    mesh = mesh_of((a, b))
    left, right = Laid.of(a, mesh), Laid.of(b, mesh)

    def choose(p: Placement, q: Placement) -> Placement:
        return p if sharded_dim(p) == 0 else q if sharded_dim(q) == 0 else Replicate()

    chosen = [choose(*pair) for pair in zip(left.placements, right.placements, strict=True)]
    left, right = left.moved(chosen), right.moved(chosen)
    products = batch_products(widened(left.local), widened(right.local))
    return left.replaced(products, (*left.shape[:2], right.shape[2])).tensor()


# ------------------------------------------------------------------------------------------------- operators


def _scaled(product: Tensor, added: Tensor, beta: float, alpha: float) -> Tensor:
    """Return ``beta * added + alpha * product`` in the dtype of ``added``."""
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product.to(added.dtype)
    return ((added if beta == 1 else added * beta) + product).to(added.dtype)


def _mm(num_blocks: int, _op: dispatch.Op, self: Tensor, mat2: Tensor) -> Tensor:
    return _matrices(self, mat2, num_blocks).to(self.dtype)


def _addmm(
    num_blocks: int, _op: dispatch.Op, self: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled(_matrices(mat1, mat2, num_blocks), self, beta, alpha)


def _bmm(_num_blocks: int, _op: dispatch.Op, self: Tensor, mat2: Tensor) -> Tensor:
    return _batches(self, mat2).to(self.dtype)


def _baddbmm(
    _num_blocks: int,
    _op: dispatch.Op,
    self: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Tensor:
    return _scaled(_batches(batch1, batch2), self, beta, alpha)


def _mv(num_blocks: int, _op: dispatch.Op, self: Tensor, vec: Tensor) -> Tensor:
    return _matrices(self, vec.unsqueeze(1), num_blocks).squeeze(1).to(self.dtype)


def _addmv(
    num_blocks: int, _op: dispatch.Op, self: Tensor, mat: Tensor, vec: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return _scaled(_matrices(mat, vec.unsqueeze(1), num_blocks).squeeze(1), self, beta, alpha)


# ------------------------------------------------------------------------------------------------- convolutions


def _convolution(
    num_blocks: int,
    op: dispatch.Op,
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    bias: Tensor | None,
    *others: object,
) -> Tensor:
    batch = _cut_batch(num_blocks, input)
    whole = [_whole(tensor, batch) for tensor in (weight, bias)]
    results = [op(*block, *whole, *others) for block in _blocks([batch], num_blocks)]
    shape = op(_like(input), _like(weight), None, *others).shape
    return batch.replaced(_joined(results), shape).tensor()


def _convolution_backward(
    num_blocks: int,
    op: dispatch.Op,
    grad_output: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor,
    *others: object,
) -> tuple[Tensor | None, ...]:
    batch = _cut_batch(num_blocks, input)
    grad = Laid.of(grad_output, batch.mesh).moved(batch.placements)
    whole = _whole(weight, batch)
    results = [op(*block, whole, *others) for block in _blocks([grad, batch], num_blocks)]
    of_input, *of_rest = zip(*results, strict=True)
    first = None if of_input[0] is None else batch.replaced(_joined(of_input), input.shape).tensor()
    return (first, *(_added(batch, parts, num_blocks) for parts in of_rest))


def _added(batch: Laid, parts: Sequence[Tensor | None], num_blocks: int) -> Tensor | None:
    if parts[0] is None:
        return None
    stacked = torch.stack([widened(part) for part in parts])
    stacked = stacked if len(batch.local) else stacked[:0]
    shape = (num_blocks_of(batch.shape[0], num_blocks), *parts[0].shape)
    return _total(batch.replaced(stacked, shape)).tensor().to(parts[0].dtype)


def _cut_batch(num_blocks: int, tensor: Tensor) -> Laid:
    """Return a tensor that is sharded in blocks of dim 0 alone."""
    return Laid.of(tensor, mesh_of([tensor])).gathered(range(1, tensor.ndim)).in_blocks(0, num_blocks)


def _whole(tensor: Tensor | None, beside: Laid) -> Tensor | None:
    """Return a tensor in memory of its own, which every rank has whole."""
    return None if tensor is None else own(Laid.of(tensor, beside.mesh).gathered().local)


def _blocks(batch: Sequence[Laid], num_blocks: int) -> list[list[Tensor]]:
    size = block_size(batch[0].shape[0], num_blocks)
    return [[own(part) for part in parts] for parts in zip(*(x.local.split(size) for x in batch), strict=True)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.contiguous() for part in parts])


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


PRODUCTS: dict[dispatch.Op, Callable] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.baddbmm.default: _baddbmm,
    aten.mv.default: _mv,
    aten.addmv.default: _addmv,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
"""Forms by operator; they take the number of blocks and the operator before its arguments."""
