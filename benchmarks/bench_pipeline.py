"""A pipeline's step beside torch.distributed.pipelining, with the same stages and schedule, on gloo ranks.

Stages are tiny, so that what a step costs the host is measured: four linear layers of width 32, eight rows per
micro-batch. Times are of ten steps; processor time is that of a rank with its threads for messages. Losses are compared
before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from measure import Result, time_in_turns, with_processor_time
from targets import Target, Targets
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import run_ranks

RANKS = (2, 4)
WIDTH, LAYERS, ROWS, MICROBATCHES, STEPS = 32, 4, 8, 8, 10
CASES = {
    "1f1b": (schedules.Schedule1F1B, 1),
    "interleaved_1f1b": (schedules.ScheduleInterleaved1F1B, 2),
    "interleaved_zero_bubble": (schedules.ScheduleInterleavedZeroBubble, 2),
    "zb_v": (schedules.ScheduleZBVZeroBubble, 2),
}


def run(num_rounds: int) -> Result:
    """Measure two and four ranks; the times are those of the first."""
    seconds: dict[str, list[float]] = {}
    for num_ranks in RANKS:
        wall, processor = run_ranks(_on_a_rank, num_ranks, num_rounds, timeout=1500)[0]
        seconds |= {f"{name}, {num_ranks} ranks": times for name, times in wall.items()}
        seconds |= {f"{name}, {num_ranks} ranks, processor": times for name, times in processor.items()}
    reference = {name: name.replace("ours", "torch") for name in seconds}
    targets = tuple(Target(name, of, at_most=1.0) for name, of in reference.items() if name != of)
    return Targets("Pipelines of tiny stages", "torch", seconds, reference, targets)


def _stage() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _on_a_rank(num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    torch.set_num_threads(1)
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))["pp"]
    x, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(0))
    cases: dict[str, Callable[[], object]] = {}
    processor: dict[str, list[float]] = {}
    for name, (schedule, per_rank) in CASES.items():
        ours, theirs = _ours(name, per_rank, mesh, x, target), _torchs(schedule, name, per_rank, rank, x, target)
        expected, found = theirs(), ours()
        if rank == 0 and name == "zb_v":  # the loss is on rank 0 in torch's, too
            torch.testing.assert_close(found, expected)
        for who, step in (("ours", ours), ("torch", theirs)):
            case = f"{name} of {who}"
            processor[case] = []
            cases[case] = with_processor_time(_several(step), processor[case])
    wall = time_in_turns(cases, num_rounds=num_rounds)
    return wall, {name: times[-num_rounds:] for name, times in processor.items()}


def _several(step: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def _stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [_stage() for _ in range(count)]


def _ours(name: str, per_rank: int, mesh, x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    model = nn.Sequential(*_stages(per_rank * mesh.size()))
    options = {"stages_per_rank": per_rank} if name.startswith("interleaved") else {}
    plan = PipelinePlan(name, MICROBATCHES, **options)
    engine = PipelineEngine(model, mesh, plan, loss_fn=_loss, per_microbatch=True)

    def step() -> Tensor:
        model.zero_grad()
        loss = engine(x, target=target)
        loss.backward()
        return loss.detach()

    return step


def _torchs(schedule, name: str, per_rank: int, rank: int, x: Tensor, target: Tensor) -> Callable[[], Tensor | None]:
    world = dist.get_world_size()
    modules = _stages(per_rank * world)
    mine = [rank] if per_rank == 1 else [rank, 2 * world - 1 - rank if name == "zb_v" else rank + world]
    device = torch.device("cpu")
    stages = [PipelineStage(modules[index], index, len(modules), device) for index in mine]
    runtime = schedule(stages[0] if per_rank == 1 else stages, MICROBATCHES, loss_fn=_loss)
    is_first, is_last = 0 in mine, len(modules) - 1 in mine

    def step() -> Tensor | None:
        for index in mine:
            modules[index].zero_grad()
        losses: list[Tensor] = []
        runtime.step(*((x,) if is_first else ()), **({"target": target, "losses": losses} if is_last else {}))
        return torch.stack(losses).mean().detach() if is_last else None

    return step
