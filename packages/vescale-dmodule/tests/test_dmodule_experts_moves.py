"""Experts that change their rank between steps take gradients and optimizer state along: training stays the same."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.dmodule import (
    Experts,
    LoadBalancingAllocator,
    StaticAllocator,
    parallelize_module,
    rebalance_experts,
    restore_experts,
)
from vescale.dtensor import init_device_mesh
from vescale_testing import ranks

NUM_EXPERTS, HIDDEN, TOP_K, TOKENS_PER_STEP = 8, 6, 3, 24
EXCHANGED, MASKED = (Shard(0), Shard(0)), (Shard(0), Replicate())  # over data, over experts


class Experts8(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, 5, HIDDEN) / 3)
        self.bias = nn.Parameter(torch.randn(NUM_EXPERTS))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, 5) / 3)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = torch.where(top_k_index == expert)
            if len(token):
                inner = torch.tanh(hidden_states[token] @ self.up[expert].T + self.bias[expert])
                out = out.index_add(0, token, inner @ self.down[expert].T * top_k_weights[token, choice, None])
        return out


class Moe(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = Experts8()

    def forward(self, x, preference):
        weights, index = torch.topk(torch.softmax(self.router(x) + preference, dim=-1), TOP_K)
        return x + self.experts(x, index, weights)


def build(mesh, tokens, allocator):
    """A model whose experts are spread over the second axis, with its tokens in a layout."""
    torch.manual_seed(0)
    entry = Experts({"ep": Shard(0)}, allocator=allocator)
    forward = {"input": {"x": tokens}, "output": [(Replicate(), Replicate())]}
    model = parallelize_module(Moe().double(), mesh, {"expert": {"experts": entry}, "forward": forward})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1, foreach=False)


def step(model, optimizer, number, *, update=True):
    """Train on a batch that depends on the number of the step."""
    generator = torch.Generator().manual_seed(number)
    batch = torch.randn(TOKENS_PER_STEP, HIDDEN, generator=generator).double()
    hot = torch.tensor([[3.0, 3.0, 2.0, 2.0, 0, 0, 0, 0], [0, 2.0, 0, 0, 0, 0, 3.0, 4.0]])[number // 3 % 2].double()
    output = model(batch, hot)
    (output.square().sum() / TOKENS_PER_STEP).backward()
    if update:
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return output.detach()


def train(mesh, tokens, allocator, *, rebalanced_after=(), leaves_state=False):
    """Return outputs, allocations on the way, and, restored, parameters and optimizer state."""
    model, optimizer = build(mesh, tokens, allocator)
    outputs, moved = [], []
    for number in range(8):
        outputs.append(step(model, optimizer, number))
        if number in rebalanced_after:
            before = [(t, t.clone()) for state in optimizer.state.values() for t in state.values()]
            moved.append(rebalance_experts(model, optimizer))
            for tensor, value in before if leaves_state else ():
                tensor.copy_(value)
    restore_experts(model, optimizer)
    tensors = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        tensors.update({f"{name} {key}": value for key, value in optimizer.state[parameter].items()})
    return outputs, moved, {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}


def assert_equal_runs(run, other, *, bound):
    for name, value in other[2].items():
        torch.testing.assert_close(run[2][name], value, rtol=bound, atol=bound, msg=name)
    for output, expected in zip(run[0], other[0], strict=True):
        torch.testing.assert_close(output, expected, rtol=bound, atol=bound)


@ranks(4)
def test_moving_experts_changes_nothing():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    balancing = LoadBalancingAllocator(threshold=0.0)
    for tokens, bound in ((EXCHANGED, 0.0), (MASKED, 1e-12)):  # exchanged: bit for bit
        still = train(mesh, tokens, StaticAllocator(), rebalanced_after=(1, 4))
        assert still[1] == [{}, {}]
        moving = train(mesh, tokens, balancing, rebalanced_after=(1, 4))
        assert all(list(moved) == ["experts"] for moved in moving[1])
        assert moving[1][0] != moving[1][1]
        assert_equal_runs(moving, still, bound=bound)

    without_state = train(mesh, MASKED, balancing, rebalanced_after=(1, 4), leaves_state=True)
    with pytest.raises(AssertionError):
        assert_equal_runs(without_state, still, bound=1e-10)


@ranks(4)
def test_loads_are_counted_once_and_gradients_and_copies_stay_right():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    for tokens in (EXCHANGED, MASKED):
        seen = []

        class Asked(LoadBalancingAllocator):
            def allocate(self, loads, current, num_ranks):
                seen.append((sum(loads), num_ranks))  # noqa: B023
                return super().allocate(loads, current, num_ranks)

        model, optimizer = build(mesh, tokens, Asked(threshold=0.0))
        step(model, optimizer, 0)
        other = copy.deepcopy(model)
        before = step(model, optimizer, 1, update=False)
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        assert list(rebalance_experts(model, optimizer)) == ["experts"]
        assert seen == [(2 * TOKENS_PER_STEP * TOP_K, 2)]
        after = step(model, optimizer, 1, update=False)  # accumulates into gradients that moved along
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
        restore_experts(model, optimizer)
        for name, parameter in model.named_parameters():
            whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (parameter.grad, 2 * grads[name])]
            torch.testing.assert_close(*whole, rtol=1e-10, atol=1e-12, msg=name)
        same = step(other, None, 1, update=False)  # a copy from before has its own order of experts
        torch.testing.assert_close(same, before, rtol=1e-12, atol=1e-12)
        rebalance_experts(model, optimizer)
        assert seen[1] == (TOKENS_PER_STEP * TOP_K, 2)  # counted anew, of `model` alone


def train_plainly(model, *, rebalanced_after=()):
    """Train a model that takes the whole batch, and return its losses."""
    optimizer, losses, moved = torch.optim.AdamW(model.parameters(), lr=0.1), [], 0
    for number in range(6):
        batch = torch.randn(TOKENS_PER_STEP, HIDDEN, generator=torch.Generator().manual_seed(number)).double()
        hot = torch.tensor([3.0, 3.0, 2.0, 2.0, 0, 0, 0, 0]).double()
        loss = model(batch, hot).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if number in rebalanced_after:
            moved += len(rebalance_experts(model, optimizer))
    return torch.tensor(losses), moved


@ranks(2)
def test_a_parallel_model_in_every_mode():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    reference = Moe().double()
    expected, _ = train_plainly(copy.deepcopy(reference))
    for mode in ("eager", "static"):
        for tokens in (Shard(0), Replicate()):
            entry = Experts({"ep": Shard(0)}, allocator=LoadBalancingAllocator(threshold=0.0))
            forward = {"input": {"x": {"ep": tokens}}, "output": [{"ep": Replicate()}]}
            plan = {"expert": {"experts": entry}, "forward": forward}
            model = parallelize_module(copy.deepcopy(reference), mesh, plan, mode=mode)
            losses, moved = train_plainly(model, rebalanced_after=(1, 3))
            assert moved > 0
            torch.testing.assert_close(losses, expected, rtol=1e-10, atol=0, msg=f"{mode} {tokens}")


class Chosen(LoadBalancingAllocator):
    """Returns an allocation that a test sets."""

    allocation = None

    def allocate(self, loads, current, num_ranks):
        return self.allocation or super().allocate(loads, current, num_ranks)


@ranks(2)
def test_what_is_refused():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep"))
    model, optimizer = build(mesh, EXCHANGED, Chosen(threshold=0.0))
    step(model, optimizer, 0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert rebalance_experts(model, optimizer)
    text = "the experts of this Experts8 were moved by rebalance_experts, so its tensors are not in the order of one"
    for call in (model.state_dict, lambda: model.load_state_dict(before)):
        with pytest.raises(RuntimeError, match=text):
            call()

    other = torch.optim.SGD(model.router.parameters())
    with pytest.raises(ValueError, match=r"SGD does not hold 'experts.up', so its state would stay behind"):
        rebalance_experts(model, other)
    state = optimizer.state[model.experts.up]
    state["factor"] = torch.zeros(NUM_EXPERTS, 5)
    text = r"optimizer state 'factor' of 'experts.up' is a Tensor of shape \(8, 5\), which cannot be moved by expert"
    with pytest.raises(TypeError, match=text):
        rebalance_experts(model, optimizer)
    del state["factor"]

    rank = torch.distributed.get_rank()
    Chosen.allocation = tuple(range(8)) if rank else (4, 5, 6, 7, 0, 1, 2, 3)
    differ = "experts 'experts': the allocation of Chosen differs between ranks: "
    with pytest.raises(ValueError, match=differ + r"rank 0 has '\(4, 5, 6, 7, 0, 1, 2, 3\)', ranks? 1"):
        rebalance_experts(model, optimizer)
    for wrong, text in (
        ((1, 0, *range(2, 8)), "expected experts of one rank in ascending order"),
        ((0, 1), "expected a permutation of the slots"),
    ):
        Chosen.allocation = wrong if rank else tuple(range(8))
        with pytest.raises(ValueError, match=text if rank else differ):
            rebalance_experts(model, optimizer)

    assert restore_experts(model, optimizer) == {"experts": tuple(range(8))}
    assert restore_experts(model, optimizer) == {}
    for name, tensor in model.state_dict().items():
        same = tensor == before[name]
        assert (same.to_local() if isinstance(same, DTensor) else same).all()
