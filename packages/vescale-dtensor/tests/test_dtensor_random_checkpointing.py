"""Activation checkpointing draws the same masks again, in both streams, on shards and in local batches."""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from vescale.dtensor import Replicate, Shard, init_device_mesh, random
from vescale.dtensor._torch.dispatch import dispatch_modes
from vescale_testing import ranks

VARIANTS = pytest.mark.parametrize("use_reentrant", [True, False])
STREAMS = pytest.mark.parametrize("name", ["torch", "philox"])


def input_of(rows=8):
    return torch.rand(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def block(x):
    """Draws of several kinds, the second after the first."""
    x = F.dropout(x * x, 0.5)
    x = x + torch.rand_like(x).exp()
    return F.dropout(x.sin(), 0.3) * 2


def in_stream(name, seed=3):
    if name == "torch":
        torch.manual_seed(seed)
        return contextlib.nullcontext()
    return random.stream(name, seed=seed)


def backward(x, *, segments, with_draws_between=False):
    """The gradient of `x` through two blocks, each run by one of `segments`, and the next draw."""
    y = x
    for run in segments:
        y = run(y)
        if with_draws_between:
            y = y + torch.rand(())
    y.square().sum().backward()
    return x.grad, torch.rand(3)


def run_all(make, context, segments, **kwargs):
    with context:
        return backward(make(), segments=segments, **kwargs)


@STREAMS
@VARIANTS
def test_plain_tensors(name, use_reentrant):
    def again(x):
        return checkpoint(block, x, use_reentrant=use_reentrant)

    expected, after = run_all(input_of, in_stream(name), [block] * 3, with_draws_between=True)
    actual, follow_up = run_all(input_of, in_stream(name), [again] * 3, with_draws_between=True)
    assert torch.equal(actual, expected)
    assert torch.equal(follow_up, after)

    def forgetful(x):
        return checkpoint(block, x, use_reentrant=use_reentrant, preserve_rng_state=False)

    other, _ = run_all(input_of, in_stream(name), [forgetful] * 3, with_draws_between=True)
    assert not torch.equal(other, expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # the outer one runs without gradients
@STREAMS
@VARIANTS
def test_a_checkpoint_inside_a_checkpoint(name, use_reentrant):
    def inner(x):
        return checkpoint(block, block(x), use_reentrant=use_reentrant)

    def outer(x):
        return F.dropout(checkpoint(inner, x, use_reentrant=use_reentrant), 0.2)

    expected, after = run_all(input_of, in_stream(name), [lambda x: F.dropout(block(block(x)), 0.2)] * 2)
    actual, follow_up = run_all(input_of, in_stream(name), [outer] * 2)
    assert torch.equal(actual, expected)
    assert torch.equal(follow_up, after)


@STREAMS
@VARIANTS
def test_sharded_tensors(name, use_reentrant, shard, shard_of):
    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        placements = (Shard(0), Shard(1))

        def again(x):
            return checkpoint(block, x, use_reentrant=use_reentrant)

        expected, after = run_all(input_of, in_stream(name), [block] * 2)
        sharded = shard(input_of(), mesh, placements)
        actual, follow_up = run_all(lambda: sharded, in_stream(name), [again] * 2)
        assert torch.equal(actual.to_local(), shard_of(expected, mesh, placements))
        assert torch.equal(follow_up, after)

    on_every_rank()


def rows_of(axis):
    coord = axis.get_local_rank()
    return input_of().detach().chunk(axis.size())[coord].clone().requires_grad_()


@STREAMS
@VARIANTS
def test_inside_a_local_batch(name, use_reentrant, shard, shard_of):
    """Parts of the batch, plain or sharded over another axis; the context is open during backward."""

    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        dp, tp = mesh["dp"], mesh["tp"]

        def again(x):
            return checkpoint(block, x, use_reentrant=use_reentrant)

        with in_stream(name):
            expected = backward(input_of(), segments=[block] * 2)[0].chunk(2)[dp.get_local_rank()]
        rows = rows_of(dp)
        with in_stream(name), random.local_batch(dp):
            actual = backward(rows, segments=[again] * 2)[0]
        assert torch.equal(actual, expected)
        sharded = shard(rows_of(dp), tp, (Shard(1),))
        with in_stream(name), random.local_batch(dp):
            actual = backward(sharded, segments=[again] * 2)[0]
        assert torch.equal(actual.to_local(), shard_of(expected, tp, (Shard(1),)))

    on_every_rank()


@STREAMS
@VARIANTS
def test_after_the_local_batch_was_left(name, use_reentrant):
    """What is repeated has the part of the batch of its first run, and a context inside of it cuts no second time."""

    @ranks(2)
    def on_every_rank():
        dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

        def in_part(x):
            with random.local_batch(dp):
                return block(x)

        def with_hooks(x):  # in the first run the context is open around it; in backward, its hooks would open it
            return in_part(block(x)) if torch._C._current_graph_task_id() != -1 else block(block(x))

        def gradient(function):
            x = rows_of(dp)
            with in_stream(name):
                with random.local_batch(dp):
                    y = checkpoint(function, x, use_reentrant=use_reentrant)
                between = torch.rand(3)
                y.square().sum().backward()
                return x.grad, between, torch.rand(3)

        def reference(function):
            x = input_of()
            with in_stream(name):
                y = function(x)
                between = torch.rand(3)
                y.square().sum().backward()
                return x.grad.chunk(2)[dp.get_local_rank()], between, torch.rand(3)

        for function, plain in [(block, block), (with_hooks, lambda x: block(block(x)))]:
            for mine, expected in zip(gradient(function), reference(plain), strict=True):
                assert torch.equal(mine, expected)

    on_every_rank()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@VARIANTS
def test_backward_inside_another_part_of_the_batch(use_reentrant):
    @ranks(2)
    def on_every_rank():
        dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x, local = input_of(), rows_of(dp)
        torch.manual_seed(3)
        block(x).square().sum().backward()
        torch.manual_seed(3)
        with random.local_batch(dp):
            y = checkpoint(block, local, use_reentrant=use_reentrant)
        with random.micro_batches(2) as micro_batch, micro_batch(1):
            y.square().sum().backward()
            mine = torch.rand(2)
        assert torch.equal(local.grad, x.grad.chunk(2)[dp.get_local_rank()])
        torch.manual_seed(3)
        block(input_of())
        assert torch.equal(mine, torch.rand(4)[2:])

    on_every_rank()


@ranks(2)
def test_a_context_that_is_entered_again_cuts_once():
    """As hooks of modules do, which run in forward and in the recomputation alike."""
    dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))

    def hooked(x):
        with random.local_batch(dp):
            return block(x)

    for name in ("torch", "philox"):
        x, local = input_of(), rows_of(dp)
        with in_stream(name):
            block(x).square().sum().backward()
        with in_stream(name):
            checkpoint(hooked, local, use_reentrant=False).square().sum().backward()
        assert torch.equal(local.grad, x.grad.chunk(2)[dp.get_local_rank()]), name


