"""State that is kept in fewer bits gives what a program gives that rounds and widens it around every step by hand."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import run_ranks

BF16 = torch.bfloat16
NUM_STEPS = 4


class Lion(torch.optim.Optimizer):
    """A user's optimizer that counts its steps in the optimizer, in groups and in parameters."""

    def __init__(self, params, lr=1e-3, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "num_steps": 0})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        self.num_steps += 1
        for group in self.param_groups:
            group["num_steps"] += 1
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                mean = state.setdefault("exp_avg", torch.zeros_like(param))
                state["seen"] = state.get("seen", torch.zeros_like(param, dtype=torch.int32)) + 1
                assert mean.dtype == param.dtype
                mean.lerp_(param.grad, 1 - group["beta"])
                param.add_(mean.sign(), alpha=-group["lr"] / self.num_steps)


def build(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.3)))
    return model.to(dtype)


def gradient_of(param, step):
    return torch.randn(param.shape, generator=torch.Generator().manual_seed(step + 10 * param.numel())).to(param.dtype)


def backward(model, step, scale=1.0):
    """Leave gradients that do not depend on parameters, so that ranks and one process have the same bits."""
    sum((p * gradient_of(p, step) * scale).sum() for p in model.parameters()).backward()


def groups_of(model):
    small = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": small, "lr": 0.02}, {"params": [p for p in model.parameters() if p.ndim == 2]}]


def dtype_of(state_dtype, name):
    return state_dtype.get(name) if isinstance(state_dtype, dict) else state_dtype


def convert_state(optimizer, convert, state_dtype):
    for param, entries in optimizer.state.items():
        for name, value in entries.items():
            narrow = dtype_of(state_dtype, name)
            if narrow and param.numel() > 1 and value.shape == param.shape and value.is_floating_point():
                entries[name] = convert(param, value, narrow)


def one_process(optimizer_class, settings, state_dtype, *, steps=range(NUM_STEPS), dtype=torch.float32):
    """Train with a torch optimizer, whose state is widened before and rounded after every step."""
    model = build(dtype)
    named = optimizer_class is Muon
    params = list(model.named_parameters()) if named else groups_of(model)
    optimizer = optimizer_class(params, **copy.deepcopy(settings))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        backward(model, step)
        convert_state(optimizer, lambda param, value, _narrow: value.to(param.dtype), state_dtype)
        optimizer.step()
        convert_state(optimizer, lambda _param, value, narrow: value.to(narrow), state_dtype)
        optimizer.zero_grad()
        scheduler.step()
    by_fqn = {fqn: optimizer.state[p] for fqn, p in model.named_parameters()}
    return {fqn: p.detach() for fqn, p in model.named_parameters()}, by_fqn


def wrapped(zero, dtype=torch.float32):
    if zero is None:
        return build(dtype)
    if zero == "hybrid":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        return DDP(build(dtype), mesh, zero=2, bucket_bytes=100)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DDP(build(dtype), mesh, zero=zero, bucket_bytes=100)


def values_of(model):
    if not isinstance(model, DDP):
        return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    with model.unsharded():
        return {fqn: p.detach().clone() for fqn, p in model.module.named_parameters()}


def build_optimizer(optimizer_class, settings, model, state_dtype, **more):
    groups = None if optimizer_class is Muon else groups_of(model)
    return DistributedOptimizer(
        optimizer_class, model=model, param_groups=groups, state_dtype=state_dtype, **settings, **more
    )


def train(model, optimizer, steps=range(NUM_STEPS)):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in steps:
        with model.unsharded() if isinstance(model, DDP) and model.zero == 3 else torch.enable_grad():
            backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return values_of(model)


ADAMW = {"lr": 0.01, "amsgrad": True}
CASES = [
    (torch.optim.AdamW, ADAMW, BF16, (None, 0, 1, 2, 3, "hybrid")),
    (torch.optim.AdamW, {**ADAMW, "foreach": True}, BF16, (0, 2)),
    (torch.optim.AdamW, {**ADAMW, "fused": True}, BF16, (None, 1, 3)),
    (torch.optim.AdamW, {"lr": torch.tensor(0.01)}, {"exp_avg": BF16, "exp_avg_sq": torch.float32}, (1,)),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, BF16, (0, 3)),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, torch.float16, (2,)),
    (torch.optim.SGD, {"lr": 0.1}, BF16, (1,)),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, BF16, (1, 2)),
    (torch.optim.NAdam, {"lr": 0.1}, BF16, (1,)),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5, "foreach": True}, BF16, (2,)),
    (Lion, {"lr": 0.01}, BF16, (None, 1, 3)),
    (Muon, {"lr": 0.01}, BF16, (0, 2)),
]


def on_ranks():
    results = []
    for optimizer_class, settings, state_dtype, stages in CASES:
        for zero in stages:
            model = wrapped(zero)
            optimizer = build_optimizer(optimizer_class, copy.deepcopy(settings), model, state_dtype)
            values = train(model, optimizer)
            full = optimizer.full_state_dict()["state"]
            order = [fqn for names in optimizer._names_by_group() for fqn in names]
            results.append((values, {order[number]: entries for number, entries in full.items()}))
    return results


def assert_same(actual, expected, case):
    values, state = actual
    for fqn, value in expected[0].items():
        assert torch.equal(values[fqn], value), (case, fqn)
    for fqn, entries in expected[1].items():
        for name, value in entries.items():
            if value is not None:
                assert state[fqn][name].dtype == value.dtype
                assert torch.equal(state[fqn][name], value), (case, fqn, name)


def test_any_optimizer_and_stage(parts_of):
    parts_of(50)  # less than the larger parameters
    expected = [one_process(*case[:2], case[2]) for case in CASES for _ in case[3]]
    which = [(case[0].__name__, case[1], zero) for case in CASES for zero in case[3]]
    for results in run_ranks(on_ranks, 2):
        for actual, each, case in zip(results, expected, which, strict=True):
            assert_same(actual, each, case)


def test_state_that_is_not_rounded_is_seen():
    """The same training without state_dtype, and with state that is rounded once too few."""
    expected = one_process(torch.optim.AdamW, ADAMW, BF16)[0]
    for state_dtype in (None, {"exp_avg": BF16}):
        model = build()
        values = train(model, build_optimizer(torch.optim.AdamW, ADAMW, model, state_dtype))
        assert not torch.equal(values["0.weight"], expected["0.weight"])


def test_a_class_that_counts_is_not_stepped_in_parts(monkeypatch, parts_of):
    expected = one_process(Lion, {"lr": 0.01}, BF16)[0]
    parts_of(50)
    same = []
    for is_of_torch in (False, True):
        if is_of_torch:  # whose classes do not count
            monkeypatch.setattr(torch.optim, "Lion", Lion, raising=False)
        model = build()
        optimizer = build_optimizer(Lion, {"lr": 0.01}, model, BF16)
        values = train(model, optimizer)
        same.append(all(torch.equal(values[fqn], value) for fqn, value in expected.items()))
    assert same == [True, False]
