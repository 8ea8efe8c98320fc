"""Inside `random.local_batch` each data-parallel rank draws its slice of what one device draws for the global batch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes

from vescale.dtensor import Replicate, Shard, UnsupportedRandomOperator, disabled, extension, init_device_mesh, random
from vescale_testing import ranks

B = 3  # rows on each rank

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x[..., None], 0.3),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True)[1],
    "bernoulli": torch.bernoulli,
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 9),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "rand": lambda x: torch.rand(x.shape[0], 5),
    "rand float64": lambda x: torch.rand(x.shape[0], 5, dtype=torch.float64),
    "randn": lambda x: torch.randn(x.shape[0]),
    "randn of a generator": lambda x: torch.randn(x.shape[0], 2, generator=torch.Generator().manual_seed(9)),
    "normal": lambda x: torch.normal(1.0, 2.0, (x.shape[0], 3)),
    "randint": lambda x: torch.randint(100, (x.shape[0], 2)),
    "randint low": lambda x: torch.randint(-5, 5, (x.shape[0], 2), dtype=torch.int32),
    "columns": lambda x: torch.empty(x.shape[0], 9)[:, 1:6].normal_(),
    "normal of means": lambda x: torch.normal(x, 2.0),
    "normal of deviations": lambda x: torch.normal(1.0, x),
    "normal of both": lambda x: torch.normal(x, x + 1),
    "multinomial": lambda x: torch.multinomial(x[:, 0], 2),
    "multinomial with replacement": lambda x: torch.multinomial(x[:, 0], 5, replacement=True),
    "functional": lambda x: torch.ops.aten.exponential(x, 2.0),
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.3),
    "out": lambda x: torch.rand(x.shape[0], 3, out=torch.empty(x.shape[0], 3)),
    "transposed bernoulli": lambda x: torch.bernoulli(x.transpose(1, 2)),
    "transposed dropout": lambda x: torch.native_dropout(x.transpose(1, 2), 0.3, True)[0],
    "transposed": lambda x: torch.empty_like(x.transpose(1, 2)).normal_(),
}


def batch(rows):
    return torch.rand(rows, 4, 6, generator=torch.Generator().manual_seed(1))


def assert_slice(draw, axis, *, make=batch):
    """`draw` on this rank's rows inside the context is this rank's rows of `draw` on all rows."""
    rows = slice(axis.get_local_rank() * B, (axis.get_local_rank() + 1) * B)
    torch.manual_seed(4)
    expected = draw(make(B * axis.size()))[rows]
    state = torch.get_rng_state()
    local = make(B * axis.size())[rows]
    torch.manual_seed(4)
    with random.local_batch(axis):
        actual = draw(local)
    assert torch.equal(actual, expected)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("world", [2, 3])
def test_plain_tensors(world):
    @ranks(world)
    def on_every_rank():
        axis = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        for name, draw in DRAWS.items():
            try:
                assert_slice(draw, axis)
                with torch.inference_mode():
                    assert_slice(draw, axis)
            except AssertionError as error:
                raise AssertionError(name) from error

    on_every_rank()


@pytest.mark.parametrize("names", [("dp", "tp"), ("tp", "dp")])
def test_sharded_tensors_inside_data_parallelism(names, shard, shard_of):
    @ranks(4)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        dp, tp = mesh["dp"], mesh["tp"]
        rows = slice(dp.get_local_rank() * B, (dp.get_local_rank() + 1) * B)
        whole = batch(2 * B)
        for name in (
            "dropout",
            "native_dropout",
            "alpha_dropout",
            "dropout2d",
            "rand_like",
            "bernoulli",
            "exponential_",
        ):
            for placements in [(Shard(1),), (Shard(2),), (Shard(0),), (Replicate(),)]:
                torch.manual_seed(4)
                expected, state = DRAWS[name](whole)[rows], torch.get_rng_state()
                torch.manual_seed(4)
                with random.local_batch(dp):
                    actual = DRAWS[name](shard(whole[rows], tp, placements))
                assert torch.equal(actual.to_local(), shard_of(expected, tp, actual.placements)), (name, placements)
                assert torch.equal(torch.get_rng_state(), state), (name, placements)

    on_every_rank()


@ranks(2)
def test_code_that_is_not_watched():
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    coord = axis.get_local_rank()
    assert not extension.is_watched()
    with extension.unwatched(), extension.watched():
        assert not extension.is_watched_alone()
    for stream in ("torch", "philox"):
        with random.stream(stream, seed=4):
            whole, again = torch.rand(2 * B, 5), torch.rand(2 * B, 5)
        torch.manual_seed(4)
        torch.rand(2 * B, 5)
        in_torch = torch.rand(B, 5)
        with random.stream(stream, seed=4), random.local_batch(axis):
            assert extension.is_watched_alone()
            rows = torch.rand(B, 5)
            with extension.unwatched():
                assert extension.is_watched()
                assert not extension.is_watched_alone()
                assert not dispatch_modes()
                if stream == "torch":
                    with random.fork():
                        assert torch.equal(torch.rand(B, 5), in_torch)  # not a part of what one device draws
                with extension.watched():
                    assert extension.is_watched_alone()
                    assert torch.equal(torch.rand(B, 5), again.chunk(2)[coord])
                assert not dispatch_modes()
            assert extension.is_watched_alone()
            with random.forbidden("of this test"), extension.unwatched():  # inside another watch
                with pytest.raises(RuntimeError, match="of this test"):
                    torch.rand(1)
        assert torch.equal(rows, whole.chunk(2)[coord])


@ranks(4)
def test_nested_axes_cut_parts_of_parts():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    index = 2 * mesh.get_local_rank("outer") + mesh.get_local_rank("inner")
    torch.manual_seed(4)
    expected = [torch.rand(4 * B, 5)[index * B : (index + 1) * B] for _ in range(2)]
    torch.manual_seed(4)
    with random.local_batch(mesh["outer"]):
        with random.local_batch(mesh["inner"]):
            assert torch.equal(torch.rand(B, 5), expected[0])
            with extension.unwatched():  # both of them
                assert not dispatch_modes()
                with extension.watched():
                    assert torch.equal(torch.rand(B, 5), expected[1])


@ranks(2)
def test_a_module_trains_with_the_masks_of_the_global_batch():
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2), nn.Dropout(0.1)).double()
    x = batch(2 * B).double()
    torch.manual_seed(4)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(4)
    with random.local_batch(axis):
        model(x.chunk(2)[axis.get_local_rank()]).square().sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-14)


@ranks(2)
def test_without_the_rules_all_ranks_repeat_one_mask():
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if axis.get_local_rank() == 1:  # the first rank's slice is the same with and without
        with disabled(), pytest.raises(AssertionError):
            assert_slice(DRAWS["dropout"], axis)
    assert_slice(DRAWS["dropout"], axis)


@ranks(2)
def test_draws_that_have_no_slice_are_refused():
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    before = torch.get_rng_state()
    refused = {
        "a tensor without dims has no batch dim: call it outside random.local_batch": lambda: torch.rand(()),
        "aten.randperm.default on these arguments cannot draw .* outside random.local_batch": lambda: torch.randperm(5),
        "aten.multinomial.default on a tensor of shape": lambda: torch.multinomial(torch.ones(4), 1),
        "aten.poisson.default on a tensor of .* depend on the values": lambda: torch.poisson(torch.ones(2, 4)),
        "aten.rrelu_with_noise.default on a tensor": lambda: F.rrelu(torch.ones(2, 4), training=True),
        "several of its elements share memory": lambda: torch.empty(4, 1).expand(4, 2).normal_(),
        "one row does not determine the memory order": lambda: torch.empty(4, 1).t().normal_(),
    }
    with random.local_batch(axis):
        for text, draw in refused.items():
            with pytest.raises(UnsupportedRandomOperator, match=text):
                draw()
    assert torch.equal(torch.get_rng_state(), before)


@ranks(4)
def test_a_sharded_batch_is_not_cut_twice(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = shard(batch(4), mesh, (Shard(0), Replicate()))
    with random.local_batch(mesh["dp"]):
        with pytest.raises(UnsupportedRandomOperator, match=r"its mesh spans the axis of random\.local_batch already"):
            F.dropout(x)
    with pytest.raises(ValueError, match=r"expects a 1-D mesh axis such as mesh\['dp'\], got axes \('dp', 'tp'\)"):
        with random.local_batch(mesh):
            pass


@ranks(2)
def test_an_axis_of_size_one_changes_nothing():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    with random.local_batch(mesh["dp"]):
        torch.manual_seed(4)
        drawn = torch.rand(()), torch.randperm(5)
    torch.manual_seed(4)
    assert torch.equal(drawn[0], torch.rand(()))
    assert torch.equal(drawn[1], torch.randperm(5))


@pytest.mark.parametrize("stream", ["torch", "philox"])
def test_parts_of_several_sizes(stream):
    """The draws of parts of 2/5 and 3/5 of a batch are its rows; other numbers of rows are refused."""
    with random.stream(stream, seed=3):
        whole = torch.rand(10, 2)
    parts = []
    for first, size in ((0, 2), (2, 3)):
        with random.stream(stream, seed=3), extension.PipelineDraws.part(first, 5, size):
            parts.append(torch.rand(2 * size, 2))
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(torch.cat(parts[::-1]), whole)
    text = (
        "dim 0 of size 3 is no multiple of 2, which a micro-batch of 2/5 of the batch has: use micro-batches of equal"
    )
    with random.stream(stream, seed=3), extension.PipelineDraws.part(0, 5, 2):
        with pytest.raises(UnsupportedRandomOperator, match=text):
            torch.rand(3)


@ranks(2)
def test_the_context_ends_with_an_exception():
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ZeroDivisionError), random.local_batch(axis):
        raise ZeroDivisionError
    torch.rand(())  # refused inside


def test_forbidden_refuses_what_draws_and_nothing_else():
    query = torch.ones(1, 1, 2, 4)
    with random.forbidden("move it out of the region"):
        torch.zeros(3) + 1
        F.scaled_dot_product_attention(query, query, query)
        F.dropout(query, 0.5, training=False)
        for draw in (lambda: torch.rand(3), lambda: F.dropout(query), lambda: torch.randperm(3)):
            with pytest.raises(
                UnsupportedRandomOperator, match="cannot draw what one device draws; move it out of the region"
            ):
                draw()
    torch.rand(3)


def accumulate(model, batches, loss_of):
    model.zero_grad()
    for rows in batches:
        loss_of(model(rows)).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@ranks(2)
def test_accumulated_gradients_are_those_of_the_same_loop_on_one_device():
    """Each micro-batch is a draw of its own: rank r holds part r of every one of them."""
    axis = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.RReLU(), nn.Linear(8, 2)).double().train()
    model[2].eval()  # its training mode depends on the values of the whole batch
    micro_batches = [batch(4 * B)[:, 0].double()[2 * B * i : 2 * B * (i + 1)] for i in range(2)]
    torch.manual_seed(4)
    expected = accumulate(model, micro_batches, lambda out: out.square().sum())
    state = torch.get_rng_state()
    torch.manual_seed(4)
    with random.local_batch(axis):
        mine = [rows.chunk(2)[axis.get_local_rank()] for rows in micro_batches]
        gradients = accumulate(model, mine, lambda out: out.square().sum())
    assert torch.equal(torch.get_rng_state(), state)
    for gradient, reference in zip(gradients, expected, strict=True):
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-14)


@ranks(4)
def test_nested_axes_with_operators_of_every_family():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    index = 2 * mesh.get_local_rank("outer") + mesh.get_local_rank("inner")
    whole = batch(4 * B)
    for name in ("dropout", "normal of both", "multinomial", "multinomial with replacement", "transposed", "columns"):
        torch.manual_seed(4)
        expected, state = DRAWS[name](whole)[index * B : (index + 1) * B], torch.get_rng_state()
        torch.manual_seed(4)
        with random.local_batch(mesh["outer"]), random.local_batch(mesh["inner"]):
            actual = DRAWS[name](whole[index * B : (index + 1) * B])
        assert torch.equal(actual, expected), name
        assert torch.equal(torch.get_rng_state(), state), name
