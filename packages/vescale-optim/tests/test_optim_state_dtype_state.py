"""State that is kept in fewer bits: saved, loaded, skipped, in tensor-parallel shards, with masters; its memory."""

import gc
import importlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import gather_full, held_bytes, ranks

BF16 = torch.bfloat16
AdamW = torch.optim.AdamW


def build(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False)).to(dtype)


def gradient_of(param, step):
    generator = torch.Generator().manual_seed(step + 10 * param.numel())
    return torch.randn(param.shape, generator=generator).to(param.dtype)


def loss_of(model, step):
    """Return a loss whose gradients do not depend on parameters, so that ranks and one process have the same bits."""
    return sum((p * gradient_of(p, step)).sum() for p in model.parameters())


def train(model, optimizer, steps):
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}


def round_state(optimizer):
    """Round what a torch optimizer keeps per element, in its own dtype."""
    for entries in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            entries[name] = entries[name].to(BF16).to(entries[name].dtype)


def one_process(steps, dtype=torch.float32, widened=False):
    model = build(dtype)
    params = [nn.Parameter(p.detach().float()) if widened else p for p in model.parameters()]
    optimizer = AdamW(params, lr=0.01)
    for step in steps:
        for ours, wide in zip(model.parameters(), params, strict=True):
            wide.grad = gradient_of(ours, step).to(wide.dtype)
        optimizer.step()
        round_state(optimizer)
    return model, params, optimizer


def wrapped(zero, dtype=torch.float32):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return DDP(build(dtype), mesh["dp"], zero=zero, bucket_bytes=100)


def assert_equal(actual, expected):
    assert set(actual) == set(expected)
    for fqn, value in expected.items():
        assert torch.equal(actual[fqn], value), fqn


def dtypes_of(optimizer):
    pieces = [
        entries[name] for entries in optimizer.state_dict()["state"].values() for name in ("exp_avg", "exp_avg_sq")
    ]
    assert all(piece.to_dtensor().dtype == piece.tensor.dtype for piece in pieces)
    return {piece.tensor.dtype for piece in pieces}


