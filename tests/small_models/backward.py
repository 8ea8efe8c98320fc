"""Code that the model runs in backward: functions of its own, hooks, gradients that are a part of the loss."""

# ruff: noqa: ARG004 - signatures are those of autograd.Function

from __future__ import annotations

from typing import Any

import torch
from small import WIDTH, Small, layer, loss
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

Function = torch.autograd.Function


def identity(backward: Any) -> type[Function]:
    """Return a function that changes gradients alone."""

    class Identity(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.num_rows = len(x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return backward(ctx, gradient)

    return Identity


SCALED_BY_ROWS = identity(lambda ctx, gradient: gradient * ctx.num_rows)
CENTERED = identity(lambda _, gradient: gradient - gradient.mean(0, keepdim=True))
NORMALIZED = identity(lambda _, gradient: gradient / gradient.norm())
REVERSED = identity(lambda _, gradient: -0.3 * gradient)
CLAMPED = identity(lambda _, gradient: gradient.clamp(-1e-3, 1e-3))
NOISY = identity(lambda _, gradient: gradient * torch.bernoulli(torch.full_like(gradient, 0.5)))


@layer()
def gradient_times_rows(_: Small, x: Tensor) -> Tensor:
    return SCALED_BY_ROWS.apply(x)


@layer()
def centered_gradient(_: Small, x: Tensor) -> Tensor:
    return CENTERED.apply(x)


@layer()
def normalized_gradient(_: Small, x: Tensor) -> Tensor:
    return NORMALIZED.apply(x)


@layer()
def reversed_gradient(_: Small, x: Tensor) -> Tensor:
    return REVERSED.apply(x)


@layer()
def noisy_gradient(_: Small, x: Tensor) -> Tensor:
    return NOISY.apply(x)


@layer()
def centered_gradient_that_is_recomputed(_: Small, x: Tensor) -> Tensor:
    return checkpoint(lambda x: CENTERED.apply(x).tanh(), x, use_reentrant=False)


@layer()
def clamped_gradient_of_a_weight(model: Small, x: Tensor) -> Tensor:
    return F.linear(x, CLAMPED.apply(model.out.weight))


class DropFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = (torch.rand_like(x) > 0.3).to(x.dtype) / 0.7
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


@layer()
def dropout_function(_: Small, x: Tensor) -> Tensor:
    return DropFunction.apply(x)


class SignFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (ctx.saved_tensors[0].abs() < 1)


@layer()
def straight_through(_: Small, x: Tensor) -> Tensor:
    return SignFunction.apply(x)


class FusedCrossEntropy(Function):
    """It computes the gradient in its forward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, *, is_mean: bool) -> Tensor:
        chances = x.softmax(-1)
        gradient = chances - F.one_hot(target, x.shape[-1]).to(x.dtype)
        each = -chances.gather(1, target[:, None]).log()
        ctx.save_for_backward(gradient / len(x) if is_mean else gradient)
        return each.mean() if is_mean else each.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


class FusedMean(FusedCrossEntropy):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        return FusedCrossEntropy.forward(ctx, x, target, is_mean=True)


class FusedSum(FusedCrossEntropy):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        return FusedCrossEntropy.forward(ctx, x, target, is_mean=False)


@loss()
def fused_mean(_: Small, y: Tensor) -> Tensor:
    rows = y.flatten(0, 1)
    return FusedMean.apply(rows, rows.detach().argmin(-1))


@loss()
def fused_sum(_: Small, y: Tensor) -> Tensor:
    rows = y.flatten(0, 1)
    return FusedSum.apply(rows, rows.detach().argmin(-1))


class LinearFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, 1)
        return gradient @ weight, rows.T @ x.flatten(0, 1), rows.sum(0)


@layer()
def linear_function(model: Small, x: Tensor) -> Tensor:
    return LinearFunction.apply(x, model.out.weight, model.out.bias)


class MeanGradientFunction(Function):
    """Its gradient of the weight is a mean over rows, which is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).T @ x.flatten(0, 1) / len(x)


@layer()
def mean_gradient_of_a_weight(model: Small, x: Tensor) -> Tensor:
    return MeanGradientFunction.apply(x, model.out.weight)


class InPlaceFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@layer()
def function_in_place(_: Small, x: Tensor) -> Tensor:
    return InPlaceFunction.apply(x.clone()) + x


class SetUpFunction(Function):
    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


@layer()
def function_with_a_set_up(_: Small, x: Tensor) -> Tensor:
    return SetUpFunction.apply(x, 3.0)


class QuantizeFunction(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        scale = weight.abs().max() / 7
        return (weight / scale).round() * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


@layer()
def quantized_weight(model: Small, x: Tensor) -> Tensor:
    return F.linear(x, QuantizeFunction.apply(model.out.weight))


class NormFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        centered = x - x.mean((0, 1))
        variance = (centered * centered).mean((0, 1))
        found = centered / (variance + 1e-5).sqrt()
        ctx.save_for_backward(found, variance)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found, variance = ctx.saved_tensors
        mean = gradient.mean((0, 1)) + found * (gradient * found).mean((0, 1))
        return (gradient - mean) / (variance + 1e-5).sqrt()


@layer()
def batch_norm_function(_: Small, x: Tensor) -> Tensor:
    return NormFunction.apply(x)


class RecomputingFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sigmoid() * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x.sigmoid() * x
        return torch.autograd.grad(y, x, gradient)[0]


@layer()
def function_that_recomputes(_: Small, x: Tensor) -> Tensor:
    return RecomputingFunction.apply(x)


def if_it_requires_a_gradient(x: Tensor, hook: Any) -> Tensor:
    if x.requires_grad:
        x.register_hook(hook)
    return x


@layer()
def hook_that_draws(_: Small, x: Tensor) -> Tensor:
    return if_it_requires_a_gradient(x, lambda g: g * torch.bernoulli(torch.full_like(g, 0.5)))


@layer()
def hook_that_centers(_: Small, x: Tensor) -> Tensor:
    return if_it_requires_a_gradient(x, lambda g: g - g.mean(0))


def _without_mean(_module: Any, inputs: tuple, _outputs: tuple) -> tuple:
    return tuple(None if gradient is None else gradient - gradient.mean(0) for gradient in inputs)


@layer(lambda model: model.lift.register_full_backward_hook(_without_mean))
def backward_hook_of_a_module(model: Small, x: Tensor) -> Tensor:
    return model.lift(x)


def _with_noise(_module: Any, outputs: tuple) -> tuple:
    return (outputs[0] * torch.bernoulli(torch.full_like(outputs[0], 0.5)),)


@layer(lambda model: model.out.register_full_backward_pre_hook(_with_noise))
def backward_pre_hook_of_a_module(_: Small, x: Tensor) -> Tensor:
    return x


@layer(lambda model: model.out.weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2)))
def hook_of_a_weight_that_clamps(_: Small, x: Tensor) -> Tensor:
    return x


@layer(lambda model: model.out.weight.register_hook(lambda gradient: gradient * 0.1))
def hook_of_a_weight_that_scales(_: Small, x: Tensor) -> Tensor:
    return x


def _penalty(model: Small, x: Tensor, *, of_mean: bool) -> Tensor:
    x = x.detach().requires_grad_()
    y = model.out(model.lift(x).tanh())
    (gradient,) = torch.autograd.grad(y.mean() if of_mean else y.sum(), x, create_graph=True)
    return (gradient.flatten(1).norm(dim=1) - 1).square().mean()


@layer()
def gradient_penalty(model: Small, x: Tensor) -> Tensor:
    return x + _penalty(model, x, of_mean=False)


@layer()
def gradient_penalty_of_a_mean(model: Small, x: Tensor) -> Tensor:
    return x + _penalty(model, x, of_mean=True)


@layer(lambda model: setattr(model, "bias", torch.nn.Parameter(torch.zeros(WIDTH))))
def bias_of_the_model(model: Small, x: Tensor) -> Tensor:
    return CENTERED.apply(x + model.bias)
