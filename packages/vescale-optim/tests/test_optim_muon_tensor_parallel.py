"""`Muon` on matrices that tensor and expert parallelism cut is `Muon` on whole matrices."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.dtensor import InterleavedShard, distribute_tensor
from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import TrainingRecord, assert_same_training, run_ranks

SETTINGS = {"lr": 0.02, "adamw": "head.*", "adamw_lr": 0.01}

#: 7 rows and 3 experts are uneven over 2 ranks; a matrix of one column leaves the second rank with nothing.
SHAPES = {
    "rows": (7, 5),
    "columns": (5, 7),
    "fused": (12, 5),
    "thin": (4, 1),
    "replicated": (6, 4),
    "experts": (3, 5, 4),
    "expert_rows": (3, 5, 4),
    "expert_columns": (2, 4, 5),
    "head": (9, 4),
    "gain": (7,),
}
PLACEMENTS = {
    "rows": Shard(0),
    "columns": Shard(1),
    "fused": InterleavedShard(0, 3),
    "thin": Shard(1),
    "experts": Shard(0),
    "expert_rows": Shard(1),
    "expert_columns": Shard(2),
    "head": Shard(0),
    "gain": Shard(0),
}
NUM_STEPS = 3


def whole_tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


def build(place=lambda _name, value: value):
    module = nn.Module()
    for name, value in whole_tensors(0).items():
        module.register_parameter(name, nn.Parameter(place(name, value)))
    return module


def train(model, optimizer):
    """Take steps with gradients that autograd delivers: in a sum of products each factor's is the other one."""
    for step in range(NUM_STEPS):
        gradients = whole_tensors(step + 1)
        total = 0
        for name, param in model.named_parameters():
            if isinstance(param, DTensor):
                gradient = distribute_tensor(gradients[name], param.device_mesh, param.placements).to_local()
                total = total + (param.to_local() * gradient).sum()
            else:
                total = total + (param * gradients[name]).sum()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    return TrainingRecord.collect(getattr(model, "module", model), optimizer)


def one_process():
    model = build()
    return train(model, Muon(model.named_parameters(), **SETTINGS))


def on_mesh(shape, names, stages):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    records = []
    for zero in stages:
        module = build(lambda name, value: distribute_tensor(value, mesh["tp"], [PLACEMENTS.get(name, Replicate())]))
        model = module if zero is None else DDP(module, mesh["dp"], zero=zero, bucket_bytes=200)
        records.append(train(model, DistributedOptimizer(Muon, model=model, **SETTINGS)))
    return records


@pytest.mark.parametrize(
    "shape, names", [((1, 2), ("dp", "tp")), ((2, 2), ("dp", "tp")), ((2, 2), ("tp", "dp")), ((1, 3), ("dp", "tp"))]
)
def test_any_mesh_and_stage(shape, names):
    expected = one_process()
    for records in run_ranks(on_mesh, shape[0] * shape[1], shape, names, (None, 0, 1, 2)):
        for record in records:
            assert_same_training(record, expected, rtol=1e-12)


def experts_over_two_axes(stages):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    records = []
    for _ in stages:
        module = build(
            lambda _name, value: distribute_tensor(
                value, mesh, [Shard(0), Shard(1)] if value.ndim == 3 else [Replicate()] * 2
            )
        )
        records.append(train(module, DistributedOptimizer(Muon, model=module, **SETTINGS)))
    return records


def test_experts_cut_over_two_axes():
    for records in run_ranks(experts_over_two_axes, 4, (None,)):
        assert_same_training(records[0], one_process(), rtol=1e-12)


def test_a_shard_taken_for_the_matrix_is_seen(monkeypatch, lost_exchanges):
    """Without the parts of others, an owner iterates what it has of a matrix itself."""
    lost_exchanges(monkeypatch, 0)
    records = run_ranks(on_mesh, 2, (1, 2), ("dp", "tp"), (1,))[0]
    with pytest.raises(AssertionError, match="differ"):
        assert_same_training(records[0], one_process(), rtol=1e-12)
