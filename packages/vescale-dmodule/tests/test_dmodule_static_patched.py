"""What a static program patches into a module while it runs is invisible to the module and to its users.

Gradients delivered at the end of a pass, boundaries called without hooks, parameters and children replaced by users.
"""

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from vescale.dtensor import DTensor, Replicate, Shard, init_device_mesh
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}
PLAN = {
    "parameter": {r"up\.(weight|bias)": S0, r"down\.weight": S1},
    "forward": {"input": [S1], r"up\.input": [R], r"down\.output": [S1], "output": [R]},
}
X = torch.linspace(-1, 1, 72, dtype=torch.float64).view(3, 4, 6)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.double()

    def forward(self, x):
        return self.norm(x) + self.down(self.up(self.norm(x)).relu())


@ranks(2)
def test_the_patch_is_not_seen(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def step(model, x=X):
        model(x).square().sum().backward()

    def fail_in_backward(model):
        """The gradients of a pass that failed are in none that follows, also where the graph is used again."""
        step(model)
        x = X.clone().requires_grad_()
        handle = x.register_hook(lambda _gradient: 1 / 0)
        loss = model(x).square().sum()
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
        model.zero_grad()
        step(model)
        found = {f"after {name}": p.grad.clone() for name, p in model.named_parameters()}
        handle.remove()
        model.zero_grad()
        loss.backward()
        return found

    def accumulate(model):
        """Gradients of several passes, of which some keep those before, in the same objects."""
        step(model)
        kept = {name: p.grad for name, p in model.named_parameters()}
        step(model, X * 2)
        assert all(p.grad is kept[name] for name, p in model.named_parameters())
        model.norm.zero_grad()  # some are empty, others are not
        step(model, X * 3)
        return {}

    def hook_boundaries(model):
        """Hooks that come and go on modules with a boundary, and hooks of all modules."""
        seen = []
        step(model)
        handles = [
            model.up.register_forward_pre_hook(lambda _m, args: (args[0] * 2,)),
            model.down.register_forward_hook(lambda _m, _args, output: output + 1),
            model.down.register_full_backward_hook(lambda _m, _into, _out: seen.append("backward")),
        ]
        for _ in range(2):
            step(model)
        for handle in handles:
            handle.remove()
        step(model)
        handle = register_module_forward_hook(lambda module, _args, _output: seen.append(type(module).__name__))
        step(model)
        handle.remove()
        step(model)
        # the shapes are recorded already; a recording would call them more often
        assert seen == [*["backward"] * 2, "LayerNorm", "LayerNorm", "Linear", "Linear", "Layer"], seen
        return {}

    def replace_forward(model):
        """A forward that is set on the module itself, and one that is called without the boundary."""
        step(model)
        own = model.up.forward
        model.up.forward = lambda x: own(x) * 2
        step(model)
        del model.up.forward
        step(model)
        return {}

    for program in (fail_in_backward, accumulate, hook_boundaries, replace_forward):
        in_all_modes(Layer, PLAN, mesh, program)


@ranks(2)
def test_boundaries_are_called_directly(in_all_modes):
    """Not seen from outside, so asked: the modules with a boundary have no other call left than the short one."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = []

    class Asking(Layer):
        def forward(self, x):
            found.append(["_compiled_call_impl" in vars(part) for part in (self.norm, self.up, self.down)])
            return super().forward(x)

    def twice(model):
        for _ in range(2):
            model(X).square().sum().backward()
        return {}

    model = in_all_modes(Asking, PLAN, mesh, twice, modes=("static",))
    # the plain module, two dry runs, the calls themselves
    assert found == [*[[False] * 3] * 4, *[[False, True, True]] * 2], found
    assert not any("_compiled_call_impl" in vars(part) for part in model.modules())
    assert all(isinstance(p.grad, DTensor) for p in model.parameters())


class Hiding(nn.Module):
    """Finds attributes in a way of its own."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(1, 2, 6, dtype=torch.float64))

    def __getattr__(self, name):
        found = super().__getattr__(name)
        return found * 3 if name == "gain" else found

    def forward(self, x):
        return x * self.gain


class Looking(Layer):
    """With children of all kinds, and one that its class hides."""

    hidden = None

    def __init__(self):
        super().__init__()
        self.act, self.extra, self.hiding, self.hidden = nn.Tanh(), nn.ReLU(), Hiding(), nn.ReLU()
        self.register_module("empty", None)
        self.fails, self.changes = False, False

    def forward(self, x):
        assert self.hidden is None
        assert self.empty is None
        if self.fails:
            raise ZeroDivisionError
        if self.changes:
            self.act = nn.Sigmoid()
        return self.act(super().forward(self.hiding(x)))


@ranks(2)
def test_replaced_children_and_failures(in_all_modes):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def step(model):
        model(X).square().sum().backward()
        assert not {"weight", "_compiled_call_impl"} & {key for part in model.modules() for key in vars(part)}

    def replace_a_child(model):
        step(model)
        model.act = nn.Softplus()
        step(model)
        return {}

    def delete_a_child(model):
        step(model)
        del model.extra
        step(model)
        return {}

    def replace_in_forward(model):
        step(model)
        model.changes = True
        step(model)
        assert isinstance(model.act, nn.Sigmoid)
        return {}

    def fail(model):
        step(model)
        model.fails = True
        with pytest.raises(ZeroDivisionError):
            step(model)
        model.fails = False
        step(model)
        return {}

    for program in (replace_a_child, delete_a_child, replace_in_forward, fail):
        in_all_modes(Looking, PLAN, mesh, program, modes=("eager", "static"))