def check_saved_and_loaded(zero):
    expected = {fqn: p.detach() for fqn, p in one_process(range(6))[0].named_parameters()}
    first = wrapped(zero)
    optimizer = DistributedOptimizer(AdamW, model=first, lr=0.01, state_dtype=BF16)
    assert dtypes_of(optimizer) == {BF16}  # before the first step
    train(first, optimizer, range(3))
    assert dtypes_of(optimizer) == {BF16}
    values, full = first.state_dict(), optimizer.full_state_dict()

    second = wrapped(zero)  # pieces; before its first step
    second.load_state_dict(values)
    resumed = DistributedOptimizer(AdamW, model=second, lr=0.5, state_dtype=BF16)
    resumed.load_state_dict(optimizer.state_dict())
    assert_equal(train(second, resumed, range(3, 6)), expected)

    third = wrapped(zero)  # whole tensors, after a step
    resumed = DistributedOptimizer(AdamW, model=third, lr=0.01, state_dtype=BF16)
    train(third, resumed, range(7, 8))
    kept = [entries["exp_avg"].tensor for entries in resumed.state_dict()["state"].values()]
    third.load_state_dict(values)
    resumed.load_full_state_dict(full)
    now = [entries["exp_avg"].tensor for entries in resumed.state_dict()["state"].values()]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(kept, now, strict=True))  # in the same memory
    assert_equal(train(third, resumed, range(3, 6)), expected)

    alone = build()  # a torch optimizer goes on, in wide state
    alone.load_state_dict(values)
    plain = AdamW(alone.parameters(), lr=0.01)
    plain.load_state_dict(full)
    for step in range(3, 6):
        train(alone, plain, [step])
        round_state(plain)
    assert_equal(dict(alone.named_parameters()), expected)

    wide = DistributedOptimizer(AdamW, model=wrapped(zero), lr=0.01)  # state of another dtype is rounded
    train(wide.model, wide, range(3))
    for save in (wide.state_dict, wide.full_state_dict):
        fresh = DistributedOptimizer(AdamW, model=wrapped(zero), lr=0.01, state_dtype=BF16)
        load = fresh.load_state_dict if save == wide.state_dict else fresh.load_full_state_dict
        load(save())
        for fqn, entries in fresh.state_dict()["state"].items():
            theirs = wide.state_dict()["state"][fqn]["exp_avg"].tensor
            assert torch.equal(entries["exp_avg"].tensor, theirs.to(BF16))

    module = build()  # an optimizer that has state is taken over
    existing = AdamW(module.parameters(), lr=0.01)
    train(module, existing, range(3))
    model = DDP(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"], zero=zero)
    assert dtypes_of(DistributedOptimizer(existing, model=model, state_dtype=BF16)) == {BF16}


def check_skipped_steps(zero):
    model = wrapped(zero)
    optimizer = DistributedOptimizer(AdamW, model=model, lr=0.01, state_dtype=BF16)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in (0, 1, 2):
        factor = torch.inf if step == 1 and dist.get_rank() == 0 else 1.0
        scaler.scale(loss_of(model, step) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    expected = {fqn: p.detach() for fqn, p in one_process((0, 2))[0].named_parameters()}
    assert_equal({fqn: p.detach() for fqn, p in model.named_parameters()}, expected)


def check_masters(zero):
    model = wrapped(zero, BF16)
    optimizer = DistributedOptimizer(AdamW, model=model, lr=0.01, master_dtype=torch.float32, state_dtype=BF16)
    values = train(model, optimizer, range(4))
    narrow, wide, _ = one_process(range(4), BF16, widened=True)
    masters = {fqn: gather_full(e["master_weight"]) for fqn, e in optimizer.state_dict()["state"].items()}
    names = [fqn for fqn, _ in narrow.named_parameters()]
    assert_equal(masters, dict(zip(names, (p.detach() for p in wide), strict=True)))
    assert_equal(values, {fqn: master.to(BF16) for fqn, master in masters.items()})
    assert dtypes_of(optimizer) == {BF16}


@ranks(2)
def test_state_is_saved_loaded_and_skipped():
    for zero in (0, 1, 2):
        check_saved_and_loaded(zero)
    for zero in (0, 2):
        check_skipped_steps(zero)
        check_masters(zero)


@ranks(2)
def test_tensor_parallel_parameters():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    _, _, plain = one_process(range(3))
    expected = next(iter(plain.state.values()))["exp_avg"]
    for zero in (None, 1):
        module = build()
        module[0].weight = nn.Parameter(distribute_tensor(module[0].weight.detach(), mesh["tp"], [Shard(0)]))
        module[0].bias.requires_grad_(False)
        model = module if zero is None else DDP(module, mesh["dp"], zero=zero)
        optimizer = DistributedOptimizer(AdamW, model=model, lr=0.01, state_dtype=BF16)
        for step in range(3):
            grad = distribute_tensor(gradient_of(module[0].weight, step), mesh["tp"], [Shard(0)])
            loss = (module[0].weight.to_local() * grad.to_local()).sum()
            (loss + (module[1].weight * gradient_of(module[1].weight, step)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state_dict()["state"]["0.weight"]["exp_avg"]
        assert state.tensor.dtype == BF16
        assert torch.equal(gather_full(state).float(), expected)


def test_hooks_run_once_and_the_closure_too(parts_of):
    parts_of(1)
    counts = []
    for state_dtype in (None, BF16):
        calls = []
        model = build()
        optimizer = DistributedOptimizer(AdamW, model=model, lr=0.01, state_dtype=state_dtype)
        handles = [
            optimizer.register_step_pre_hook(lambda *_args, calls=calls: calls.append("before")),
            optimizer.register_step_post_hook(lambda *_args, calls=calls: calls.append("after")),
            register_optimizer_step_pre_hook(lambda own, *_args, calls=calls: calls.append(type(own).__name__)),
            register_optimizer_step_post_hook(lambda own, *_args, calls=calls: calls.append(type(own).__name__)),
        ]

        def closure(model=model, calls=calls):
            calls.append("closure")
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None
        for handle in handles:
            handle.remove()
        counts.append(calls)
    assert counts[0] == counts[1]
    assert [counts[1].count(what) for what in ("before", "closure", "after")] == [1, 1, 1]


NUM_LAYERS, WIDTH = 4, 64
LAYER_BYTES = 4 * WIDTH * WIDTH


def measure(monkeypatch, state_dtype):
    """Return the bytes of state between steps, and what a step needs beyond that while it computes."""
    model = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)])
    for param in model.parameters():
        param.grad = gradient_of(param, 0)
    gc.collect()
    before, during = held_bytes(), []
    optimizer = DistributedOptimizer(AdamW, model=model, lr=0.01, state_dtype=state_dtype)
    functions = importlib.import_module("torch.optim.adam")
    update = functions.adam

    def observed(*args, **kwargs):
        during.append(held_bytes())
        return update(*args, **kwargs)

    optimizer.step()
    with monkeypatch.context() as patch:
        patch.setattr(functions, "adam", observed)
        optimizer.step()
    after = held_bytes()
    return after - before - 4 * NUM_LAYERS, max(during) - after  # without the counts of steps


@pytest.fixture
def few_objects():
    """Leave out what is there already of what `held_bytes` looks through; a first step makes torch import much."""
    one_process(range(1))
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_memory(monkeypatch, parts_of):
    total = NUM_LAYERS * LAYER_BYTES
    parts_of(2 * LAYER_BYTES)
    assert measure(monkeypatch, BF16) == (total, 2 * 2 * LAYER_BYTES)  # two moments of half the bytes
    assert measure(monkeypatch, {"exp_avg": BF16}) == (total // 2 + total, 2 * LAYER_BYTES)
    assert measure(monkeypatch, None) == (2 * total, 0)
    parts_of(total)  # what parts are for
    assert measure(monkeypatch, BF16) == (total, 2 * total)


def test_what_is_refused():
    def refused(state_dtype, *, dtype=torch.float32, kind=AdamW, **settings):
        with pytest.raises(ValueError) as found:
            DistributedOptimizer(kind, model=build(dtype), lr=0.1, state_dtype=state_dtype, **settings)
        return str(found.value)

    floating = (
        "state_dtype must be a floating-point dtype of 16 bits or more such as torch.bfloat16, or a mapping from "
    )
    for wrong in (torch.int8, torch.float8_e5m2, torch.complex64, "bfloat16"):
        assert refused(wrong).startswith(floating)
        assert refused(wrong).endswith(f"names of state to such, got {wrong!r}")
    assert "got torch.int32 in {'exp_avg': torch.int32}" in refused({"exp_avg": torch.int32})
    wider = "state_dtype torch.float32 has no fewer bits than torch.bfloat16, in which '0.weight' is updated"
    assert refused(torch.float32, dtype=BF16).startswith(wider)
    assert "pass master_dtype=torch.float32" in refused({"exp_avg": torch.float32}, dtype=BF16)
    assert "no fewer bits than torch.bfloat16" in refused(torch.float16, dtype=BF16)
    assert refused(torch.float64, dtype=BF16, master_dtype=torch.float32).startswith(
        "state_dtype torch.float64 has no fewer bits than torch.float32, in which '0.weight' is updated"
    )
    unknown = (
        "expected names of state as keys of state_dtype, got others: state_dtype names ['exp_average'], "
        "which is no state of this optimizer with these hyperparameters; it keeps "
    )
    assert refused({"exp_average": BF16}) == unknown + "['exp_avg', 'exp_avg_sq']"
    assert refused({"momentum_buffer": BF16}, kind=torch.optim.SGD).endswith("it keeps []")
    DistributedOptimizer(AdamW, model=build(BF16), state_dtype=BF16)  # the dtype that it has anyway
    DistributedOptimizer(torch.optim.SGD, model=build(), momentum=0.5, state_dtype={"momentum_buffer": BF16})
