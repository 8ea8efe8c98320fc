"""Write a program as a script for torchrun that runs it on DTensors and on one device and compares the results."""

from __future__ import annotations

import torch
from combos import parse
from program import DTYPES, RTOL, Input, LineFailed, Program, one_device
from torch.distributed.tensor import Partial, Placement

__all__ = ["script"]


def script(program: Program) -> str:
    """Return the text of the script; it needs torch and vescale.dtensor only."""
    return _SCRIPT.format(
        num_ranks=torch.Size(program.mesh).numel(),
        mesh=program.mesh,
        inputs="\n".join(f"    {_described(n, each)}," for n, each in enumerate(program.inputs)),
        names=", ".join(f"x{n}" for n in range(len(program.inputs))),
        lines="\n".join(f"    {line}" for line in program.lines),
        grad=f"torch.set_grad_enabled({program.order > 0})",
        order=program.order,
        rtol=RTOL[_precision(program)],
    )


def _precision(program: Program) -> str:
    try:
        return program.precision(one_device(program))
    except LineFailed:
        return program.precision({})


def _described(number: int, each: Input) -> str:
    shape, order = (each.shape[::-1], ".mT") if each.is_transposed else (each.shape, "")
    if each.is_transposed and len(shape) != 2:
        order = f".permute({', '.join(map(str, range(len(shape))[::-1]))})"
    if each.kind in DTYPES:
        value = f"torch.randn({shape}, generator=generator({number}), dtype={DTYPES[each.kind]})"
    elif each.kind == "bool":
        value = f"(torch.rand({shape}, generator=generator({number})) < 0.6)"
    else:
        value = f"torch.randint({each.kind.removeprefix('int')}, {shape}, generator=generator({number}))"
    placements = ", ".join(map(_placement, parse(each.placements)))
    return f"({value}{order}, [{placements}], {each.requires_grad})"


def _placement(placement: Placement) -> str:
    return f'Partial("{placement.reduce_op}")' if isinstance(placement, Partial) else repr(placement)


_SCRIPT = """\
# torchrun --nproc-per-node {num_ranks} example.py
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from vescale.dtensor import DTensor, distribute_tensor, init_device_mesh


def generator(number):
    return torch.Generator().manual_seed(1000 + number)


INPUTS = [
{inputs}
]


def program({names}):
{lines}
    return {{name: value for name, value in locals().items() if name != "move"}}


def shard(value, placements, requires_grad):
    whole = [Replicate() if p.is_partial() else p for p in placements]
    value = distribute_tensor(value, mesh, whole, src_data_rank=None)
    local = value.to_local()
    if any(p.is_partial("sum") and mesh.get_local_rank(axis) for axis, p in enumerate(placements)):
        local = torch.zeros_like(local)
    value = DTensor.from_local(local, mesh, placements, run_check=False, shape=value.shape, stride=value.stride())
    return value.detach().requires_grad_(requires_grad)


def weight(number, out):
    dtype = torch.complex128 if out.is_complex() else torch.float64
    made = torch.randn(out.shape, generator=torch.Generator().manual_seed(99 + number), dtype=dtype).to(out.dtype)
    return distribute_tensor(made, mesh, [Replicate()] * mesh.ndim, src_data_rank=None) if sharded(out) else made


def sharded(value):
    return isinstance(value, DTensor)


def differentiable(values):
    return {{n: value for n, value in enumerate(values) if isinstance(value, torch.Tensor) and value.requires_grad}}


def results(inputs):
    torch.manual_seed(7)
    found = program(*inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    outs = differentiable(found.values())
    for turn in range(1, {order} + 1 if wanted and outs else 1):
        weights = [weight(number, out) for number, out in outs.items()]
        grads = torch.autograd.grad([*outs.values()], wanted, weights, create_graph=turn < {order}, allow_unused=True)
        found |= {{f"grad{{turn}} of {{number}}": grad for number, grad in enumerate(grads)}}
        outs = differentiable(grads)
    return {{name: value.full_tensor() if sharded(value) else value for name, value in found.items()}}


def move(tensor, placements):
    return tensor.redistribute(placements=placements).clone() if sharded(tensor) else tensor.clone()


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", {mesh})
{grad}
expected = results([value.clone().requires_grad_(grad and {order} > 0) for value, _, grad in INPUTS])
actual = results([shard(value, placements, grad and {order} > 0) for value, placements, grad in INPUTS])
for name, value in expected.items():
    if isinstance(value, torch.Tensor):
        torch.testing.assert_close(actual[name], value, rtol={rtol}, atol={rtol}, msg=lambda s: f"{{name}}: {{s}}")
"""
