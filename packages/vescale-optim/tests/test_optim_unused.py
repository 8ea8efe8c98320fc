"""Parameters that get no gradient: on some ranks they count as zero, on all ranks they keep None, as in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import halved, ranks, run_ranks


class Branches(nn.Module):
    """`odd` is used by odd ranks (in one process: by the second half of the batch), `never` by no rank."""

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(3, 3)
        self.odd = nn.Linear(3, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, x, use_odd):
        hidden = self.always(x)
        return self.odd(hidden) if use_odd else hidden


def build():
    torch.manual_seed(0)
    return Branches().double()


def halves():
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64).chunk(2)


def one_process(steps):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(steps):
        even, odd = halves()
        ((model(even, False).square().mean() + model(odd, True).square().mean()) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


def on_two_ranks(zero, steps, **kwargs):
    model = DDP(
        build(),
        init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)),
        zero=zero,
        bucket_bytes=100,
        per_rank=True,
        **kwargs,
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, weight_decay=0.5)
    for _ in range(steps):
        model(halves()[dist.get_rank()], dist.get_rank() == 1).square().mean().backward()
        assert model.odd.weight.grad is not None
        assert model.never.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    return {k: v.clone() for k, v in model.state_dict().items()}


@halved
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_the_result_is_that_of_one_process(zero, overlap):
    expected = one_process(3)
    for actual in run_ranks(on_two_ranks, 2, zero, 3, overlap=overlap):
        for fqn, value in expected.items():
            torch.testing.assert_close(actual[fqn], value, rtol=1e-12, atol=1e-14)
    assert torch.equal(expected["never.weight"], build().never.weight)  # weight decay has not touched it


@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_a_gradient_of_zeros_would_not_be_the_same_as_none(zero):
    model = DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, weight_decay=0.5)
    (model(halves()[0], True).square().mean() + 0 * model.never.weight.sum()).backward()
    optimizer.step()
    assert not torch.equal(model.never.weight, build().never.weight)


@ranks(2)
def test_without_the_search_a_missing_gradient_is_an_error_and_nothing_hangs():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(build(), mesh, find_unused_parameters=False, per_rank=True)
    names = r"\['never.bias', 'never.weight'(, 'odd.bias', 'odd.weight')?\]"
    with pytest.raises(RuntimeError, match=rf"got no gradient on rank \d \(axis dp\(\d of 2\)\): {names}.*freeze them"):
        model(halves()[dist.get_rank()], dist.get_rank() == 1).square().mean().backward()


@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_what_was_accumulated_before_counts_where_the_last_backward_brings_nothing(zero):
    model = DDP(build(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), zero=zero, bucket_bytes=100)
    x = halves()[0]
    with model.no_sync():
        model(x, True).square().mean().backward()
    model(x, False).square().mean().backward()
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=1.0)
    optimizer.step()

    expected = build()
    (expected(x, True).square().mean() + expected(x, False).square().mean()).backward()
    torch.optim.SGD(expected.parameters(), lr=1.0).step()
    for fqn, value in expected.state_dict().items():
        torch.testing.assert_close(model.state_dict()[fqn], value, rtol=1e-12, atol=1e-14)


@ranks(2)
def test_a_parameter_unfrozen_later_is_an_error():
    module = build()
    module.never.requires_grad_(False)
    model = DDP(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    module.never.requires_grad_(True)
    with pytest.raises(
        RuntimeError, match=r"were frozen when DDP was built .*'never.weight'.*before wrapping the module"
    ):
        model(halves()[0], True).square().mean().backward()


class WithoutGradient(torch.autograd.Function):
    """The identity, without a gradient for its input."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, _grad):
        return None


class HalfBlind(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.unseen = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.seen(x) + nn.functional.linear(x, WithoutGradient.apply(self.unseen.weight))


@pytest.mark.parametrize("zero", [0, 1, 2])
@ranks(2)
def test_a_function_without_a_gradient_leaves_the_parameter_unused(zero):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    plain = HalfBlind()
    model = DDP(copy.deepcopy(plain), mesh["dp"], zero=zero)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1)
    expected = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for runner, stepper in ((plain, expected), (model, optimizer)):
        runner(torch.ones(2, 4)).sum().backward()
        stepper.step()
    for name, value in plain.named_parameters():
        assert torch.equal(dict(model.module.named_parameters())[name], value), name
