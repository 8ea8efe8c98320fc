"""A model without memory is materialized shard by shard, and trains as the eager one in one process."""

import pytest
import torch
from torch import nn

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import DTensor, Replicate, Shard, deferred_init, init_device_mesh, is_deferred
from vescale_testing import ranks


@pytest.mark.parametrize("family", ["mixtral", "llama", "gpt2"])
def test_training_equals_one_process(family, build, train, assert_same_pass):
    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plain = build(family, dropout=0.1)
        model = deferred_init(build, family, dropout=0.1)
        assert is_deferred(model)
        parallelize_module(model, mesh, plans.plan_for(model, degree=2, sequence_parallel=True))
        assert not is_deferred(model)
        for name, parameter in plain.named_parameters():
            made = model.get_parameter(name)
            assert isinstance(made, DTensor)
            assert made.requires_grad == parameter.requires_grad
            assert torch.equal(made.full_tensor(), parameter), name
            assert made.to_local().untyped_storage().nbytes() == made.to_local().nbytes  # nothing beyond the shard
        assert_same_pass(train(model), train(plain))

    on_every_rank()


@ranks(2)
def test_ties_frozen_parameters_and_buffers():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(9, 4)
            self.head = nn.Linear(4, 9, bias=False)
            self.head.weight = self.embedding.weight
            self.norm = nn.LayerNorm(4).requires_grad_(False)
            self.register_buffer("table", torch.randn(6))
            self.register_buffer("plain", torch.arange(3.0))

        def forward(self, ids):
            return self.head(self.norm(self.embedding(ids))) + self.plain.sum()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(2)
    expected = Net()
    torch.manual_seed(2)
    model = deferred_init(Net)
    plan = {
        "parameter": {r"(embedding|head)\.weight": {"tp": Shard(0)}, "table": {"tp": Shard(0)}},
        "forward": {r"embedding\.output": [{"tp": Replicate()}], "output": [{"tp": Replicate()}]},
    }
    parallelize_module(model, mesh, plan)
    assert model.head.weight is model.embedding.weight
    assert not model.norm.weight.requires_grad
    assert model.table.placements == (Shard(0),)
    assert torch.equal(model.table.full_tensor(), expected.table)
    assert torch.equal(model.plain, expected.plain)
    torch.testing.assert_close(model(torch.arange(5)), expected(torch.arange(5)))


@ranks(2)
def test_a_mesh_axis_of_one_rank(build, train, assert_same_pass):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = deferred_init(build, "mixtral")
    parallelize_module(model, mesh["tp"], plans.mixtral())
    assert not is_deferred(model)
    assert_same_pass(train(model), train(build("mixtral")), bound=1e-15)


@ranks(2)
def test_another_seed_would_be_noticed():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    model = deferred_init(nn.Linear, 4, 4)
    parallelize_module(model, mesh, {"parameter": {"weight": {"tp": Shard(0)}}})
    torch.manual_seed(2)
    assert not torch.equal(model.weight.full_tensor(), nn.Linear(4, 4).weight)
