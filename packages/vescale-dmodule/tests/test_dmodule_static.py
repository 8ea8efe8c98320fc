"""Static mode gives what eager mode gives, bit for bit, whatever a training program does with the model."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from torch import nn

from vescale.dmodule import PlanError, no_sync
from vescale.dtensor import DTensor, Replicate, Shard, init_device_mesh
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}


def mesh_of(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


class Forwards:
    """Counts the forwards of a model; a recording adds two to that of the caller."""

    def __init__(self, model):
        self.num_calls = 0
        self.counter = itertools.count()  # numbers and lists of a hook would be restored after a recording
        model.register_forward_pre_hook(self.count)

    def count(self, _model, _args):
        next(self.counter)

    @property
    def num(self):
        """Return how many forwards there were."""
        return next(copy.copy(self.counter))

    @property
    def num_recordings(self):
        """Return how many calls were recorded, after `num_calls` calls."""
        recordings, rest = divmod(self.num - self.num_calls, 2)
        assert not rest
        return recordings


def loss_of(model, ids):
    return model(ids).log_softmax(-1).square().sum()


def is_parallel(model):
    return any(isinstance(p, DTensor) for p in model.parameters())


# ------------------------------------------------------------------------------------------------- training


CASES = {2: [(False, 0.0, False), (True, 0.1, False)], 3: [(True, 0.1, True)]}


@pytest.mark.parametrize("size", [2, 3])
def test_training(size, tiny, in_all_modes):
    """Several steps with an optimizer and accumulation, of batches of several lengths, then evaluation."""
    recordings = set()

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found, forwards = {}, Forwards(model)
        for step, (batch, length) in enumerate([(2, 8), (2, 7), (1, 5), (2, 8), (2, 7)]):
            loss = loss_of(model, tiny.ids(batch, length, seed=step))
            loss.backward()
            found[f"loss {step}"] = loss.detach()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found |= {f"evaluated {step}": model(tiny.ids(2, 8, seed=step)) for step in range(3)}
        model.train()
        loss_of(model, tiny.ids(2, 8)).backward()
        forwards.num_calls = 5 + 3 + 1
        assert forwards.num_recordings in (0, 4)  # three shapes, and one more without gradients, the second time
        recordings.add(forwards.num_recordings)
        return found

    @ranks(size)
    def on_every_rank():
        mesh = mesh_of(size)
        for sequence_parallel, dropout, tied in CASES[size]:
            make = functools.partial(tiny, 1, dropout=dropout, tied=tied)
            in_all_modes(make, tiny.plan(sequence_parallel), mesh, train)
        assert recordings == {0, 4}
        if size == 2:  # other masks are seen
            seeds = iter(range(9))
            with pytest.raises(AssertionError, match="differs by"):
                in_all_modes(
                    lambda: tiny(1, dropout=0.5),
                    tiny.plan(),
                    mesh,
                    lambda m: (torch.manual_seed(next(seeds)), {"loss": loss_of(m, tiny.ids())})[1],
                )

    on_every_rank()


@ranks(2)
def test_what_a_program_does_between_steps(tiny, in_all_modes):
    mesh, ids = mesh_of(2), tiny.ids()

    def freeze_and_thaw(model):
        found = {}
        for step, trained in enumerate((True, False, False, True, True)):
            model.layers[0].requires_grad_(trained)
            model.embed.requires_grad_(trained)
            model.zero_grad()
            loss_of(model, ids).backward()
            assert (model.layers[0].up.weight.grad is not None) == trained
            found[f"norm {step}"] = model.norm.weight.grad
        return found

    def load(model):
        kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = {}
        for step in range(4):
            if step == 2:
                model.load_state_dict(kept)
            optimizer.zero_grad()
            torch.manual_seed(3)
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            found[f"loss {step}"] = loss.detach()
        assert torch.equal(found["loss 0"], found["loss 2"])
        assert not torch.equal(found["loss 0"], found["loss 1"])
        return found

    def assign(model):
        loss_of(model, ids).backward()
        values = {name: value.detach().clone() * 2 for name, value in model.state_dict().items()}
        model.load_state_dict(values, assign=True)
        model.norm.weight = nn.Parameter(model.norm.weight.detach() * 3)
        model.zero_grad()
        loss_of(model, ids).backward()
        return {}

    def copy_deeply(model):
        loss_of(model, ids).backward()
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.head.weight.mul_(2)
        other.zero_grad()  # the copy of a plain parameter has no gradient
        loss_of(other, ids).backward()
        loss_of(model, ids).backward()
        return {"copy": other.head.weight.grad, "up of the copy": other.layers[0].up.weight.grad}

    def accumulate(model):
        parallel = is_parallel(model)
        with no_sync(model) if parallel else contextlib.nullcontext():
            for seed in range(2):
                loss_of(model, tiny.ids(seed=seed)).backward()
        if parallel:
            assert any(p.is_partial() for p in model.norm.weight.grad.placements)
        loss_of(model, tiny.ids(seed=5)).backward()
        return {}

    def autocast(model):
        found = {}
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                out = model(ids)
            out.float().square().mean().backward()
            found[f"output {step}"] = out.detach()
        found["without"] = model(ids).detach()
        assert found["without"].dtype != torch.bfloat16
        return found

    def infer(model):
        found, forwards = {}, Forwards(model)
        for step in range(3):
            for name, context in (("inference", torch.inference_mode()), ("no grad", torch.no_grad())):
                with context:
                    found[f"{name} {step}"] = model(ids).clone()
            forwards.num_calls += 2
            assert forwards.num_recordings <= 1  # both kinds of call are alike; the first runs in eager mode
        return found

    def retain(model):
        loss = loss_of(model, ids)
        loss.backward(retain_graph=True)
        loss.backward()
        one, two = loss_of(model, ids), loss_of(model, tiny.ids(seed=3))
        two.backward()  # two forwards, then two backwards
        one.backward()
        return {}

    for program in (freeze_and_thaw, load, assign, copy_deeply, infer, retain):
        in_all_modes(lambda: tiny(1, dropout=0.1), tiny.plan(sequence_parallel=True), mesh, program)
    in_all_modes(lambda: tiny(1), tiny.plan(sequence_parallel=True), mesh, accumulate, bitwise=False)
    in_all_modes(lambda: tiny(1, dtype=torch.float32), tiny.plan(), mesh, autocast, bound=0.1)


# ------------------------------------------------------------------------------------------------ what surrounds a call


class Stateful(nn.Module):
    """Counts its calls, averages in a buffer, keeps its last activation, and fails on request."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.num_calls, self.last, self.fails = 0, None, False
        self.double()

    def forward(self, x):
        hidden = self.up(x).relu()
        if self.fails:
            raise KeyError("on purpose")
        self.num_calls += 1
        self.calls += 1
        y = self.down(hidden)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.last = y
        return y * self.calls


