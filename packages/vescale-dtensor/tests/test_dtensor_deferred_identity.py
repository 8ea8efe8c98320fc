"""Materialization replaces contents, not identities: ties, frozen flags, Python attributes, shared memory, modules."""

import pytest
import torch
from torch import nn

from vescale.dtensor import deferred_init, is_deferred, materialize


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.both = [self.embed.weight, {"again": (self.head.weight, 3)}]


def test_tied_parameters_stay_one_object_everywhere():
    module = materialize(deferred_init(Tied))
    weight = module.embed.weight
    assert module.head.weight is weight
    assert module.both[0] is weight
    assert module.both[1]["again"][0] is weight
    assert len(list(module.parameters())) == 1


def test_ties_survive_separate_calls_for_parts_of_the_model():
    torch.manual_seed(0)
    eager = Tied()
    torch.manual_seed(0)
    module = deferred_init(Tied)
    materialize(module.head)
    assert is_deferred(module)
    materialize(module.embed)
    assert module.head.weight is module.embed.weight
    assert torch.equal(module.head.weight, eager.head.weight)


def test_parameters_that_share_memory_share_it_afterwards():
    def ctor():
        module = nn.Module()
        module.a = nn.Parameter(torch.randn(3, 4))
        module.b = nn.Parameter(torch.empty(3, 4))
        module.b.data = module.a.data
        module.row = nn.Parameter(module.a.detach()[1])
        return module

    module = materialize(deferred_init(ctor))
    with torch.no_grad():
        module.a[1].fill_(5.0)
    assert torch.equal(module.b, module.a)
    assert torch.equal(module.row, torch.full((4,), 5.0))


def test_flags_and_python_attributes_survive():
    def ctor():
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        module[0].weight.requires_grad_(False)
        module[0].weight._is_hf_initialized = True
        module[0].bias.tag = {"no_decay": True}
        module.register_buffer("scratch", torch.ones(2), persistent=False)
        return module

    module = deferred_init(ctor)
    module[0].bias.requires_grad_(False)  # freezing is also possible later
    identities = [id(submodule) for submodule in module.modules()]
    materialize(module)
    assert identities == [id(submodule) for submodule in module.modules()]
    weight, bias = module[0].weight, module[0].bias
    assert type(weight) is nn.Parameter
    assert not weight.requires_grad
    assert not bias.requires_grad
    assert weight._is_hf_initialized is True
    assert bias.tag == {"no_decay": True}
    assert type(module[1].running_mean) is torch.Tensor
    assert "scratch" not in module.state_dict()
    assert not hasattr(weight, "deferred")


def test_materializing_twice_changes_nothing():
    module = materialize(deferred_init(nn.Linear, 3, 3))
    weight, before, state = module.weight, module.weight.detach().clone(), torch.get_rng_state()
    torch.rand(1)
    after_draw = torch.get_rng_state()
    materialize(module)
    assert module.weight is weight
    assert torch.equal(module.weight, before)
    assert torch.equal(torch.get_rng_state(), after_draw)
    assert not torch.equal(state, after_draw)


def test_parts_of_a_model_draw_what_the_whole_draws():
    """Removed modules still consume the generator; the rest is as in the whole model."""

    def ctor():
        return nn.ModuleDict({"first": nn.Linear(5, 5), "second": nn.Linear(5, 5), "third": nn.Linear(5, 5)})

    torch.manual_seed(1)
    eager = ctor()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    module = deferred_init(ctor)
    module["first"] = nn.Identity()
    del module["third"]
    materialize(module)
    assert torch.equal(module["second"].weight, eager["second"].weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_parts_may_be_materialized_at_different_times():
    torch.manual_seed(1)
    eager = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    module = deferred_init(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
    materialize(module[1])
    assert torch.equal(torch.get_rng_state(), state), (
        "the constructor's draws are accounted for once, at the first call"
    )
    torch.rand(3)
    later = torch.get_rng_state()
    materialize(module)
    assert torch.equal(torch.get_rng_state(), later)
    for mine, theirs in zip(module.parameters(), eager.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_real_tensors_of_the_module_are_kept():
    existing = nn.Linear(3, 3)
    module = deferred_init(lambda: nn.Sequential(existing, nn.Linear(3, 3)))
    weight = existing.weight
    materialize(module)
    assert module[0] is existing
    assert existing.weight is weight
    assert not is_deferred(module)


def test_the_model_trains_after_materialize():
    module = materialize(deferred_init(lambda: nn.Sequential(nn.Linear(3, 3), nn.LSTM(3, 2))))
    out, _ = module(torch.randn(2, 3))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_hooks_that_would_be_lost_are_refused():
    module = deferred_init(nn.Linear, 3, 3)
    module.weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match="'weight' has gradient hooks, which materialize would lose"):
        materialize(module)


def test_tensors_with_a_history_are_refused():
    def ctor():
        module = nn.Linear(3, 3)
        module.norm = module.weight.norm()
        return module

    with pytest.raises(NotImplementedError, match="'norm' was computed from parameters with gradient"):
        materialize(deferred_init(ctor))
