"""Static mode gives what eager mode gives, bit for bit, whatever a training program does with the model."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from vescale.dmodule import NotLocalFriendlyError, no_sync, parallelize_module
from vescale.dmodule._execution import execution_of
from vescale.dmodule._static import _program
from vescale.dtensor import DTensor, Replicate, Shard, init_device_mesh
from vescale_testing import ranks

R, S0, S1 = {"tp": Replicate()}, {"tp": Shard(0)}, {"tp": Shard(1)}


def mesh_of(size):
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


@contextlib.contextmanager
def counted_rehearsals():
    """Count the calls that static mode rehearses."""
    learned, learn = [], _program.learn

    def counting(program, args, kwargs):
        learned.append(program.name)
        learn(program, args, kwargs)

    _program.learn = counting
    try:
        yield learned
    finally:
        _program.learn = learn


def loss_of(model, ids):
    return model(ids).log_softmax(-1).square().sum()


def is_parallel(model):
    return any(isinstance(p, DTensor) for p in model.parameters())


# ------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("size", [2, 3])
def test_training(size, tiny, in_all_modes):
    """Several steps with an optimizer and accumulation, of batches of several lengths, then evaluation."""

    def train(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = {}
        with counted_rehearsals() as rehearsals:
            for step, (batch, length) in enumerate([(2, 8), (2, 8), (3, 7), (1, 5), (2, 8), (3, 7)]):
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
        assert len(rehearsals) in (0, 4)  # three shapes, and one more without gradients, the second time
        return found

    @ranks(size)
    def on_every_rank():
        mesh = mesh_of(size)
        for sequence_parallel, dropout, tied in ((False, 0.0, False), (True, 0.1, False), (False, 0.1, True)):
            in_all_modes(lambda: tiny(dropout=dropout, tied=tied), tiny.plan(sequence_parallel), mesh, train)
        with pytest.raises(AssertionError, match="differs by"):  # other masks are seen
            seeds = iter(range(9))
            in_all_modes(
                lambda: tiny(dropout=0.5), tiny.plan(), mesh, lambda m: (torch.manual_seed(next(seeds)), train(m))[1]
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
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            found[f"loss {step}"] = loss.detach()
        assert torch.equal(found["loss 0"], found["loss 2"])
        assert not torch.equal(found["loss 0"], found["loss 1"])
        return found

    def assign(model):
        loss_of(model, ids).backward()
        model.load_state_dict({name: value.clone() * 2 for name, value in model.state_dict().items()}, assign=True)
        model.norm.weight = nn.Parameter(model.norm.weight.detach() * 3)
        model.zero_grad()
        loss_of(model, ids).backward()
        return {}

    def copy_deeply(model):
        loss_of(model, ids).backward()
        twin = copy.deepcopy(model)
        before = twin.head.weight.grad.clone()
        with torch.no_grad():
            twin.head.weight.mul_(2)
        loss_of(twin, ids).backward()
        loss_of(model, ids).backward()
        return {"twin": twin.head.weight.grad, "twin's before": before, "twin's up": twin.layers[0].up.weight.grad}

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
        found = {}
        with counted_rehearsals() as rehearsals:
            for step in range(3):
                for name, context in (("inference", torch.inference_mode()), ("no grad", torch.no_grad())):
                    with context:
                        found[f"{name} {step}"] = model(ids).clone()
                assert len(rehearsals) <= step
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
        in_all_modes(lambda: tiny(dropout=0.1), tiny.plan(sequence_parallel=True), mesh, program)
    in_all_modes(tiny, tiny.plan(sequence_parallel=True), mesh, accumulate, bitwise=False)
    in_all_modes(lambda: tiny(dtype=torch.float32), tiny.plan(), mesh, autocast, bound=0.1)