PLAN = {
    "parameter": {r"up\.(weight|bias)": S0, r"down\.weight": S1},
    "forward": {r"up\.input": [R], r"down\.output": [R]},
}
X = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)


@ranks(2)
def test_state_that_the_forward_changes_changes_once(in_all_modes):
    def program(model):
        found = {}
        for step in range(3):
            y = model(X[: 4 - step])
            y.square().sum().backward()
            found |= {f"output {step}": y.detach(), f"mean {step}": model.mean.clone()}
            assert model.num_calls == model.calls.item() == step + 1
        return found

    in_all_modes(Stateful, PLAN, mesh_of(2), program)


@ranks(2)
def test_an_exception_in_forward_leaves_the_module_as_it_was(in_all_modes):
    def program(model):
        parallel = is_parallel(model)
        for _ in range(2):  # before and after the first recording
            model.fails = True
            with pytest.raises(KeyError, match="on purpose"):
                model(X)
            assert is_parallel(model) == parallel
            model.fails = False
            model(X).square().sum().backward()
        with pytest.raises((TypeError, PlanError)):
            model("no tensor")
        model(X).square().sum().backward()
        return {}

    in_all_modes(Stateful, PLAN, mesh_of(2), program)


@ranks(2)
def test_hooks_of_the_program_run_once_with_whole_gradients(in_all_modes):
    def program(model):
        parallel, seen = is_parallel(model), []
        model.up.register_forward_hook(lambda _m, _args, output: output * 2)
        model.register_forward_pre_hook(lambda _m, args: (args[0] + 1,))
        model.down.register_full_backward_hook(lambda _m, _into, _out: seen.append("down"))
        model(X).square().sum().backward()

        def after(parameter):
            seen.append(type(parameter.grad))
            parameter.grad.mul_(5)

        model.down.weight.register_hook(lambda grad: (seen.append(type(grad)), grad * 3)[1])
        model.up.bias.register_post_accumulate_grad_hook(after)
        for _ in range(2):
            seen.clear()
            model(X).square().sum().backward()
            assert sorted(str(kind) for kind in seen if kind == "down") == ["down"]
            kinds = [kind for kind in seen if kind != "down"]
            assert len(kinds) == 2
            assert all(issubclass(kind, DTensor) == parallel for kind in kinds)
        assert is_parallel(model) == parallel
        return {}

    in_all_modes(Stateful, PLAN, mesh_of(2), program)


@ranks(2)
def test_tensors_that_come_and_go(in_all_modes):
    """Arguments that need a gradient, DTensors as arguments, results that stay sharded."""
    mesh = mesh_of(2)

    def differentiate(model):
        x = X.clone().requires_grad_()
        for _ in range(2):
            model(x).square().sum().backward()
        (again,) = torch.autograd.grad(model(x * 2).sum(), x)
        return {"x": x.grad, "again": again}

    in_all_modes(Stateful, PLAN, mesh, differentiate)

    rows = {**PLAN, "forward": {r"up\.input": [R], r"down\.output": [R], "output": [S0]}}

    def sharded(model):
        x = X.clone()
        if is_parallel(model):
            x = DTensor.from_local(x.chunk(2)[mesh.get_local_rank()], mesh, [Shard(0)])
        x.requires_grad_()
        found = {}
        for step in range(2):
            y = model(x)
            assert isinstance(y, DTensor) == is_parallel(model)
            (y * y).sum().backward()
            found[f"output {step}"] = y.detach()
        return {**found, "x": x.grad}

    in_all_modes(Stateful, rows, mesh, sharded)
    with pytest.raises(AssertionError, match="differs by"):
        in_all_modes(Stateful, rows, mesh, lambda m: {"x": sharded(m)["x"] + is_parallel(m)})
