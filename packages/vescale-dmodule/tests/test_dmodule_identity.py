"""A parallelized module is the same object: class, names, ties, attributes, copies; errors leave it usable."""

import copy

import pytest
import torch
from torch import nn

from vescale.dmodule import ImplicitRedistributionError, parallelize_module, plans
from vescale.dtensor import DTensor, Replicate, Shard, init_device_mesh
from vescale_testing import ranks


def mesh():
    return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def sequence_parallel(model):
    return parallelize_module(model, mesh(), plans.plan_for(model, degree=2, sequence_parallel=True))


@ranks(2)
def test_object_class_and_names_stay(build):
    for family in ("mixtral", "llama", "gpt2"):
        plain, model = build(family), build(family)
        modules = dict(model.named_modules())
        model.lm_head.weight.note = "kept"
        assert sequence_parallel(model) is model
        assert type(model) is type(plain)
        assert dict(model.named_modules()) == modules
        assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
        assert list(model.state_dict()) == list(plain.state_dict())
        assert [p.shape for p in model.parameters()] == [p.shape for p in plain.parameters()]
        assert all(isinstance(p, nn.Parameter) and isinstance(p, DTensor) for p in model.parameters())
        assert model.lm_head.weight.note == "kept"
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor.full_tensor(), plain.state_dict()[name]), name


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("table", torch.arange(4.0))
        self.register_buffer("scratch", torch.arange(4.0), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        return x * self.weight * self.table + self.scratch


@ranks(2)
def test_buffers_become_dtensors_where_the_plan_names_them():
    plan = {"parameter": {"table|weight": {"tp": Shard(0)}}, "forward": {"input": [{"tp": Shard(0)}]}}
    model = parallelize_module(Buffered(), mesh(), plan)
    assert model.table.placements == (Shard(0),)
    assert not isinstance(model.table, nn.Parameter)
    assert not isinstance(model.scratch, DTensor)
    assert model.nothing is None
    assert list(model.state_dict()) == ["weight", "table"]
    x = torch.full((4,), 2.0)
    assert torch.equal(model(x).full_tensor(), Buffered()(x))


@ranks(2)
def test_replicas_start_from_the_first_rank():
    torch.manual_seed(torch.distributed.get_rank())
    model = nn.Linear(4, 4)
    mine = model.weight.detach().clone()
    parallelize_module(
        model, mesh(), {"parameter": {"weight": {"tp": Shard(0)}}, "forward": {"output": [{"tp": Replicate()}]}}
    )
    assert torch.equal(model.weight.full_tensor(), mine) == (torch.distributed.get_rank() == 0)


@ranks(2)
def test_a_copy_trains_by_itself(build, train, assert_same_pass):
    expected = train(build("mixtral", dropout=0.1))
    model = sequence_parallel(build("mixtral", dropout=0.1))
    other = copy.deepcopy(model)
    assert_same_pass(train(other), expected)
    assert all(p.grad.placements == p.placements for p in other.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert_same_pass(train(model), expected)
    again = copy.deepcopy(model)  # with hooks and gradients in place
    again.zero_grad()
    assert_same_pass(train(again), expected)
    tied = copy.deepcopy(sequence_parallel(build("gpt2", tie_word_embeddings=True)))
    assert tied.lm_head.weight is tied.transformer.wte.weight


@ranks(2)
def test_gradients_taken_without_accumulation(build):
    """`torch.autograd.grad` gives them in the parameter's placements, too."""
    ids = torch.arange(18).view(2, 9)
    plain, model = build("llama"), sequence_parallel(build("llama"))
    expected = torch.autograd.grad(plain(input_ids=ids, labels=ids).loss, list(plain.parameters()))
    actual = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, list(model.parameters()))
    for parameter, one, other in zip(model.parameters(), actual, expected, strict=True):
        assert one.placements == parameter.placements
        torch.testing.assert_close(one.full_tensor(), other, rtol=1e-5, atol=1e-6)


@ranks(2)
def test_an_exception_in_the_forward_leaves_it_usable(build, train, assert_same_pass):
    expected = train(build("mixtral"))
    model = sequence_parallel(build("mixtral"))
    for name in ("model.layers.1.mlp.experts", "model.layers.0.self_attn.o_proj", "model", ""):
        handle = model.get_submodule(name).register_forward_pre_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            train(model)
        handle.remove()
        assert torch._C._len_torch_function_stack() == 0
        handle = model.get_submodule(name).register_forward_hook(_fail)
        with pytest.raises(ZeroDivisionError):
            train(model)
        handle.remove()
        assert torch._C._len_torch_function_stack() == 0
        model.zero_grad()
        assert_same_pass(train(model), expected)
        model.zero_grad()


def _fail(*_):
    raise ZeroDivisionError


@ranks(2)
def test_hooks_of_the_user_see_dtensors_inside_and_plain_tensors_outside(build):
    model = sequence_parallel(build("llama"))
    seen = {}
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, output: seen.update(inside=output))
    model.register_forward_hook(lambda _module, _args, output: seen.update(outside=output.logits))
    model(input_ids=torch.arange(8).view(2, 4))
    assert seen["inside"].placements == (Shard(1),)
    assert not isinstance(seen["outside"], DTensor)


@ranks(2)
def test_a_part_called_by_itself_runs_in_the_same_mode(build):
    plain, model = build("llama"), sequence_parallel(build("llama"))
    hidden = model.model(input_ids=torch.arange(8).view(2, 4)).last_hidden_state
    expected = plain.model(input_ids=torch.arange(8).view(2, 4)).last_hidden_state
    torch.testing.assert_close(hidden.full_tensor(), expected)


@ranks(2)
def test_one_module_under_two_names():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6, bias=False, dtype=torch.float64)
            self.second = self.first

        def forward(self, x):
            return self.second(self.first(x))

    plan = {
        "parameter": {r"(first|second)\.weight": {"tp": Shard(0)}},
        "forward": {r"(first|second)\.output": [{"tp": Replicate()}]},
    }
    torch.manual_seed(0)
    plain, x = Twice(), torch.ones(2, 6, dtype=torch.float64)
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh(), plan)
    for module in (plain, model):
        module(x).square().sum().backward()
    torch.testing.assert_close(model.first.weight.grad.full_tensor(), plain.first.weight.grad)
    model = parallelize_module(Twice(), mesh(), {"parameter": plan["parameter"]})
    with pytest.raises(ImplicitRedistributionError, match="in module 'first'"):
        model(x)
