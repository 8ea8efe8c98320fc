"""A transposed tensor keeps its memory order when it is redistributed: the views that its strides allow are there."""

import pytest
import torch
from torch.nn import functional

from vescale.dtensor import (
    DTensor,
    InterleavedShard,
    Partial,
    Replicate,
    Shard,
    disabled,
    distribute_tensor,
    init_device_mesh,
)
from vescale_testing import ranks

VIEWS = {
    "redistributed": lambda x: moved(x.t()).t().view(-1),
    "multiplied": lambda x: moved(x.t() * 1.5).t().view(-1),
    "a function": lambda x: x.t().abs().t().view(-1),
    "a product": lambda x: (x @ x.t()).t().relu().t().view(-1),
    "three dims": lambda x: moved(x[None].permute(2, 0, 1)).permute(1, 2, 0).view(-1),
    "with ones": lambda x: torch.kron(x[:1].t(), x[:1].t()),
    "softplus": lambda x: turned(functional.softplus(x[None].repeat(2, 1, 1) @ x.t())),
    "hardtanh": lambda x: turned(functional.hardtanh(x[None].repeat(2, 1, 1) @ x.t())),
    "copysign": lambda x: torch.copysign(x.t() * 2, (x * 3).t().contiguous()).t().contiguous().view(-1),
    "sorted": lambda x: x.t().sort(1).values.t().view(-1),
}


BROADCAST = {
    "logical_or": torch.logical_or,
    "logaddexp": torch.logaddexp,
    "heaviside": torch.heaviside,
    "ldexp": torch.ldexp,
}
OF_TWO = {
    "xlogy": torch.xlogy,
    "xlog1py": torch.special.xlog1py,
    "copysign": torch.copysign,
    "floor_divide": torch.floor_divide,
    "div": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "pow": lambda x, _: torch.pow(2, x),
    "dropout": lambda x, y: torch.ops.aten.native_dropout_backward(x, y > 0.5, 2.0),
    "hardswish": torch.ops.aten.hardswish_backward,
    "log_sigmoid": lambda x, _: torch.ops.aten.log_sigmoid_forward(x)[0],
    "log_softmax": lambda x, _: torch.log_softmax(x, -1),
    "log_softmax_backward": lambda x, y: torch.ops.aten._log_softmax_backward_data(x, y, 1, x.dtype),
    "mse_loss": lambda x, y: torch.ops.aten.mse_loss_backward(x.sum(), x, y, 1),
    "huber_loss": lambda x, y: torch.ops.aten.huber_loss_backward(x, x, y, 0, 0.5),
    "cross_entropy": lambda x, y: functional.binary_cross_entropy(x, y, reduction="none"),
    "one_hot": lambda x, _: functional.one_hot((3 * x).long(), 4),
    "products": lambda x, y: (x @ y.mT).add(1).add(y @ x.mT),
    "in another dtype": lambda x, _: x.to(torch.float32, memory_format=torch.contiguous_format),
    "and in its order": lambda x, _: x.to(torch.float32),
}


def turned(x):
    """Return a view of a turned tensor: its gradient has another memory order than the tensor."""
    return x.transpose(1, 2).reshape(2, -1)


def moved(x):
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) if isinstance(x, DTensor) else x


@ranks(4)
def test_equal_one_device(assert_equals_one_device):
    mesh = init_device_mesh("cpu", (4,))
    operand = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for view in VIEWS.values():
        assert assert_equals_one_device(view, [operand], mesh) == 4


@ranks(2)
def test_strides_are_those_of_one_device():
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(12.0).view(3, 4)
    for placement in (Shard(0), Shard(1), Partial()):
        x = DTensor.from_local(whole, mesh, [placement]).t()
        assert x.full_tensor().stride() == x.stride() == torch.empty(x.shape[::-1]).t().stride()


@ranks(2)
def test_own_placements_are_left_and_entered_in_memory_order():
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(24.0).view(8, 3)
    replicated, interleaved = [Replicate()], [InterleavedShard(0, 2)]
    left = distribute_tensor(whole, mesh, interleaved).t().redistribute(placements=replicated)
    assert torch.equal(left.t().view(-1).full_tensor(), whole.view(-1))
    turned_over = distribute_tensor(whole.t(), mesh, [InterleavedShard(1, 2)])
    for entered in (turned_over, left.redistribute(placements=[InterleavedShard(1, 2)])):
        assert entered.to_local().t().is_contiguous()
        assert torch.equal(entered.full_tensor(), whole.t())


def strides_and_draws(function, *operands):
    """Return the strides of a result and numbers that are drawn in its memory order."""
    torch.manual_seed(3)
    result = function(*operands)
    drawn = torch.rand_like(result, dtype=torch.float64)
    return result.stride(), drawn.full_tensor() if isinstance(drawn, DTensor) else drawn


