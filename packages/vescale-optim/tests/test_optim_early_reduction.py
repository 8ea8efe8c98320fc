"""Gradients that are reduced before the backward which brings them, as a pipeline's stages are, equal one process."""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.dtensor.extension import gradient_receiver
from vescale.optim import DDP, DistributedOptimizer, clip_grad_norm_
from vescale_testing import halved, run_ranks

SGD = {"lr": 0.1, "momentum": 0.9}  # not Adam, which hides factors of gradients


class Deliver(torch.autograd.Function):
    """A loss whose backward delivers what has been reduced."""

    @staticmethod
    def forward(ctx, loss, _anchor, reduction, *means):
        ctx.reduction = reduction
        ctx.save_for_backward(*means)
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.reduction.deliver(ctx.saved_tensors, gradient)
        return None, None, None, *[None] * len(ctx.saved_tensors)


class Engine:
    """Computes sums over two micro-batches by torch.autograd.grad, and hands them over in two groups."""

    def __init__(self, module, loss_of, order=1):
        self.module, self.loss_of, self.order = module, loss_of, order

    def __call__(self, *batch):
        params = [p for p in self.module.parameters() if p.requires_grad]
        sums, losses = {}, []
        for part in zip(*(each.chunk(2) for each in batch), strict=True):
            losses.append(self.loss_of(self.module, *part) * (len(part[0]) / len(batch[0])))
            for p, gradient in zip(params, torch.autograd.grad(losses[-1], params, allow_unused=True), strict=True):
                sums[p] = gradient if sums.get(p) is None else sums[p] if gradient is None else sums[p] + gradient
        groups = [params[:2], params[2:]][:: self.order]
        reduction = gradient_receiver(params[0]).reducer.begin(groups)
        loss = sum(losses).detach()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        if reduction is None:
            return None
        for group in groups:
            reduction.add((p, sums.pop(p)) for p in group)
        return Deliver.apply(loss, torch.zeros((), requires_grad=True), reduction, *reduction.finish())


def squares(module, x, y):
    return ((module(x) - y) ** 2).mean()


#: What a user does with the losses of two steps before the optimizer's: backward, and what else.
USES = {
    "one backward": lambda engine, one, _two, _model: engine(*one).backward(),
    "a loss that is scaled": lambda engine, one, _two, _model: (engine(*one) * 0.5).backward(),
    "gradients of two backwards": lambda engine, one, two, _model: (engine(*one).backward(), engine(*two).backward()),
    "two steps, one backward": lambda engine, one, two, _model: (engine(*one) + engine(*two)).backward(),
    "two steps, then two backwards": lambda engine, one, two, _model: [
        each.backward() for each in [engine(*one), engine(*two)]
    ],
    "gradients cleared before backward": lambda engine, one, _two, model: (
        loss := engine(*one),
        model.zero_grad(),
        loss.backward(),
    ),
    "gradients set to zero before backward": lambda engine, one, _two, model: (
        engine(*one).backward(),
        model.zero_grad(set_to_none=False),
        engine(*one).backward(),
    ),
    "a step without backward": lambda engine, one, two, _model: (engine(*two), engine(*one).backward()),
    "a penalty in the same backward": lambda engine, one, _two, model: (engine(*one) + penalty(model)).backward(),
    "a penalty in a backward before": lambda engine, one, _two, model: (
        loss := engine(*one),
        penalty(model).backward(),
        loss.backward(),
    ),
}


def penalty(model):
    return 0.1 * model.middle.weight.square().sum() + 0.2 * model.scale.square()


class Plain:
    """The reference: the same uses of a loss of one process."""

    def __init__(self, module):
        self.module = module

    def __call__(self, x, y):
        return squares(self.module, x, y)


def batches(problem, step, **part):
    return [problem.batch(10 * step + which, **part) for which in (0, 1)]


def train_plain(problem, use):
    module = problem.model()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], **SGD)
    for step in range(problem.steps):
        USES[use](Plain(module), *batches(problem, step), module)
        optimizer.step()
        optimizer.zero_grad()
    return {fqn: p.detach() for fqn, p in module.named_parameters()}


