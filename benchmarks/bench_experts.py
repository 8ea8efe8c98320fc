"""An expert layer with expert parallelism over two processes, against one process and the bytes.

Each rank has its own tokens, and routing is balanced, so that a rank computes as many (token, expert) pairs as one
process would for its own tokens with all experts. What expert parallelism may add is then what it must send:

    baseline = Hugging Face's grouped matmul over all experts in this process, on this rank's tokens
               + bare collectives of the same sizes, forward and backward, measured in the same run

Two layouts of the tokens: sharded over the ranks (exchanged by all-to-all), and replicated (each rank masks what its
experts do not compute, and the output is all-reduced). Real ranks on gloo, one thread each, forward and backward.
Before, output and gradients are compared with one process's. Times are of the clock: ranks wait for each other, so run
this where nothing else runs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from cases import MODES, refusal
from measure import Result, time_in_turns
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
LAYOUTS = {"exchanged": Shard(0), "masked": Replicate()}
ALONE = "one process"


class Layer(nn.Module):
    """Experts as part of a model."""

    def __init__(self) -> None:
        super().__init__()
        config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_local_experts=EXPERTS)
        config._experts_implementation = "grouped_mm"
        torch.manual_seed(0)
        self.experts = MixtralExperts(config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.05)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return self.experts(hidden, index, weights)


def run(num_rounds: int) -> Result:
    """Measure on two forked gloo processes."""
    seconds, notes = run_ranks(_on_each_rank, WORLD, num_rounds, timeout=600)[0]
    reference = {name: name for name in seconds}
    targets = []
    for layout in LAYOUTS:
        baseline = f"{ALONE} + bytes, {layout}"
        # round by round: a round's cases follow each other
        both = zip(seconds[ALONE], seconds[f"bytes, {layout}"], strict=True)
        seconds[baseline] = [computing + sending for computing, sending in both]
        ours = [name for name in seconds if name.startswith("vescale") and name.endswith(layout)]
        reference |= dict.fromkeys([ALONE, f"bytes, {layout}", baseline, *ours], baseline)
        targets += [Target(name, baseline, at_most=1.2) for name in ours]
    shape = f"{EXPERTS} experts {HIDDEN} x {INNER}, top {TOP_K}, {TOKENS} tokens per rank, float32"
    title = f"Forward and backward of an expert layer on {WORLD} gloo ranks ({shape})"
    order = sorted(seconds, key=lambda name: (reference[name] != name, name.startswith("vescale")))
    return Targets(
        title,
        "its baseline",
        {name: seconds[name] for name in order},
        reference,
        tuple(targets),
        notes=tuple(notes),
    )


def _on_each_rank(num_rounds: int) -> tuple[dict[str, list[float]], list[str]]:
    warnings.filterwarnings("ignore", category=UserWarning, module="torch")
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("ep",))
    notes: list[str] = []
    steps: dict[str, Callable[[], object]] = {ALONE: _step(Layer(), *_tokens(mesh, whole=False))}
    steps |= {f"bytes, {layout}": _bytes(layout, mesh) for layout in LAYOUTS}
    for mode in MODES:
        if reason := refusal(mode, mesh):
            notes.append(f"vescale {mode} left out: {reason}")
            continue
        for layout, placement in LAYOUTS.items():
            layer = parallelize_module(Layer(), mesh, {"expert": {"experts": {"ep": Shard(0)}}}, mode=mode)
            step = _step(layer, *_distributed(mesh, placement))
            _check_same(f"vescale {mode}, {layout}", step, mesh)
            steps[f"vescale {mode}, {layout}"] = step
    return time_in_turns(steps, num_rounds=num_rounds, num_warmup=2), notes


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
    layer: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor, gradient: Tensor
) -> Callable[[], dict[str, Tensor]]:
    hidden, weights = hidden.detach().requires_grad_(), weights.detach().requires_grad_()

    def step() -> dict[str, Tensor]:
        layer.zero_grad()
        hidden.grad = weights.grad = None
        output = layer(hidden, index, weights)
        if isinstance(gradient, DTensor) and not isinstance(output, DTensor):
            output.backward(gradient.to_local())
        else:
            output.backward(gradient)
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


def _bytes(layout: str, mesh: DeviceMesh) -> Callable[[], None]:
    """Return the bare collectives of a step: what no implementation of this layout can leave out."""
    group = mesh.get_group()
    if layout == "masked":
        output = torch.randn(WORLD * TOKENS, HIDDEN)
        weights = torch.randn(WORLD * TOKENS, TOP_K)

        def reduce() -> None:
            for value in (output, output, weights):  # output; gradients of hidden states and weights
                dist.all_reduce(value.zero_(), group=group)

        return reduce
    rows, weights = torch.randn(TOKENS * TOP_K, HIDDEN), torch.randn(TOKENS * TOP_K)
    received = torch.empty_like(rows), torch.empty_like(weights)

    def exchange() -> None:
        for _ in range(4):  # there and back, forward and backward
            dist.all_to_all_single(received[0], rows, group=group)
        for _ in range(2):  # there, and their gradients back
            dist.all_to_all_single(received[1], weights, group=group)

    return exchange
