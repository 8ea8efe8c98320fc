"""`Muon` on data-parallel ranks at any ZeRO stage is `Muon` in one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import TrainingRecord, assert_same_training, gather_state, ranks, run_ranks

SETTINGS = {"lr": 0.02, "adamw": ["embedding.*"], "adamw_lr": 0.01}


class Model(nn.Module):
    """A tall, a wide and a square matrix, a stack of experts, an embedding, vectors and a layer of its own method."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(5, 6)
        self.up = nn.Linear(6, 10)
        self.experts = nn.Parameter(torch.randn(3, 10, 7) / 3)
        self.down = nn.Linear(7, 6)
        self.square = nn.Linear(6, 6, bias=False)
        self.unused = nn.Linear(2, 3)

    def forward(self, x):
        hidden = torch.tanh(self.up(self.embedding(x)))
        hidden = torch.einsum("bi,eio->beo", hidden, self.experts).tanh().sum(1)
        return self.square(self.down(hidden))


def build(dtype=torch.float64):
    torch.manual_seed(0)
    return Model().to(dtype)


def train(model, optimizer, coord=0, size=1, steps=3):
    norms = []
    for step in range(steps):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64).chunk(size)[coord]
        model(x).square().mean().backward()
        optimizer.step()
        norms += [optimizer.grad_norm] if getattr(optimizer, "grad_norm", None) is not None else []
        optimizer.zero_grad()
    return TrainingRecord.collect(getattr(model, "module", model), optimizer, grad_norms=norms)


def one_process(clip=None, **settings):
    model = build()
    return train(model, DistributedOptimizer(Muon, model=model, clip_grad_norm=clip, **{**SETTINGS, **settings}))


def on_ranks(zero, bucket_bytes=25 * 2**20, clip=None, overlap=True, **settings):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = DDP(build(), mesh["dp"], zero=zero, bucket_bytes=bucket_bytes, overlap=overlap)
    optimizer = DistributedOptimizer(Muon, model=model, clip_grad_norm=clip, **{**SETTINGS, **settings})
    return train(model, optimizer, dist.get_rank(), dist.get_world_size())


def every_stage(cases):
    return [on_ranks(**case) for case in cases]


CASES = [{"zero": zero, "bucket_bytes": size, "clip": 0.5} for zero in (0, 1, 2) for size in (1, 300, 25 * 2**20)]


def test_a_module_without_ddp_equals_the_optimizer_alone():
    model = build()
    actual = train(model, Muon(model.named_parameters(), **SETTINGS))
    expected = one_process()
    for fqn, value in expected.params.items():
        assert torch.equal(actual.params[fqn], value), fqn


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_ranks_stage_and_bucket_size(world_size):
    expected = one_process(clip=0.5)
    for records in run_ranks(every_stage, world_size, CASES):
        for record in records:
            assert_same_training(record, expected, rtol=1e-12)


def test_lost_results_are_seen(monkeypatch, lost_exchanges):
    expected = one_process()
    lost_exchanges(monkeypatch, 1)
    with pytest.raises(AssertionError, match="differ"):
        assert_same_training(run_ranks(on_ranks, 2, 1)[0], expected, rtol=1e-12)


@pytest.mark.parametrize("zero", [0, 1])
def test_every_matrix_is_iterated_once_whole_and_on_one_rank(zero, iterations):
    def body():
        counted = iterations(pytest.MonkeyPatch())
        on_ranks(zero=zero)
        return [shape for shape in counted if shape != (1, 2)]  # that of the state of a parameter that was never used

    every = run_ranks(body, 3)
    expected = [(10, 6), (6, 7), (6, 6), *[(10, 7)] * 3] * 3  # three steps
    assert sorted(shape for counted in every for shape in counted) == sorted(expected)
    assert all(every)


def groups_of(model):
    named = dict(model.named_parameters())
    first = ("up.weight", "up.bias", "experts")
    return [
        {"params": [named.pop(fqn) for fqn in first], "lr": 0.05, "weight_decay": 0.5, "ns_steps": 3},
        {"params": [named.pop("square.weight")], "method": "adamw"},
        {"params": list(named.values())},
    ]


