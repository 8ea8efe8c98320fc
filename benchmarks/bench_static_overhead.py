"""What a transformer block costs on one rank: static and compiled execution against hand-written tensor parallelism.

One rank of four, on a fake process group: collectives return at once, so what is timed is the work of one rank's
Python and C++ per operator. The blocks are small for the same reason. Tensor parallel over four ranks with sequence
parallelism, forward and backward. Times are processor time; each case has a process of its own, see `turns`.

Cases:
- hand-written: plain local tensors, an autograd function per boundary, see `handwritten`
- stock: `torch.distributed.tensor.parallel`, with local outputs as in torch's tutorial, and with DTensors throughout
- stock compiled: `torch.compile` of each block of the former
- vescale in its modes

Before anything is timed, every case's output and gradients are compared with one device's on four gloo ranks in
float64. On the fake group, where values mean nothing but repeat, compiled cases are compared with what they compile,
and what every case communicates is counted.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from blocks import BLOCKS, parallelize_as_stock, plan, stack
from cases import MODES, Case, check_repeats, check_same, communicated
from counting import Traffic
from handwritten import WholeEdges, by_hand, reduce_shared
from measure import Result
from targets import Target, Targets
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import Made, processor_time_in_turns

from vescale.dmodule import parallelize_module
from vescale.dtensor import init_device_mesh
from vescale_testing import run_ranks

WORLD, BATCH, SEQ, HIDDEN, HEADS = 4, 2, 32, 128, 8
DEPTHS = (1, 4)  # blocks in a row: alone, and where what is paid once per model is shared
EDGES = {"": True, ", shards in and out": False}  # title -> whether whole tensors come and go
TURN = 0.05  # seconds of a case in a round

HAND, STOCK, STOCK_DTENSOR, STOCK_COMPILED = "hand-written", "stock", "stock, DTensors throughout", "stock compiled"
EAGER, STATIC = "vescale eager", "vescale static"
CASES = (HAND, STOCK, STOCK_DTENSOR, STOCK_COMPILED, *(f"vescale {mode}" for mode in MODES))
COMPILED = {STOCK_COMPILED: STOCK, "vescale compile": STATIC}  # case -> what it compiles
GROUPS = {
    (f"{block} block" if depth == 1 else f"{depth} {block} blocks") + edge: (block, depth, whole)
    for edge, whole in EDGES.items()
    for block in BLOCKS
    for depth in DEPTHS
}


def run(num_rounds: int) -> Result:
    """Measure in forked processes, after a comparison of values on forked gloo ranks."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    names = run_ranks(_check_values, WORLD, timeout=300)[0]
    seconds: dict[str, list[float]] = {}
    reference: dict[str, str] = {}
    collectives: dict[str, str] = {}
    notes = ["values compared with one device on gloo ranks in float64: " + ", ".join(names)]
    for title, (block, depth, whole) in GROUPS.items():
        makers = {case: functools.partial(_make, title, case, block, depth, whole=whole) for case in CASES}
        times, traffic_of = processor_time_in_turns(makers, num_rounds=num_rounds, turn=TURN)
        _check_traffic(traffic_of[HAND], traffic_of[STATIC])
        seconds |= times
        reference |= dict.fromkeys(times, f"{title}, {HAND}")
        collectives |= {f"{title}, {case}": str(traffic_of[case]) for case in makers}
    shape = f"{BATCH} x {SEQ} x {HIDDEN}, {HEADS} heads, tp {WORLD}, sequence parallel, float32"
    return Targets(
        f"Forward and backward of blocks on one rank, {shape}, processor time",
        HAND,
        seconds,
        reference,
        _targets(),
        {"communicates": collectives},
        tuple(notes),
    )


def _targets() -> tuple[Target, ...]:
    bounds = [(f"{title}, ", f"{title}, {STATIC}") for title in GROUPS]
    return tuple(
        target
        for group, static in bounds
        for target in (
            Target(static, group + HAND, at_most=1.2),
            Target(group + STOCK, static, at_least=3.5),
            Target(group + STOCK_DTENSOR, static, at_least=3.5),
            Target(group + EAGER, group + STOCK_DTENSOR, at_most=1.2),
        )
    )