def check_order(functions, wholes, placements):
    mesh = init_device_mesh("cpu", (2,))
    operands = [distribute_tensor(whole.t().contiguous(), mesh, placements).t() for whole in wholes]
    for name, function in functions.items():
        for given, expected in ((operands, wholes), (operands[::-1], wholes[::-1])):
            strides, drawn = strides_and_draws(function, *given)
            wanted_strides, wanted = strides_and_draws(function, *expected)
            assert strides == wanted_strides, (name, placements, strides, wanted_strides)
            assert torch.equal(drawn, wanted), (name, placements)


def turned_numbers(*shape):
    return torch.rand(shape[::-1], dtype=torch.float64, generator=torch.Generator().manual_seed(2)).t()


@ranks(2)
@pytest.mark.parametrize("size", [1, 40])  # the second is more than what a kernel is tried with
def test_draws_follow_the_order_of_the_kernel(size):
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        check_order(OF_TWO, [turned_numbers(4 * size, 3 * size)] * 2, placements)


@ranks(2)
def test_draws_follow_the_order_of_broadcast_results():
    mesh = init_device_mesh("cpu", (2,))
    for sizes in ((3, 4), (50, 80)):
        first, second = turned_numbers(*sizes)[:, None].expand(-1, 1, -1), turned_numbers(*sizes)
        x, y = (DTensor.from_local(whole, mesh, [Replicate()]) for whole in (first, second))
        for name, function in BROADCAST.items():
            given = (x, y.long()) if name == "ldexp" else (x, y)
            wanted = function(first, second.long() if name == "ldexp" else second)
            assert function(*given).stride() == wanted.stride(), (name, sizes)


def product(x):
    return x[:, None, :, None] * x[None, :, None, :]


BROADCAST_SHARDS = {
    "a product": lambda x: product(x),
    "a list": lambda x: torch._foreach_mul([x[:, None, :, None]], [x[None, :, None, :]])[0],
    "expanded": lambda x: x.expand(3, *x.shape).permute(1, 0, 2).exp(),
    "indexed": lambda x: x.expand(2, *x.shape)[:, :, [0, 0]],
    "a sum of replicas": lambda x: x[:, None] + moved(x)[None, :, :1],
}


def shard_is_in_order(x):
    local = x.to_local()
    dims = [dim for dim, size in enumerate(local.shape) if size > 1]
    return sorted(dims, key=lambda dim: -local.stride(dim)) == sorted(dims, key=lambda dim: -x.stride(dim))


@ranks(3)
def test_shards_have_the_order_of_the_tensor():
    mesh = init_device_mesh("cpu", (3,))
    for size in (2, 3, 4, 5):
        for whole in (turned_numbers(size, 3), turned_numbers(3, size)):
            for placement in (Shard(0), Shard(1)):
                x = distribute_tensor(whole.t().contiguous(), mesh, [placement]).t()
                for name, function in BROADCAST_SHARDS.items():
                    for _ in range(2):  # the second result may follow a cached decision
                        result, expected = function(x), function(whole)
                        assert torch.equal(result.full_tensor(), expected), (name, whole.shape, placement)
                        assert shard_is_in_order(result), (name, whole.shape, placement)


@ranks(2)
def test_a_shard_of_one_row_is_in_another_order_in_stock_torch():
    x = distribute_tensor(turned_numbers(2, 2).t().contiguous(), init_device_mesh("cpu", (2,)), [Shard(1)]).t()
    with disabled("operators"):
        assert not shard_is_in_order(product(x))
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            product(x).view(4, 4)
    result = product(x)
    assert shard_is_in_order(result)
    result.view(4, 4)[0].mul_(2)  # the view has the memory of the result
    wanted = product(x.full_tensor())
    wanted[0, 0].mul_(2)
    assert torch.equal(result.full_tensor(), wanted)


@ranks(2)
def test_stock_torch_reports_another_order():
    x = distribute_tensor(turned_numbers(4, 3), init_device_mesh("cpu", (2,)), [Replicate()])
    with disabled("operators"):
        assert torch.copysign(x, x[0, 0]).stride() == (3, 1)
    assert torch.copysign(x, x[0, 0]).stride() == x.stride() == (1, 4)


@ranks(3)
def test_a_shard_has_no_gaps_where_padding_was():
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(12.0, dtype=torch.float64).view(6, 2)
    for x, expected in (
        (distribute_tensor(whole, mesh, [Shard(1)]), whole.view(-1)),
        (distribute_tensor(whole[:, None], mesh, [Shard(2)]).expand(6, 5, 2), whole[:, None].repeat(1, 5, 1).view(-1)),
    ):
        with disabled(), pytest.raises(RuntimeError, match="view size is not compatible"):
            x.redistribute(placements=[Shard(0)]).to_local().view(-1)
        shard = x.redistribute(placements=[Shard(0)])
        assert shard.to_local().is_contiguous()
        assert torch.equal(shard.full_tensor().view(-1), expected)


@ranks(2)
def test_stock_torch_fails():
    x = distribute_tensor(torch.ones(3, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with disabled(), pytest.raises(RuntimeError, match="view size is not compatible"):
        VIEWS["redistributed"](x)
