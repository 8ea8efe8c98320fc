"""An expert layer with expert parallelism over two processes, against one process and the bytes.

Each rank has its own tokens, and routing is balanced, so that a rank computes as many (token, expert) pairs as one
process would for its own tokens with all experts. What expert parallelism may add is then what it must send:

    baseline = Hugging Face's grouped matmul over all experts in this process, on this rank's tokens
               + bare collectives of the same sizes, forward and backward, measured in the same run

Both ranks run the baseline at once, too, but neither waits for the other, and each writes the gradients of all experts.
What no expert parallelism can be faster than is "in lockstep": as many pairs, a rank's experts, and the same bare
collectives where they must be, before and after forward and backward.

Two layouts of the tokens: sharded over the ranks (exchanged by all-to-all), and replicated (each rank computes what its
experts get, and the output is all-reduced). Real ranks on gloo, one thread each, forward and backward. Before, output
and gradients are compared with one process's. Times are of the clock: ranks wait for each other, so run this where
nothing else runs. Processor time, which excludes waiting, is beside them.
"""

from __future__ import annotations

import functools
import statistics
import warnings
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from cases import MODES
from measure import Result, time_in_turns, with_processor_time
from targets import Target, Targets
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from vescale.dmodule import parallelize_module
from vescale.dtensor import init_device_mesh
from vescale_testing import run_ranks

WORLD, TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 2, 512, 512, 1024, 8, 2  # tokens of each rank
WARMUP = 2
LAYOUTS = {"exchanged": Shard(0), "masked": Replicate()}
ALONE, LOCKSTEP = "one process", "in lockstep"