def train(problem, uses, size, options):
    """Return the parameters after training, by use."""
    mesh = init_device_mesh("cpu", size, mesh_dim_names=("replica", "dp")[-len(size) :])
    coord, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for use in uses:
        module = problem.model()
        model = DDP(module, mesh, bucket_bytes=300, units=["middle"] if options["zero"] == 3 else None, **options)
        optimizer = DistributedOptimizer(torch.optim.SGD, model=model, **SGD)
        for step in range(problem.steps):
            with model.unsharded():
                engine = Engine(module, squares, order=1 if ranks % 2 else -1)
                USES[use](engine, *batches(problem, step, coord=coord, size=ranks), model)
            optimizer.step()
            optimizer.zero_grad()
        with model.unsharded():
            found[use] = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    return found


LAYOUTS = [
    ((2,), {"zero": 0}),
    ((3,), {"zero": 1}),
    ((2,), {"zero": 2, "reduction": "ordered"}),
    ((2,), {"zero": 3}),
    ((2,), {"zero": 3, "offload": True}),
    ((2, 2), {"zero": 2}),
    ((2, 2), {"zero": 1, "reduction": "ordered"}),
    ((2,), {"zero": 1, "overlap": False, "find_unused_parameters": False}),
]


@pytest.mark.parametrize(
    ("size", "options"), [*LAYOUTS[::2], *(pytest.param(*each, marks=pytest.mark.thorough) for each in LAYOUTS[1::2])]
)
def test_training_equals_one_process(problem, size, options):
    needs_unused = ["a penalty in a backward before"]
    uses = [use for use in USES if options.get("find_unused_parameters", True) or use not in needs_unused]
    expected = {use: train_plain(problem, use) for use in uses}
    for actual in run_ranks(train, torch.Size(size).numel(), problem, uses, size, options):
        for use in uses:
            for fqn, value in actual[use].items():
                torch.testing.assert_close(value, expected[use][fqn], rtol=1e-11, atol=1e-13, msg=use)


def train_with_a_fault(problem, fault):
    with pytest.MonkeyPatch.context() as patch:
        fault(patch, "the mean of a step is kept", lambda store: lambda self, mean: store(self, mean * 2))
        return train(problem, ["one backward"], (2,), {"zero": 2})["one backward"]


def test_another_mean_is_another_training(problem, fault):
    expected = train_plain(problem, "one backward")
    for actual in run_ranks(train_with_a_fault, 2, problem, fault):
        assert not torch.allclose(actual["scale"], expected["scale"], rtol=1e-9)


# --- partial gradients ---


class Net(nn.Module):
    """Weights of which one is replicated over tensor-parallel ranks, and one is sharded."""

    def __init__(self, mesh=None):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, layout in {"first": [Replicate()], "scale": [Replicate()], "third": [Shard(0)]}.items():
            value = torch.randn(4 if name != "scale" else (), generator=generator, dtype=torch.float64)
            value = value if mesh is None else distribute_tensor(value, mesh, layout)
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x):
        return torch.tanh(x * self.first) * self.third * self.scale


def mean_square(module, x):
    return module(x).square().mean()


