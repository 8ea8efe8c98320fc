"""The reference of every engine test: the unmodified program in one process, as a gradient-accumulation loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclasses.dataclass
class Expected:
    """Losses per step, and parameters and gradients after the last step."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    parameters: dict[str, torch.Tensor]


def _rows(tree: Any, count: int, index: int) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.chunk(count)[index]
    if isinstance(tree, dict):
        return {key: _rows(item, count, index) for key, item in tree.items()}
    return [_rows(item, count, index) for item in tree] if isinstance(tree, list | tuple) else tree


def _train_one_process(
    model: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batch: dict[str, Any],
    num_microbatches: int,
    *,
    steps: int = 1,
    make_optimizer: Callable[[list], torch.optim.Optimizer] | None = None,
) -> Expected:
    """Run ``(loss_of(model, **rows) / n).backward()`` over the micro-batches, ``steps`` times."""
    optimizer = make_optimizer(list(model.parameters())) if make_optimizer else None
    losses = []
    for _ in range(steps):
        model.zero_grad()
        total = None
        for index in range(num_microbatches):
            loss = loss_of(model, **_rows(batch, num_microbatches, index)) / num_microbatches
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        losses.append(total)
        if optimizer is not None:
            optimizer.step()
    return Expected(
        losses,
        {name: p.grad for name, p in model.named_parameters()},
        {name: p.detach() for name, p in model.named_parameters()},
    )


def _pipeline_mesh() -> DeviceMesh:
    """Return the mesh of all ranks as pipeline stages."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))["pp"]


def _differences(model: nn.Module, expected: Expected) -> dict[str, float]:
    """Return the largest difference of each gradient of this stage that is not bit for bit as expected."""
    found = {}
    for name, parameter in model.named_parameters():
        mine, theirs = parameter.grad, expected.gradients[name]
        if (mine is None) != (theirs is None):
            found[name] = float("inf")
        elif mine is not None and not torch.equal(mine, theirs):
            found[name] = (mine - theirs).abs().max().item()
    return found


@pytest.fixture
def train_one_process():
    return _train_one_process


@pytest.fixture
def pipeline_mesh():
    return _pipeline_mesh


@pytest.fixture
def differences():
    return _differences
