"""``torch.amp.GradScaler`` scales, finds infinities on every rank, and skips steps as it does in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks, run_ranks

INFINITE_STEP = 2


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def batch(step, coord, size):
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    if step == INFINITE_STEP:
        x[0, 0] = torch.inf  # in the batch of coord 0, and so in the gradient of one column of one weight
    return x.chunk(size)[coord]


def train(model, optimizer, scaler, coord=0, size=1, *, unscale_first=False):
    """Return parameters and scale after every step."""
    history = []
    for step in range(5):
        x = batch(step, coord, size)
        loss = (model[0](x) * 1e-3).square().mean() + model(x.nan_to_num(0, 0, 0)).square().mean()
        scaler.scale(loss).backward()
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        history.append((scaler.get_scale(), {k: v.clone() for k, v in model.state_dict().items()}))
    return history


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)


def one_process(clip=None):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if clip is None:
        return train(model, optimizer, scaler())
    step = optimizer.step
    optimizer.step = lambda: (nn.utils.clip_grad_norm_(model.parameters(), clip), step())
    return train(model, optimizer, scaler())


def on_ranks(cases):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    histories = []
    for zero, unscale_first, clip in cases:
        model = DDP(build(), mesh["dp"], zero=zero, bucket_bytes=300)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.1, clip_grad_norm=clip)
        wrapped = Indexable(model)
        histories.append(
            train(wrapped, optimizer, scaler(), dist.get_rank(), dist.get_world_size(), unscale_first=unscale_first)
        )
    return histories


class Indexable:
    """A DDP whose layers can be called by number."""

    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x)

    def __getitem__(self, index):
        return self.model.module[index]

    def state_dict(self):
        return self.model.state_dict()


def assert_same_history(actual, expected):
    for (scale, values), (expected_scale, expected_values) in zip(actual, expected, strict=True):
        assert scale == expected_scale
        for fqn, value in expected_values.items():
            torch.testing.assert_close(values[fqn], value, rtol=1e-12, atol=1e-14)


CASES = [(zero, first, clip) for zero in (0, 1, 2) for first, clip in ((False, None), (True, None), (True, 0.1))]


def test_one_process_skips_the_infinite_step():
    scales = [scale for scale, _ in one_process()]
    assert scales == [8.0, 16.0, 8.0, 8.0, 16.0]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_stage(world_size):
    expected = {clip: one_process(clip) for clip in (None, 0.1)}
    for histories in run_ranks(on_ranks, world_size, CASES):
        for (_, _, clip), history in zip(CASES, histories, strict=True):
            assert_same_history(history, expected[clip])


def without_agreement():
    reduce = dist.all_reduce
    pytest.MonkeyPatch().setattr(dist, "all_reduce", lambda tensor, *args, **kw: reduce(tensor.clone(), *args, **kw))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.ParameterList([nn.Parameter(torch.zeros(64))])
    model = DDP(model, mesh["dp"], zero=1, find_unused_parameters=False)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    gradient = torch.zeros(64)
    gradient[0] = torch.inf
    (model.module[0] * gradient).sum().backward()
    each = scaler()
    each.scale(torch.ones(()))
    each.unscale_(optimizer)
    found = each._found_inf_per_device(optimizer).values()
    return [value.item() for value in found]


def test_infinities_that_ranks_do_not_agree_on_are_seen():
    assert sorted(run_ranks(without_agreement, 2)) == [[0.0], [1.0]]


@ranks(2)
def test_shards_of_tensor_parallelism_agree():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Module()
    model.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]))
    model.gain = nn.Parameter(torch.ones(2))
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    each = scaler()
    gradient = torch.full((2, 3), torch.inf if dist.get_rank() == 0 else 2.0)
    each.scale((model.weight.to_local() * gradient).sum() + model.gain.sum()).backward()
    each.step(optimizer)
    each.update()
    assert each.get_scale() == 4.0
    assert not model.weight.to_local().any()
    assert torch.equal(model.gain, torch.ones(2))


@ranks(2)
def test_pipeline_stages_agree():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    model = nn.Linear(3, 2) if dist.get_rank() else nn.Linear(3, 5, bias=False).double()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1, norm_axes=mesh)
    each = scaler()
    factor = torch.inf if dist.get_rank() == 0 else 1.0
    each.scale(sum((p * factor).sum() for p in model.parameters())).backward()
    each.step(optimizer)
    each.update()
    assert each.get_scale() == 4.0
    for fqn, value in model.state_dict().items():
        assert torch.equal(value, before[fqn])


@ranks(2)
def test_gradients_can_be_read_from_the_groups():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(build(), mesh["dp"], zero=2)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1)
    assert all(p.grad is None for p in optimizer.param_groups[0]["params"])
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    (params,) = [group["params"] for group in optimizer.param_groups]
    total = torch.stack([p.grad.double().sum() for p in params]).sum()
    dist.all_reduce(total)
    alone = build()
    alone(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    torch.testing.assert_close(total, sum(p.grad.sum() for p in alone.parameters()))
    assert repr(next(p.grad for p in params if p.numel())).startswith("tensor(")


@ranks(1)
def test_gradients_in_float16_are_refused():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    model = DDP(nn.Linear(2, 2).half(), mesh["dp"], zero=1)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=0.1, master_dtype=torch.float32)
    each = scaler()
    each.scale(sum(p.sum() for p in model.parameters()).float()).backward()
    with pytest.raises(ValueError, match=r"'weight' is kept in float16, .* pass grad_dtype=torch.float32 to DDP"):
        each.step(optimizer)


@ranks(2)
def test_half_precision_with_master_weights():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for zero in (0, 1, 2):
        torch.manual_seed(0)
        model = DDP(nn.Linear(4, 4, bias=False).half(), mesh["dp"], zero=zero, grad_dtype=torch.float32)
        start = model.weight.detach().float().clone()
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, lr=2**-16, master_dtype=torch.float32)
        each = torch.amp.GradScaler("cpu", init_scale=8.0)
        for _ in range(64):
            each.scale((model.weight.float() * 0.5).sum()).backward()
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        torch.testing.assert_close(model.weight.float(), (start - 64 * 2**-17).half().float(), rtol=0, atol=0)
