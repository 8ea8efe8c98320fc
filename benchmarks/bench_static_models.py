"""What a whole tiny LLaMA or Mixtral of Hugging Face costs on one rank: static mode against hand-written parallelism.

As `static_overhead`, with unmodified models: one rank of four on a fake process group, processor time, tensor and
sequence parallelism; forward and backward, and the same with fused AdamW. Our parameters are DTensors: torch's dispatch
handles each of them in a step of AdamW. `DistributedOptimizer` updates their local tensors, so it has a row of its own.
Hand-written: local shards in place of the parameters and a hook per boundary, see `huggingface`. Mixtral's tokens are
dealt to the experts in turn. By hand it is written twice: as cheap as possible, and with the collectives of the
package's plan, which adds at the experts.

Before anything is timed, every case is compared with one device on four gloo ranks in float64, with the router's
routes.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable

import huggingface
import torch
import torch.distributed as dist
from cases import MODES, Case, check_repeats, check_same, communicated
from handwritten import reduce_shared
from measure import Result
from targets import Target, Targets
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.distributed.fake_pg import FakeStore
from turns import Made, processor_time_in_turns

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import init_device_mesh
from vescale.optim import DistributedOptimizer
from vescale_testing import keep_float64, run_ranks

WORLD, BATCH, SEQ, VOCABULARY = 4, 2, 32, 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
HAND, HAND_EARLY = "hand-written", "hand-written, summed at the experts"
STOCK, STOCK_HAND = "stock", "stock, hand-written experts"
COMPILED = {"vescale compile": "vescale static"}  # case -> what it compiles
OPTIMIZER = "with AdamW, "
DISTRIBUTED = "with DistributedOptimizer, "
TURN = 0.1  # seconds of a step in a round


def run(num_rounds: int) -> Result:
    """Measure in forked processes, after a comparison of values on forked gloo ranks."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    names = run_ranks(_check_values, WORLD, timeout=300)[0]
    seconds: dict[str, list[float]] = {}
    reference: dict[str, str] = {}
    collectives: dict[str, str] = {}
    for family in huggingface.FAMILIES:
        makers = {name: functools.partial(_make, family, name) for name in _names(family)}
        times, traffic_of = processor_time_in_turns(makers, num_rounds=num_rounds, turn=TURN)
        seconds |= times
        reference |= {name: f"{family}, {OPTIMIZER if ' with ' in name else ''}{HAND}" for name in times}
        collectives |= {f"{family}, {name}": str(traffic_of[name]) for name in makers}
    shape = f"{SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}, {BATCH} x {SEQ} tokens"
    title = f"Forward and backward of tiny models on one rank, {shape}, tp {WORLD}, sequence parallel, processor time"
    return Targets(
        title,
        HAND,
        seconds,
        reference,
        tuple(target for family in huggingface.FAMILIES for target in _targets(family)),
        {"communicates": collectives},
        (
            "values compared with one device on gloo ranks in float64: " + ", ".join(names),
            "stock has no style for experts: their weights are sharded DTensors in the unchanged forward, gathered at "
            "use, or they are the hand-written ones",
            "AdamW is fused, but in stock foreach: fused it would gather parameters, as gradients of norms are partial "
            "there",
        ),
    )


def _targets(family: str) -> list[Target]:
    targets = []
    for of_stock, of_ours in (("", ""), (OPTIMIZER, OPTIMIZER), (OPTIMIZER, DISTRIBUTED)):
        static = f"{family}, {of_ours}vescale static"
        hands = [HAND, HAND_EARLY] if family == "Mixtral" else [HAND]
        targets += [Target(static, f"{family}, {of_stock}{hand}", at_most=1.2) for hand in hands]
        targets.append(Target(f"{family}, {of_stock}{STOCK}", static, at_least=3.5))
    return targets


def _names(family: str) -> list[str]:
    by_experts = [STOCK_HAND, HAND_EARLY] if family == "Mixtral" else []
    return [HAND, STOCK, *by_experts, *(f"vescale {mode}" for mode in MODES)]