@STREAMS
@VARIANTS
def test_micro_batches_of_a_pipeline_that_go_backward_late(name, use_reentrant):
    """All forwards first, then backwards in reverse, outside of any context but the stream's."""

    @ranks(2)
    def on_every_rank():
        dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = input_of()
        with in_stream(name):
            block(x).square().sum().backward()
        expected = x.grad.chunk(2)[dp.get_local_rank()].chunk(2)
        parts = [part.clone().requires_grad_() for part in rows_of(dp).detach().chunk(2)]
        with in_stream(name):
            outs = []
            with random.micro_batches(2) as micro_batch:
                for m, part in enumerate(parts):
                    with micro_batch(m), random.local_batch(dp):
                        outs.append(checkpoint(block, part, use_reentrant=use_reentrant))
            for out in reversed(outs):
                out.square().sum().backward()
        for part, gradient in zip(parts, expected, strict=True):
            assert torch.equal(part.grad, gradient)

    on_every_rank()


@ranks(2)
def test_backward_outside_of_the_stream_is_an_error_on_shards(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(input_of(), mesh, (Replicate(),))
    with random.stream("philox", seed=3):
        y = checkpoint(block, x, use_reentrant=False).sum()
    with pytest.raises(
        RuntimeError, match=r"recomputes a forward pass that ran inside random\.stream.*call backward\(\) inside"
    ):
        y.backward()
    dist.barrier()


@STREAMS
def test_windows_are_in_force_on_threads_of_autograd(name):
    """A thread of autograd gets the dispatch modes of the thread that waits for it, but not its context variables."""
    with in_stream(name):
        whole = torch.rand(4)
    with in_stream(name), random.micro_batches(2) as micro_batch, micro_batch(1):
        drawn = run_in_thread(lambda: torch.rand(2), dispatch_modes())
    assert torch.equal(drawn, whole[2:])
    assert not torch.equal(drawn, whole[:2])


@STREAMS
@VARIANTS
@pytest.mark.parametrize("is_inside", [True, False])
def test_a_thread_of_autograd_repeats_a_part_of_the_batch(name, use_reentrant, is_inside):
    """Inside of the context a mode is active there already, and a second one would cut twice."""
    x = input_of()
    with in_stream(name):
        block(x).square().sum().backward()
    part = input_of().detach()[4:].clone().requires_grad_()
    with in_stream(name), random.micro_batches(2) as micro_batch:
        with micro_batch(1):
            y = checkpoint(block, part, use_reentrant=use_reentrant).square().sum()
            if is_inside:
                run_in_thread(y.backward, dispatch_modes())
        if not is_inside:
            run_in_thread(y.backward, dispatch_modes())
    assert torch.equal(part.grad, x.grad[4:])


def run_in_thread(draw, modes):
    found = []

    def work():
        with contextlib.ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            found.append(draw())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@VARIANTS
@STREAMS
def test_micro_batches_are_repeated_on_an_accelerator(name, use_reentrant):
    """Autograd runs such a backward on a thread of its own."""
    whole, parts = (input_of().detach().cuda().requires_grad_() for _ in range(2))
    with in_stream(name):
        block(whole).sum().backward()
    with in_stream(name), random.micro_batches(2) as micro_batch:
        for index, rows in enumerate(parts.chunk(2)):
            with micro_batch(index):
                checkpoint(block, rows, use_reentrant=use_reentrant).sum().backward()
    torch.testing.assert_close(parts.grad, whole.grad, rtol=1e-12, atol=1e-12)