# ------------------------------------------------------------------------------------------------------------ cases


def _make(title: str, name: str, block: str, depth: int, *, whole: bool) -> Made:
    """Make and check a case in its process, on a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    cases = _cases(block, depth, mesh, whole=whole)
    case = cases[name]()
    case.step()
    if name in COMPILED:
        check_repeats(name, case, cases[COMPILED[name]]())
    return Made({f"{title}, {name}": case.step}, communicated(case, compiled=name in COMPILED))


def _cases(block: str, depth: int, mesh: DeviceMesh, *, whole: bool) -> dict[str, Callable[[], Case]]:
    """Return what makes each case."""
    group = mesh.get_group()

    def build() -> nn.Sequential:
        return stack(BLOCKS[block], depth, hidden=HIDDEN, num_heads=HEADS, seq=SEQ)

    def hand() -> Case:
        model, shared = by_hand(build(), group)
        inputs = _whole(requires_grad=True) if whole else _local(mesh)
        return _case(WholeEdges(model, group) if whole else model, inputs, after=lambda: reduce_shared(shared, group))

    def sharded() -> tuple[Tensor, Tensor]:
        return _whole(requires_grad=True) if whole else _sharded(mesh)

    def stock(*, local_outputs: bool) -> Case:
        inputs = _local(mesh) if local_outputs and not whole else sharded()
        return _case(parallelize_as_stock(build(), mesh, local_outputs=local_outputs, whole=whole), inputs)

    def stock_compiled() -> Case:
        case = stock(local_outputs=True)
        for part in case.model:
            part.compile()
        return case

    def ours(mode: str) -> Case:
        return _case(parallelize_module(build(), mesh, plan(whole=whole), mode=mode), sharded())

    return {
        HAND: hand,
        STOCK: lambda: stock(local_outputs=True),
        STOCK_DTENSOR: lambda: stock(local_outputs=False),
        STOCK_COMPILED: stock_compiled,
        **{f"vescale {mode}": functools.partial(ours, mode) for mode in MODES},
    }


def _case(model: nn.Module, inputs: tuple[Tensor, Tensor], after: Callable[[], None] = lambda: None) -> Case:
    x, gradient = inputs
    return Case(model, lambda: model(x), gradient, {"x": x}, after)


def _whole(*, requires_grad: bool) -> tuple[Tensor, Tensor]:
    """Return the input and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    dtype = torch.get_default_dtype()
    return x.to(dtype).requires_grad_(requires_grad), gradient.to(dtype)


def _local(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return this rank's part of the input, a leaf, and of the output's gradient."""
    x, gradient = (whole.chunk(mesh.size(), 1)[mesh.get_local_rank()].clone() for whole in _whole(requires_grad=False))
    return x.requires_grad_(), gradient


def _sharded(mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Return the same as DTensors."""
    x, gradient = (DTensor.from_local(local.detach(), mesh, [Shard(1)]) for local in _local(mesh))
    return x.requires_grad_(), gradient


# ------------------------------------------------------------------------------------------------------------ checks


def _check_traffic(hand: Traffic, static: Traffic) -> None:
    """Stop where static mode gathers or scatters other than the hand-written code; it may bucket all-reduces."""

    def boundaries(log: Traffic) -> tuple:
        return tuple((kind, log.count.get(kind), log.sent_bytes.get(kind)) for kind in ("all_gather", "reduce_scatter"))

    if boundaries(hand) != boundaries(static):
        raise RuntimeError(f"the same boundaries should communicate the same: hand-written {hand}, static {static}")


def _check_values() -> list[str]:
    """Compare every case that is not compiled with one device, on this rank of a real group; return their names."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    names: list[str] = []
    for block in BLOCKS:
        alone = stack(BLOCKS[block], 2, hidden=HIDDEN, num_heads=HEADS, seq=SEQ)
        reference = _case(alone, _whole(requires_grad=True))
        for whole in EDGES.values():
            for name, make in _cases(block, 2, mesh, whole=whole).items():
                if name not in COMPILED:
                    check_same(name, make(), reference)
                    names.append(name)
    return list(dict.fromkeys(names))