def _make(family: str, name: str) -> Made:
    """Make and check a case in its process, on a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    cases = _cases(family, mesh, balanced=True)
    case = cases[name]()
    case.step()
    if name in COMPILED:
        check_repeats(name, case, cases[COMPILED[name]]())
    steps = {f"{family}, {name}": case.step}
    steps[f"{family}, {OPTIMIZER}{name}"] = _with_optimizer(case, _adamw(case, fused=name not in (STOCK, STOCK_HAND)))
    if name.startswith("vescale"):
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=case.model, lr=1e-4, fused=True)
        steps[f"{family}, {DISTRIBUTED}{name}"] = _with_optimizer(case, optimizer)
    return Made(steps, communicated(case, compiled=name in COMPILED))


def _adamw(case: Case, *, fused: bool) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in case.model.parameters() if isinstance(p, DTensor) is distributed]}
        for distributed in (False, True)  # one fused kernel does not take both
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-4, fused=fused, foreach=not fused)


def _with_optimizer(case: Case, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        case.step()
        optimizer.step()

    return step


def model_cases(build: Callable[[], nn.Module], tokens: Tensor, mesh: DeviceMesh) -> dict[str, Callable[[], Case]]:
    """Return what makes each case.

    Args:
        build: makes the model of `huggingface.build`, the same on every call.
        tokens: (batch, seq) of a step.
        mesh: of one axis, `tp`.
    """
    group = mesh.get_group()

    def case(model: nn.Module, after: Callable[[], None] = lambda: None) -> Case:
        return Case(model, lambda: model(input_ids=tokens, labels=tokens).loss, after=after)

    def hand(*, sum_at_experts: bool = False) -> Case:
        model, shared = huggingface.by_hand(build(), group, sum_at_experts=sum_at_experts)
        return case(model, lambda: reduce_shared(shared, group))

    def stock() -> Case:
        model, open_ = huggingface.parallelize_as_stock(build(), mesh), contextlib.ExitStack()

        def forward() -> Tensor:
            open_.enter_context(implicit_replication())
            return model(input_ids=tokens, labels=tokens).loss

        return Case(model, forward, after=open_.close)

    def stock_by_hand() -> Case:
        model = huggingface.parallelize_as_stock(build(), mesh, experts_by_hand=True)
        routers = [layer.mlp.gate.weight for layer in model.model.layers]
        return case(model, lambda: reduce_shared(routers, group))

    def ours(mode: str) -> Case:
        model = build()
        plan = plans.plan_for(model, degree=mesh.size(), sequence_parallel=True)
        return case(parallelize_module(model, mesh, plan, mode=mode))

    cases: dict[str, Callable[[], Case]] = {HAND: hand, STOCK: stock}
    if hasattr(build().model.layers[0].mlp, "experts"):
        cases |= {STOCK_HAND: stock_by_hand, HAND_EARLY: lambda: hand(sum_at_experts=True)}
    cases |= {f"vescale {mode}": functools.partial(ours, mode) for mode in MODES}
    return cases


def _cases(family: str, mesh: DeviceMesh, *, balanced: bool) -> dict[str, Callable[[], Case]]:
    return model_cases(lambda: huggingface.build(family, balanced=balanced, **SIZES), _tokens(), mesh)


def _tokens() -> Tensor:
    return torch.randint(VOCABULARY, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))


def _check_values() -> list[str]:
    """Compare every case that is not compiled with one device, on this rank of a real group; return their names."""
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    torch.set_default_dtype(torch.float64)
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    names: list[str] = []
    for family in huggingface.FAMILIES:
        alone = huggingface.build(family, **SIZES)
        reference = Case(alone, lambda alone=alone: alone(input_ids=_tokens(), labels=_tokens()).loss)
        for name, make in _cases(family, mesh, balanced=False).items():
            if name not in COMPILED:
                with keep_float64():  # Hugging Face's norms, router and loss ask for float32
                    check_same(f"{family}, {name}", make(), reference)
                names.append(name)
    return list(dict.fromkeys(names))
