"""A program on DTensors that uses torch alone; `test_dtensor_disabled.py` runs it with and without ``vescale.dtensor``.

    python stock_program.py OUT never       a process that never imports vescale
    python stock_program.py OUT imported    imported: with our rules, inside ``disabled()``, with our rules again

Four forked ranks over gloo. Each rank writes, for each run, the name of every case with the bits, layout, text or error
that it gave.
"""

import contextlib
import os
import pickle
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from torch.distributed import tensor as factories
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

SIZE = 4


def describe(value):
    """Return a value that is equal for equal bits and layouts only."""
    if isinstance(value, DTensor):
        return "DTensor", tuple(value.shape), str(value.placements), describe(value.to_local())
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype), value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    return value


def local_values(*shape, seed=0):
    """Return other values on each rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * dist.get_rank() + seed))


def global_values(*shape, seed=0):
    """Return the same values on each rank."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def partial(mesh, *ops):
    """Return a DTensor that is partial on every axis."""
    return DTensor.from_local(local_values(64, 3), mesh, [Partial(op) for op in ops], run_check=False)


def cases(mesh):
    """Return the cases by name; each is called on every rank, in order."""
    x = distribute_tensor(global_values(8, 12), mesh, [Shard(0), Shard(1)])
    uneven = distribute_tensor(global_values(5, 7, seed=1), mesh, [Shard(0), Shard(1)])
    rows = distribute_tensor(global_values(8, 12, seed=2), mesh, [Shard(0), Replicate()])
    yield "two sums", lambda: partial(mesh, "sum", "sum").redistribute(mesh, [Replicate(), Replicate()])
    yield "two means", lambda: partial(mesh, "avg", "avg").full_tensor()
    yield "sum and maximum", lambda: partial(mesh, "sum", "max").full_tensor()
    yield "scattered sums", lambda: partial(mesh, "sum", "sum").redistribute(mesh, [Shard(0), Replicate()])
    yield "sum of products", lambda: (x @ x.T).sum().item()
    for placements in ([Shard(1), Shard(0)], [Replicate(), Shard(0)], [Replicate(), Replicate()]):
        yield f"to {placements}", lambda placements=placements: x.redistribute(mesh, placements)
        yield f"uneven to {placements}", lambda placements=placements: uneven.redistribute(mesh, placements)
    yield "repr", lambda: repr(x)
    yield "repr of a sum", lambda: repr(partial(mesh, "sum", "sum"))
    for name, draw in RANDOM.items():
        yield name, lambda draw=draw: [draw(rows), torch.get_rng_state()]
    yield "rand", lambda: factories.rand((8, 4), device_mesh=mesh, placements=[Shard(0), Replicate()])
    yield "zeros", lambda: factories.zeros((8, 4), device_mesh=mesh, placements=[Shard(0), Replicate()])
    yield "topk of one", lambda: torch.topk(rows, 1)
    yield "topk of three", lambda: torch.topk(rows, 3)
    weight = distribute_tensor(global_values(3, 12), mesh, [Replicate(), Shard(1)])
    bias = distribute_tensor(global_values(3, seed=5), mesh, [Replicate(), Replicate()])
    yield "bias", lambda: F.linear(x, weight, bias)
    yield "cross entropy", lambda: entropy(rows)
    yield "loss parallel", lambda: parallel_entropy(mesh)
    yield "mean squared error", lambda: F.mse_loss(uneven, uneven * 2)
    yield "batch norm", lambda: F.batch_norm(rows, None, None, training=True)
    yield "sum on one rank", lambda: uneven.sum().item()
    yield "gradient of to_local", lambda: gradient(rows)
    yield "write to a row", lambda: [rows[3].zero_(), rows]
    yield "without a rule", lambda: torch.linalg.svdvals(rows)
    yield "boxes", lambda: [hasattr(DTensor, name) for name in ("__boxes__", "__global_shape__")]


RANDOM = {
    "dropout": F.dropout,
    "rand_like": torch.rand_like,
    "normal_": lambda x: x.clone().normal_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
}


def entropy(rows):
    """Return loss and gradient of a batch in which ranks ignore different numbers of targets."""
    logits = rows.detach().requires_grad_()
    targets = distribute_tensor(torch.tensor([1, -100, 2, 3, 4, 5, -100, -100]), rows.device_mesh, rows.placements)
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    return [loss, logits.grad]


def parallel_entropy(mesh):
    """Return loss and gradient over sharded classes."""
    line = mesh["tp"]
    logits = distribute_tensor(global_values(6, 8), line, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = F.cross_entropy(logits, torch.arange(6))
        loss.backward()
    return [loss, logits.grad]


def gradient(rows):
    """Return the gradient that ``to_local`` gives."""
    leaf = rows.detach().requires_grad_()
    (leaf.to_local() ** 2).sum().backward()
    return leaf.grad


def run():
    """Return what every case gave, by name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = {}
    for name, case in cases(mesh):
        torch.manual_seed(7)
        try:
            found[name] = describe(case())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    return found


def rank_main(rank, folder, mode):
    """Run on one rank and write what was found."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    torch.set_num_threads(1)
    if mode == "never":
        runs = {"never": run()}
        assert not any(name.startswith("vescale") for name in sys.modules)
    else:
        from vescale.dtensor import disabled

        runs = {"ours": run()}
        with disabled():
            runs["disabled"] = run()
            with disabled("random"), contextlib.suppress(ZeroDivisionError), disabled():
                raise ZeroDivisionError
            runs["disabled again"] = run()
        runs["ours again"] = run()
    with open(f"{folder}/{rank}.pickle", "wb") as file:
        pickle.dump(runs, file)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # stock torch may abort when Python ends, see vescale.dtensor._exit


if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank_main, sys.argv[1:3], SIZE, start_method="fork")