def with_groups_and_a_scheduler(zero=None):
    model = build()
    if zero is not None:
        model = DDP(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"], zero=zero, bucket_bytes=300)
    optimizer = DistributedOptimizer(Muon, model=model, param_groups=groups_of(model), lr=0.02, momentum=0.8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    coord, size = (0, 1) if zero is None else (dist.get_rank(), 2)
    train(model, optimizer, coord, size, steps=1)
    scheduler.step()
    return train(model, optimizer, coord, size)


def test_groups_and_a_scheduler():
    expected = with_groups_and_a_scheduler()
    for zero in (0, 1, 2):
        for record in run_ranks(with_groups_and_a_scheduler, 2, zero):
            assert_same_training(record, expected, rtol=1e-12)


@ranks(2)
def test_a_training_goes_on_from_its_state_and_state_is_there_before_the_first_step():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for zero in (0, 1, 2):
        models = [DDP(build(), mesh["dp"], zero=zero, bucket_bytes=300) for _ in range(2)]
        optimizers = [DistributedOptimizer(Muon, model=model, **SETTINGS) for model in models]
        before = optimizers[0].state_dict()
        assert list(before["state"]["up.weight"]) == ["momentum_buffer"]
        assert sorted(before["state"]["up.bias"]) == ["exp_avg", "exp_avg_sq", "step"]
        assert [group["method"] for group in before["param_groups"]] == ["muon", "adamw"]
        optimizers[0].load_state_dict(before)
        train(models[0], optimizers[0], dist.get_rank(), 2)
        models[1].load_state_dict(models[0].state_dict())
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        records = [train(*pair, dist.get_rank(), 2) for pair in zip(models, optimizers, strict=True)]
        assert_same_training(records[1], records[0], bitwise=True)


@ranks(2)
def test_state_is_sharded_and_whole_when_gathered():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(build(), mesh["dp"], zero=1)
    optimizer = DistributedOptimizer(Muon, model=model, **SETTINGS)
    train(model, optimizer, dist.get_rank(), 2)
    alone = build()
    expected = Muon(alone.named_parameters(), **SETTINGS)
    train(alone, expected)
    gathered = gather_state(optimizer.state_dict()["state"])
    for fqn, param in alone.named_parameters():
        for name, value in expected.state.get(param, {}).items():
            torch.testing.assert_close(gathered[fqn][name], value, rtol=1e-12, atol=1e-14)
    held = sum(state["momentum_buffer"].numel() for state in optimizer.state.values() if "momentum_buffer" in state)
    total = sum(p.numel() for fqn, p in alone.named_parameters() if p.ndim > 1 and "embedding" not in fqn)
    assert held < 0.7 * total


def matrices_alone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 5, bias=False)).double()


def torch_muon_on_ranks(zero):
    model = DDP(matrices_alone(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))["dp"], zero=zero)
    optimizer = DistributedOptimizer(torch.optim.Muon, model=model, lr=0.02, weight_decay=0.3)
    return train(model, optimizer, dist.get_rank(), 2)


def test_the_class_of_torch():
    model = matrices_alone()
    expected = train(model, torch.optim.Muon(model.parameters(), lr=0.02, weight_decay=0.3))
    for zero in (0, 1, 2):
        for record in run_ranks(torch_muon_on_ranks, 2, zero):
            assert_same_training(record, expected, rtol=1e-12)


def test_what_it_refuses():
    with pytest.raises(
        ValueError, match=r"torch.optim.Muon takes matrices only, .*'up.bias': \(10,\).* vescale.optim.Muon"
    ):
        DistributedOptimizer(torch.optim.Muon, model=build())
    for base in (torch.optim.Muon, Muon):
        derived = type("Derived", (base,), {})
        with pytest.raises(ValueError, match=r"Derived derives from Muon, .* pass vescale.optim.Muon itself"):
            DistributedOptimizer(derived, model=matrices_alone())
    with pytest.raises(ValueError, match=r"adamw entry 'embeding' fits no parameter; .*'embedding.weight'"):
        DistributedOptimizer(Muon, model=build(), adamw="embeding")
    with_convolution = nn.Sequential(nn.Conv1d(2, 3, 4), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"the weights of convolutions \['0.weight'\] have three dims .* in adamw="):
        DistributedOptimizer(Muon, model=with_convolution)
    DistributedOptimizer(Muon, model=with_convolution, adamw=r"0\.weight")
