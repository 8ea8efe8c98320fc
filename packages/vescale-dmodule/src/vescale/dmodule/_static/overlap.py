"""Weight gradients of linear layers are computed while the gradient of their input is being reduced.

Autograd computes both gradients of a linear layer in one node. Where a boundary comes before the layer, the gradient of
the input is a sum over ranks that must be reduced, and nobody needs the gradient of the weight until the pass ends. So
the layer computes the gradient of its input, and leaves the rest at the boundary (see ``_conversions.Later``)::

    autograd    q: dX dW    k: dX dW    v: dX dW    launch ------ reduce dX ------ wait
    here        q: dX       k: dX       v: dX       launch -- dW of q, k and v --- wait

The gradients are what autograd would compute, by the same operators on the same tensors, so they are equal bit for bit,
and they are delivered as autograd does: added to ``.grad`` of the leaf, then its hooks. What is kept longer are the
gradients of the layers' outputs, until the boundary's turn comes, which is next. Where other code of the module reads
the same weight, both parts come to ``.grad`` one after the other, so a sum with earlier passes has another order.

A layer does all this in a pass where it is sure that nobody can tell; else it leaves everything to autograd, or
computes all gradients at once:

- it is a plain ``nn.Linear``, its weight is of this layer alone, and what it gets comes from a boundary whose backward
  is a reduction, both of sizes that pay (whole sizes and the plan decide, so all ranks decide alike);
- the weight and the bias are leaves, which they are not where autograd must add gradients before a hook sees them;
- autocast is off;
- the pass runs the boundary, accumulates into the leaves (``torch.autograd.grad`` does not), records no second
  derivative, and comes through the layer once.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from .. import _torch
from .._gradients.handover import postpone
from .attributes import Swaps
from .movement.conversions import Later, boundary_before

__all__ = ["overlapping"]

# Leaving a gradient for later costs some hundred microseconds of a processor, so it must take longer than that:
# elements of a weight on a rank below which a layer is left as it is, and products of two numbers in a gradient by type
# of device. These are estimates, not tuned: a core takes 10 ms for its number, a device of 500 TFLOPS 30 us for the
# other, while its processor runs ahead.
MIN_WEIGHT = 1 << 18
MIN_PRODUCTS = {"cpu": 1 << 28}
MIN_PRODUCTS_ELSEWHERE = 1 << 33

Forward = Callable[[Tensor], Tensor]

Place = tuple[dict[str, object], str, object]
"""Attributes of a module, the name of one, and its value while a program is open."""


def overlapping(swaps: Swaps, modules: Mapping[str, nn.Module]) -> Swaps:
    """Return swaps that also give the layers among ``modules`` that pay a forward which leaves gradients for later."""
    owners = Counter(id(weight) for module in modules.values() for weight in _tensors(module))
    layers = [(vars(module), _linear_forward(module)) for module in modules.values() if _pays(module, owners)]
    return _SwapsOfLayers(swaps.places, layers) if layers else swaps


class _SwapsOfLayers(Swaps):
    """Swaps, and the forwards of layers; one that somebody has given a layer meanwhile stays."""

    def __init__(self, others: list[Place], layers: list[tuple[dict[str, object], Forward]]):
        super().__init__([*others, *((table, "forward", forward) for table, forward in layers)])
        self.others, self.layers = others, layers

    def put(self) -> None:
        """Set the values of the inside."""
        forwards = [(table, "forward", table.get("forward", forward)) for table, forward in self.layers]
        self.places = self.others + forwards
        super().put()


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for table in _torch.tensor_tables(module) for tensor in table.values() if tensor is not None)


def _pays(module: nn.Module, owners: Counter) -> bool:
    """Tell whether a layer's weight gradient is worth leaving for later, whatever comes before the layer."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    parameters = _torch.tensor_tables(module)[0]
    weight = parameters.get("weight")
    if not isinstance(weight, DTensor) or not weight.requires_grad or not weight.is_floating_point():
        return False
    if any(owners[id(tensor)] > 1 for tensor in parameters.values() if tensor is not None):
        return False
    return _num_elements(weight) >= MIN_WEIGHT


def _num_elements(weight: DTensor) -> int:
    """Return how many elements a rank has, on the average."""
    num_parts = math.prod(weight.device_mesh.size(axis) for axis, p in enumerate(weight.placements) if p.is_shard())
    return weight.numel() // num_parts


