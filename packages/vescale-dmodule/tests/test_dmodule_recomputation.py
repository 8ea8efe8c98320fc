"""Activation checkpointing recomputes the same values, dropout included, and the model stays in its mode."""

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale_testing import ranks


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_hugging_face_checkpointing_equals_one_process(use_reentrant, build, train, assert_same_pass):
    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for family, sequence_parallel in (("mixtral", True), ("llama", False), ("gpt2", True)):
            expected = train(build(family, dropout=0.1), use_cache=False)
            model = build(family, dropout=0.1)
            plan = plans.plan_for(model, degree=2, sequence_parallel=sequence_parallel)
            parallelize_module(model, mesh, plan)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
            assert_same_pass(train(model, use_cache=False), expected)
            assert no_function_mode_is_left()

    on_every_rank()


class Recomputed(nn.Module):
    """Checkpoints a function of its own, not a module."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.use_reentrant = use_reentrant
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.calls = 0

    def inner(self, x):
        self.calls += 1
        return self.down(nn.functional.dropout(self.up(x).relu(), 0.3))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


@ranks(2)
def test_a_checkpointed_function():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {
        "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
        "forward": {r"down\.output": [{"tp": Replicate()}]},
    }
    for use_reentrant in (False, True):
        torch.manual_seed(0)
        plain = Recomputed(use_reentrant).double()
        model = Recomputed(use_reentrant).double()
        model.load_state_dict(plain.state_dict())
        parallelize_module(model, mesh, plan)
        grads = []
        for module in (plain, model):
            torch.manual_seed(3)
            x = torch.ones(5, 6, dtype=torch.float64, requires_grad=True)
            module(x).square().sum().backward()
            assert module.calls == 2
            grads.append(x.grad)
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-12, atol=0)
        for name, parameter in plain.named_parameters():
            gradient = model.get_parameter(name).grad.full_tensor()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=1e-13)
        assert no_function_mode_is_left()


def no_function_mode_is_left():
    """Whether a mode pushed now is the only one: it sees each call once and hands it to torch itself."""
    seen = []

    class Outermost(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(torch._C._len_torch_function_stack())
            return func(*args, **(kwargs or {}))

    with Outermost():
        torch.ones(1).add(1)
    return set(seen) == {0}