class Layer(nn.Module):
    """Experts as part of a model."""

    def __init__(self, num_experts: int = EXPERTS) -> None:
        super().__init__()
        config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=num_experts)
        config._experts_implementation = "grouped_mm"
        torch.manual_seed(0)
        self.experts = MixtralExperts(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self.experts(hidden, index, weights)


def run(num_rounds: int) -> Result:
    """Measure on two forked gloo processes."""
    seconds, processor = run_ranks(_on_each_rank, WORLD, num_rounds, timeout=600)[0]
    reference = {name: name for name in seconds}
    targets = []
    for layout in LAYOUTS:
        baseline, sending = f"{ALONE} + bytes, {layout}", f"bytes, {layout}"
        for times in (seconds, processor):
            # round by round: a round's cases follow each other
            times[baseline] = [sum(both) for both in zip(times[ALONE], times[sending], strict=True)]
        ours = [name for name in seconds if name.startswith("vescale") and name.endswith(layout)]
        reference |= dict.fromkeys([ALONE, sending, baseline, f"{LOCKSTEP}, {layout}", *ours], baseline)
        targets += [Target(name, baseline, at_most=1.2) for name in ours]
    shape = f"{EXPERTS} experts {HIDDEN} x {INNER}, top {TOP_K}, {TOKENS} tokens per rank, float32"
    title = f"Forward and backward of an expert layer on {WORLD} gloo ranks ({shape})"
    order = sorted(seconds, key=lambda name: (reference[name] != name, name.startswith("vescale")))
    work = {name: statistics.median(times) for name, times in processor.items()}
    remarks = {
        "processor time, ms": {name: f"{1e3 * total:.1f}" for name, total in work.items()},
        "ratio": {name: f"{total / work[reference[name]]:.2f}" for name, total in work.items()},
    }
    return Targets(
        title,
        "its baseline",
        {name: seconds[name] for name in order},
        reference,
        tuple(targets),
        remarks,
    )


def _on_each_rank(num_rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    hidden, index, weights, gradient = _tokens(mesh, whole=False)
    steps: dict[str, Callable[[], object]] = {ALONE: _step(Layer(), hidden, index, weights, gradient)}
    for layout in LAYOUTS:
        meetings, held = _meetings(layout, mesh), EXPERTS // WORLD
        steps[f"bytes, {layout}"] = functools.partial(_call_all, meetings)
        steps[f"{LOCKSTEP}, {layout}"] = _step(Layer(held), hidden, index % held, weights, gradient, meetings)
    for mode in MODES:
        for layout, placement in LAYOUTS.items():
            layer = parallelize_module(Layer(), mesh, {"expert": {"experts": {"ep": Shard(0)}}}, mode=mode)
            step = _step(layer, *_distributed(mesh, placement))
            _check_same(f"vescale {mode}, {layout}", step, mesh)
            steps[f"vescale {mode}, {layout}"] = step
    processor: dict[str, list[float]] = {name: [] for name in steps}
    watched = {name: with_processor_time(step, processor[name]) for name, step in steps.items()}
    seconds = time_in_turns(watched, num_rounds=num_rounds, num_warmup=WARMUP)
    return seconds, {name: times[WARMUP:] for name, times in processor.items()}


# ------------------------------------------------------------------------------------------------------------- inputs


def _tokens(mesh: DeviceMesh, *, whole: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, experts, weights and the output's gradient, of all ranks or of this one."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = WORLD * TOKENS
    hidden, gradient = (torch.randn(num_tokens, HIDDEN, generator=generator) for _ in range(2))
    weights = torch.rand(num_tokens, TOP_K, generator=generator)
    # each token's experts in turn, from another one for each round of tokens: balanced on every rank
    first = torch.arange(num_tokens) * TOP_K + torch.arange(num_tokens) * TOP_K // EXPERTS
    index = (first[:, None] + torch.arange(TOP_K)) % EXPERTS
    values = (hidden, index, weights, gradient)
    return values if whole else tuple(value.chunk(WORLD)[mesh.get_local_rank()].clone() for value in values)


def _distributed(mesh: DeviceMesh, placement: Shard | Replicate) -> tuple[Tensor, ...]:
    local = _tokens(mesh, whole=isinstance(placement, Replicate))
    return tuple(DTensor.from_local(value, mesh, [placement], run_check=False) for value in local)


def _step(
    layer: nn.Module,
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    gradient: Tensor,
    meetings: Sequence[Callable[[], None]] | None = None,
) -> Callable[[], dict[str, Tensor]]:
    hidden, weights = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
    before_forward, after_forward, before_backward, after_backward = meetings or [_nothing] * 4

    def step() -> dict[str, Tensor]:
        layer.zero_grad()
        hidden.grad = weights.grad = None
        before_forward()
        output = layer(hidden, index, weights)
        after_forward()
        before_backward()
        to_local = isinstance(gradient, DTensor) and not isinstance(output, DTensor)
        output.backward(gradient.to_local() if to_local else gradient)
        after_backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        return {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, **grads}

    return step


def _check_same(name: str, step: Callable[[], dict[str, Tensor]], mesh: DeviceMesh) -> None:
    """Compare with one process that has all tokens and all experts; twice, because static mode's first is a trial."""
    expected = _step(Layer(), *_tokens(mesh, whole=True))()
    for _ in range(2):
        for key, actual in step().items():
            whole = actual.full_tensor() if isinstance(actual, DTensor) else actual
            distance = (whole - expected[key]).abs().max() / expected[key].abs().max()
            if not distance < 1e-5:
                raise RuntimeError(f"{name}: {key} is off by {distance:.1e} of the largest value")


# -------------------------------------------------------------------------------------------------------------- bytes


def _meetings(layout: str, mesh: DeviceMesh) -> tuple[Callable[[], None], ...]:
    """Return the bare collectives that no implementation of this layout can leave out.

    Those before forward, after forward, before backward and after backward.
    """
    group = mesh.get_group()
    if layout == "masked":
        output, weights = torch.zeros(WORLD * TOKENS, HIDDEN), torch.zeros(WORLD * TOKENS, TOP_K)

        def sum_output() -> None:
            dist.all_reduce(output, group=group)

        def sum_gradients() -> None:
            for value in (output, weights):  # of hidden states and weights
                dist.all_reduce(value, group=group)

        return _nothing, sum_output, _nothing, sum_gradients
    rows, weights = torch.randn(TOKENS * TOP_K, HIDDEN), torch.randn(TOKENS * TOP_K)
    received = torch.empty_like(rows), torch.empty_like(weights)

    def combine() -> None:
        dist.all_to_all_single(received[0], rows, group=group)

    def dispatch() -> None:
        combine()  # of the same size
        dist.all_to_all_single(received[1], weights, group=group)

    return dispatch, combine, combine, dispatch


def _nothing() -> None:
    """Do not synchronize with other ranks."""


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