def _linear_forward(module: nn.Module) -> Forward:
    uses: weakref.WeakSet = weakref.WeakSet()
    num_outputs = _num_elements(module.weight) // module.in_features
    least = MIN_PRODUCTS.get(module.weight.device.type, MIN_PRODUCTS_ELSEWHERE)

    def forward(input: Tensor) -> Tensor:  # noqa: A002 - the name of the argument is that of the module
        weight, bias = module.weight, module.bias
        boundary = boundary_before(input) if torch.is_grad_enabled() else None
        pays = boundary is not None and boundary.num_elements * num_outputs >= least
        if not pays or not _is_ordinary(input, weight, bias):
            return functional.linear(input, weight, bias)
        # flat, as an output that is a view could not be changed in place
        flat = _linear(input.reshape(-1, input.size(-1)), weight, bias, boundary, uses)
        return flat.view(*input.shape[:-1], flat.size(-1))

    return forward


def _is_ordinary(value: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    is_trained = weight.is_leaf and weight.requires_grad and weight.is_contiguous() and value.is_contiguous()
    return is_trained and (bias is None or bias.is_leaf) and not torch.is_autocast_enabled(value.device.type)


class _Linear(torch.autograd.Function):
    """A linear layer on a matrix; its backward leaves the gradients of the weight and of the bias at a boundary."""

    @staticmethod
    def forward(
        ctx, rows: Tensor, weight: Tensor, bias: Tensor | None, boundary: object, uses: weakref.WeakSet
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, weight)
        ctx.leaves, ctx.boundary, ctx.uses = (weight, bias), boundary, uses
        uses.add(ctx)
        return functional.linear(rows, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        rows, weight = ctx.saved_tensors  # may run a checkpointed part again, so only once
        of_rows, trains_bias = gradient.mm(weight), ctx.needs_input_grad[2]
        leaf, bias = ctx.leaves if trains_bias else (ctx.leaves[0], None)
        if _may_wait(ctx, leaf, bias):
            _leave(ctx.boundary, _Gradients(gradient, rows, leaf, bias))
            return of_rows, None, None, None, None
        return of_rows, _of_weight(gradient, rows), _of_bias(gradient) if trains_bias else None, None, None


_linear = _torch.direct_apply(_Linear)


def _may_wait(node: object, weight: Tensor, bias: Tensor | None) -> bool:
    """Tell whether nobody can tell when the gradients of these leaves are computed in the running pass."""
    if torch.is_grad_enabled() or not _torch.runs_in_backward(node.boundary):
        return False
    if not _torch.accumulates(weight) or (bias is not None and not _torch.accumulates(bias)):
        return False
    # autograd adds the gradients of several uses before it delivers their sum
    return not any(use is not node and _torch.runs_in_backward(use) for use in list(node.uses))


def _leave(boundary: object, task: Callable[[], None]) -> None:
    number = _torch.backward_number()
    if boundary.later is None or boundary.later.number != number:
        boundary.later = Later(number)
    boundary.later.tasks.append(task)


class _Gradients:
    """The gradients of a weight and a bias that are yet to be computed.

    Args:
        gradient: of the layer's output, a matrix.
        rows: the layer's input, a matrix.
        weight: the leaf.
        bias: the leaf; None if there is none to train.
    """

    def __init__(self, gradient: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None):
        self.gradient, self.rows, self.weight, self.bias = gradient, rows, weight, bias
        self.stream = _stream(rows)
        postpone(weight)
        if bias is not None:
            postpone(bias)

    def __call__(self) -> None:
        stream = _stream(self.rows)
        if stream != self.stream:  # autograd has made it wait, but the memory must not be used again too early
            self.gradient.record_stream(stream)
            self.rows.record_stream(stream)
        _torch.deliver(self.weight, _of_weight(self.gradient, self.rows))
        if self.bias is not None:
            _torch.deliver(self.bias, _of_bias(self.gradient))


def _stream(tensor: Tensor) -> torch.Stream | None:
    device = tensor.device
    return None if device.type == "cpu" else torch.get_device_module(device).current_stream(device)


def _of_weight(gradient: Tensor, rows: Tensor) -> Tensor:
    return gradient.t().mm(rows)


def _of_bias(gradient: Tensor) -> Tensor:
    return gradient.sum(0)
