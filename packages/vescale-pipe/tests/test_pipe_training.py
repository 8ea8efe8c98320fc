"""The returned loss behaves as a loss of plain PyTorch: steps, accumulation, scaling, hooks, evaluation, freezing."""

import pytest
import torch
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import ranks


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


def build():
    torch.manual_seed(0)
    return Model().double()


def data(seed=1, rows=8):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(model, x):
    return model(x)


def make_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)


@ranks(2)
def test_three_optimizer_steps(train_one_process, pipeline_mesh):
    expected = train_one_process(build(), loss_of, {"x": data()}, 4, steps=3, make_optimizer=make_adamw)
    model = build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 4))
    optimizer = make_adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss = engine(data())
        loss.backward()
        optimizer.step()
        assert torch.equal(loss, expected.losses[step])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.parameters[name]), name


@ranks(2)
def test_gradients_accumulate_over_calls(pipeline_mesh):
    reference, model = build(), build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    for seed in (1, 2):
        for rows in data(seed).chunk(2):
            (reference(rows) / 2).backward()
        engine(data(seed)).backward()
    gradients = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        # the engine sums the micro-batches of a call first: (a+b) + (c+d), where the loop computes ((a+b)+c)+d
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-12, atol=1e-15)


@ranks(2)
def test_a_scaled_loss_scales_the_gradients(pipeline_mesh):
    model = build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    engine(data()).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    (engine(data()) * 3).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, 3 * plain[name])


@ranks(2)
def test_hooks_run_as_in_a_loop(pipeline_mesh):
    """Gradient hooks see each micro-batch's gradient once; post-accumulate hooks see the step's sum once."""
    model = build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 4))
    engine(data()).backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    seen, finished = [], []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(1) or 2 * grad)
        parameter.register_post_accumulate_grad_hook(lambda p: finished.append(p.grad.clone()))
    engine(data()).backward()
    count = len(list(model.parameters()))
    assert (len(seen), len(finished)) == (4 * count, count)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, 2 * plain[name])


@ranks(2)
def test_a_removed_hook_is_gone(pipeline_mesh):
    model = build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    calls = []
    handle = next(model.parameters()).register_hook(lambda grad: calls.append(grad))
    engine(data()).backward()
    assert len(calls) == 2
    handle.remove()
    engine(data()).backward()
    assert len(calls) == 2


@ranks(2)
def test_a_second_backward_fails_as_always(pipeline_mesh):
    loss = PipelineEngine(build(), pipeline_mesh(), PipelinePlan("1f1b", 2))(data())
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


@ranks(2)
def test_a_loss_that_is_not_differentiated_leaves_no_gradients(pipeline_mesh):
    model = build()
    PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))(data())
    assert all(p.grad is None for p in model.parameters())


@ranks(3)
def test_evaluation_runs_forwards_only(pipeline_mesh):
    reference = build().eval()
    model = build().eval()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 4))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            loss = engine(data())
            expected = sum(reference(rows) / 4 for rows in data().chunk(4))
        assert torch.equal(loss, expected)
        assert not loss.requires_grad
    engine(data()).backward()  # gradients work afterwards, in eval mode too
    assert all(p.grad is not None for p in model.parameters())


@ranks(2)
def test_new_shapes_are_recorded_anew(pipeline_mesh):
    model, reference = build(), build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    for rows in (8, 4, 8, 12):
        loss = engine(data(rows=rows))
        parts = [reference(chunk) / 2 for chunk in data(rows=rows).chunk(2)]
        assert torch.equal(loss, parts[0].detach() + parts[1].detach())
        loss.backward()
    assert len(engine._programs) == 3


@ranks(2)
def test_parameters_may_be_frozen_and_replaced_between_steps(pipeline_mesh, differences, train_one_process):
    reference, model = build(), build()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    engine(data()).backward()
    for m in (reference, model):
        m.zero_grad()
        if hasattr(m.blocks[0], "weight"):  # on the stage that has it: the other learns of it from the metadata
            m.blocks[0].requires_grad_(False)
            m.blocks[1].weight = nn.Parameter(torch.full((4, 4), 0.1, dtype=torch.float64))
    expected = train_one_process(reference, loss_of, {"x": data()}, 2)
    loss = engine(data())
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    assert differences(model, expected) == {}


@ranks(2)
def test_buffers_are_updated_once_per_microbatch(pipeline_mesh):
    def with_norm():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4)).double()

    reference, model = with_norm(), with_norm()
    plan = PipelinePlan("1f1b", 2)
    engine = PipelineEngine(model, pipeline_mesh(), plan, loss_fn=torch.mean, per_microbatch=True)
    engine(data()).backward()
    for rows in data().chunk(2):
        reference(rows)
    buffers = dict(reference.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@ranks(2)
def test_loss_function_with_a_target(pipeline_mesh, differences, train_one_process):
    def build_plain():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)]).double()

    def loss_of_target(model, x, target):
        return nn.functional.mse_loss(model(x), target)

    batch = {"x": data(1), "target": data(2)}
    expected = train_one_process(build_plain(), loss_of_target, batch, 4)
    model = build_plain()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("gpipe", 4), loss_fn=nn.functional.mse_loss)
    loss = engine(batch["x"], target=batch["target"])
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    assert differences(model, expected) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@ranks(2)
def test_other_dtypes_bit_for_bit(dtype, pipeline_mesh, differences, train_one_process):
    batch = {"x": data().to(dtype)}
    expected = train_one_process(build().to(dtype), loss_of, batch, 4)
    model = build().to(dtype)
    loss = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 4))(**batch)
    loss.backward()
    assert loss.dtype == dtype
    assert torch.equal(loss, expected.losses[0])
    assert differences(model, expected) == {}


@ranks(2)
def test_autocast(pipeline_mesh, differences, train_one_process):
    def loss_in_autocast(model, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    batch = {"x": data().float()}
    expected = train_one_process(build().float(), loss_in_autocast, batch, 2)
    model = build().float()
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2))
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        loss = engine(**batch)
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    assert differences(model, expected) == {}