def rows(step):
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train_in_two_axes(zero, rounds):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = Net(mesh["tp"])
    model = DDP(module, mesh["dp"], zero=zero, per_rank=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, model=model, **SGD)
    for step in range(3):
        for round_ in range(rounds):
            x = rows(10 * step + round_).chunk(2)[mesh["dp"].get_local_rank()]
            (Engine(module, mean_square)(distribute_tensor(x, mesh["tp"], [Shard(1)])) * 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    with model.unsharded():
        return {fqn: p.detach().full_tensor() for fqn, p in model.named_parameters()}


@halved
@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("zero", [0, 2])
def test_partial_sums_over_other_axes(zero, rounds):
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), **SGD)
    for step in range(3):
        for round_ in range(rounds):
            (mean_square(module, rows(10 * step + round_)) * 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for actual in run_ranks(train_in_two_axes, 4, zero, rounds):
        for fqn, value in module.named_parameters():
            torch.testing.assert_close(actual[fqn], value.detach(), rtol=1e-12, atol=1e-14)


# --- when, and what is kept ---


def on_two_ranks(problem, **options):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = problem.model()
    return module, DDP(module, mesh["dp"], bucket_bytes=300, **options)


def launches(problem, overlap):
    """Return the numbers of buckets that have been launched after each call."""
    module, _ = on_two_ranks(problem, zero=2, overlap=overlap)
    params = [p for p in module.parameters() if p.requires_grad]
    groups = [params[2:], params[:2]]
    reducer = gradient_receiver(params[0]).reducer
    reduction = reducer.begin(groups)
    seen = []
    for group in groups:
        reduction.add((p, torch.ones_like(p)) for p in group)
        seen.append(len(reducer.buckets) - len(reduction._waiting))
    reduction.finish()
    return seen, len(reducer.buckets)


def test_a_group_is_reduced_as_soon_as_it_is_complete(problem):
    for seen, total in run_ranks(launches, 2, problem, True):
        assert 0 < seen[0] < seen[1] == total
    for seen, _ in run_ranks(launches, 2, problem, False):
        assert seen == [0, 0]


def kept_bytes(problem):
    """Return the bytes of means between a step and its backward, of gradients of other steps, and of all gradients."""
    module, model = on_two_ranks(problem, zero=2)
    engine = Engine(module, squares)
    loss = engine(*problem.batch(0, coord=dist.get_rank(), size=2))
    gc.collect()
    buffers = sum(bucket.grads.untyped_storage().nbytes() for bucket in model._reducer.buckets)
    means = sum(mean.nbytes for mean in loss.grad_fn.saved_tensors)
    assert all(p.grad is None for p in module.parameters())
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.grad_fn.saved_tensors  # noqa: B018 - freed
    return buffers, means, sum(bucket.grads.numel() * 8 for bucket in model._reducer.buckets)


def test_means_are_sharded_until_the_backward(problem):
    for buffers, means, whole in run_ranks(kept_bytes, 2, problem):
        assert buffers == 0
        assert means == whole / 2


# --- gradients of some ranks ---


def part_used(problem, where):
    """Rank 0 has no gradient of the last parameters, or no rank has."""
    module, model = on_two_ranks(problem, zero=1)
    params = {fqn: p for fqn, p in module.named_parameters() if p.requires_grad}
    reduction = gradient_receiver(module.scale).reducer.begin([params.values()])
    has = where == "one rank" and dist.get_rank() == 1
    reduction.add((p, torch.ones_like(p) if has or fqn != "scale" else None) for fqn, p in params.items())
    loss = Deliver.apply(torch.ones(()), torch.zeros((), requires_grad=True), reduction, *reduction.finish())
    loss.backward()
    norm = clip_grad_norm_(model, 1e9)
    return [fqn for fqn, p in params.items() if p.grad is not None], float(norm)


def test_a_parameter_that_some_ranks_use(problem):
    numel = sum(p.numel() for p in problem.model().parameters() if p.requires_grad)
    for names, norm in run_ranks(part_used, 2, problem, "one rank"):
        assert "scale" in names
        assert norm == pytest.approx((numel - 1 + 0.25) ** 0.5)
    for names, norm in run_ranks(part_used, 2, problem, "no rank"):
        assert "scale" not in names
        assert norm == pytest.approx((numel - 1) ** 0.5)


# --- where the backward reduces ---


def begins(problem):
    found = {}
    module, model = on_two_ranks(problem, zero=0)
    reducer = gradient_receiver(module.scale).reducer
    with model.no_sync():
        found["inside of no_sync"] = reducer.begin([])
    handle = module.scale.register_post_accumulate_grad_hook(lambda _: None)
    found["with a hook"] = reducer.begin([])
    handle.remove()
    loss = Engine(module, squares)(*problem.batch(0, coord=dist.get_rank(), size=2))
    with model.no_sync(), pytest.raises(RuntimeError) as caught:
        loss.backward()
    return found, str(caught.value)


def test_a_backward_that_does_not_reduce(problem):
    for found, text in run_ranks(begins, 2, problem):
        assert found == {"inside of no_sync": None, "with a hook": None}
        assert "backward() of a pipeline's step outside of no_sync(), as the step itself" in text
        assert "run both inside of no_sync() or none" in text
