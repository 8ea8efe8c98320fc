"""A module may be parallelized before its engine is made, or afterwards: the losses and gradients are the same bits."""

import pytest
import torch

from vescale.dmodule import parallelize_module
from vescale.dtensor import init_device_mesh
from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import gather_full, halved, ranks

ROWS = 8


def build(kind):
    torch.manual_seed(0)
    return kind().double()


def batch(kind):
    return torch.randn(ROWS, kind.width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def train(kind, mesh, mode, *, is_last, **options):
    """Return the losses of two steps, and the gradients of this stage."""
    model = build(kind)
    if is_last:
        parallelize_module(model, mesh["tp"], kind.module_plan, mode=mode)
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan("1f1b", 2), **options)
    if not is_last:
        parallelize_module(model, mesh["tp"], kind.module_plan, mode=mode)
    torch.manual_seed(2)
    losses = []
    for _ in range(2):  # recorded, then followed
        loss = engine(batch(kind))
        loss.backward()
        losses.append(loss.detach())
    return losses, {name: gather_full(p.grad) for name, p in model.named_parameters()}


@halved
@pytest.mark.parametrize("options", [{}, {"per_microbatch": True}], ids=["parts of a batch", "per micro-batch"])
@pytest.mark.parametrize("mode", ["eager", "static"])
@ranks(4)
def test_before_and_after(mode, options, layers_class):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    expected_losses, expected = train(layers_class, mesh, mode, is_last=False, **options)
    losses, found = train(layers_class, mesh, mode, is_last=True, **options)
    assert all(map(torch.equal, losses, expected_losses))
    assert found.keys() == expected.keys()
    assert all(torch.equal(grad, expected[name]) for name, grad in found.items())
    if options:
        return
    model = build(layers_class)  # one process, on the whole batch
    torch.manual_seed(2)
    for loss in losses:
        alone = model(batch(layers_class))
        alone.backward()
        torch.testing.assert_close(loss, alone.detach(), rtol=0, atol=1e-12)
    for name, grad in found.items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=0, atol=1e-12)


@ranks(4)
def test_the_numbers_that_dropout_draws_count(layers_class):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    losses, _ = train(layers_class, mesh, "static", is_last=True)
    assert not torch.equal(losses[0], losses[1])  # of the same batch and weights
