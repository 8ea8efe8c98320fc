"""All ranks that have parts or copies of a matrix share its iterations, and each result has the bits of repeating them.

Momentum is read and results are seen where the optimizer has them: every rank rebuilds all whole matrices from what all
ranks hold, iterates them for itself, and compares what it has got.
"""

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.dtensor import InterleavedShard, RaggedShard, distribute_tensor
from vescale.optim import DDP, DistributedOptimizer, Muon
from vescale_testing import ranks

SETTINGS = {"lr": 0.02, "adamw": ["gain"], "adamw_lr": 0.01}

#: Shape and placement over tensor parallelism. Of three experts, one rank of two has two.
PARAMETERS = {
    "rows": ((7, 6), Shard(0)),
    "columns": ((6, 7), Shard(1)),
    "fused": ((12, 5), InterleavedShard(0, 3)),
    "thin": ((4, 1), Shard(1)),
    "replicated": ((6, 6), Replicate()),
    "router": ((3, 6), Replicate()),
    "experts": ((3, 5, 6), Shard(0)),
    "stack": ((2, 6, 5), Shard(2)),
    "fused_stack": ((2, 6, 4), InterleavedShard(1, 2)),
    "up": ((8, 6), Shard(0)),
    "down": ((6, 8), Shard(1)),
    "gain": ((7,), Shard(0)),
}


class Sums(nn.Module):
    """A sum of products of parameters and numbers, which are their gradients; a number may be missing."""

    def __init__(self, parameters, place):
        super().__init__()
        for index, (name, (shape, placement)) in enumerate(parameters.items()):
            value = torch.randn(shape, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(place(value, placement)))

    def forward(self, step, missing=()):
        total = 0
        for index, (name, param) in enumerate(self.named_parameters()):
            if name in missing:
                continue
            generator = torch.Generator().manual_seed(100 * step + index)
            gradient = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            if isinstance(param, DTensor):
                gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
                gradient = gradient.to_local()
                total = total + (param.to_local() * gradient).sum()
            else:
                total = total + (param * gradient).sum()
        return total


def matrix_cost(rows, cols):
    """Return the operations of an iteration: n x n = n x m times its transpose, n x n squared, n x n times n x m."""
    n, m = sorted((rows, cols))
    return 2 * n * n * m + 2 * n**3 + 2 * n * n * m


class Watch:
    """Notes what this rank iterates and calls, and what comes out."""

    def __init__(self, optimizer, patch, iterations):
        self.calls, self.seen = [], {}
        self._optimizer, self._iterated = optimizer, iterations(patch)
        matrices = optimizer._base._matrices
        self._orthogonalize = matrices.orthogonalize
        self._pieces = {piece.tensor: piece for piece in optimizer.pieces}
        patch.setattr(matrices, "orthogonalize", self._watch)
        for name in ("all_to_all_single", "broadcast"):
            call = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, call=call, name=name, **k: self.calls.append(name) or call(*a, **k))

    @property
    def cost(self):
        """The operations of the iterations of this rank, but for those of the comparison."""
        return sum(matrix_cost(*shape) for shape in self._iterated)

    def _watch(self, updates):
        updates = {update.tensor: update for update in updates}
        self.calls.clear()
        results = list(self._orthogonalize(updates.values()))
        self.calls_of_step = list(self.calls)
        self.seen = {self._pieces[t].fqn: (self._pieces[t], updates[t], result) for t, result in results}
        return results

    def check_bits(self):
        """Compare all results with iterations of whole matrices on this rank."""
        state = self._optimizer.state_dict()["state"]

        def boxes_of(fqn, tensor):
            held = copy.copy(state[fqn]["momentum_buffer"])
            held.tensor = tensor
            return [(offsets, view.clone()) for offsets, view in held.__boxes__()]

        values = {fqn: boxes_of(fqn, update.value) for fqn, (_, update, _) in self.seen.items()}
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, values)
        for fqn, (piece, update, result) in self.seen.items():
            whole = torch.full(piece.param.shape, float("nan"), dtype=torch.float64)
            for offsets, value in (box for each in every for box in each.get(fqn, ())):
                whole[slices(offsets, value)] = value
            matrices = whole.bfloat16() if whole.ndim == 3 else whole.bfloat16()[None]
            # parts that no rank holds are of experts without a gradient
            expected = torch.stack([m if m.isnan().any() else update.iteration(m) for m in matrices]).view(whole.shape)
            for offsets, value in boxes_of(fqn, result):
                assert value.dtype == torch.bfloat16
                assert torch.equal(value, expected[slices(offsets, value)]), f"{fqn} at {offsets} differs"


def slices(offsets, value):
    return tuple(slice(o, o + n) for o, n in zip(offsets, value.shape, strict=True))


@pytest.fixture
def watched(iterations):
    """Yield, in a context, a model with parameters over an axis of a mesh, its optimizer, and the watch on it."""

    @contextlib.contextmanager
    def watched(mesh, zero, parameters=PARAMETERS, data=("dp",), tensor="tp"):
        module = Sums(parameters, lambda value, p: distribute_tensor(value, mesh[tensor], [p]) if tensor else value)
        model = module if zero is None else DDP(module, mesh[data], zero=zero, bucket_bytes=300, per_rank=True)
        optimizer = DistributedOptimizer(Muon, model=model, **SETTINGS)
        with pytest.MonkeyPatch().context() as patch:
            yield model, optimizer, Watch(optimizer, patch, iterations)

    return watched


def step(model, optimizer, number, missing=()):
    optimizer.zero_grad()
    total = model(number, missing)
    if isinstance(total, torch.Tensor):  # something is used
        total.backward()
    optimizer.step()


def cost_of_all(parameters=PARAMETERS):
    shapes = [shape for name, (shape, _) in parameters.items() if name != "gain"]
    return sum(matrix_cost(*shape[-2:]) * (shape[0] if len(shape) == 3 else 1) for shape in shapes)


def check_shares(watch, num_ranks):
    """Every matrix is iterated once, and the busiest rank has not much more than the mean."""
    costs = [None] * dist.get_world_size()
    dist.all_gather_object(costs, watch.cost)
    assert sum(costs) == cost_of_all()
    assert max(costs) <= 1.3 * cost_of_all() / num_ranks, costs


@ranks(2)
def test_two_tensor_parallel_ranks_have_half_each(watched):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for zero in (None, 0, 1, 2, 3):
        with watched(mesh, zero) as (model, optimizer, watch):
            step(model, optimizer, 0)
            check_shares(watch, 2)
            assert watch.calls_of_step == ["all_to_all_single"] * 2
            watch.check_bits()
            step(model, optimizer, 1, missing=("rows", "router", "experts"))
            watch.check_bits()
            assert "rows" not in watch.seen
            step(model, optimizer, 2, missing=("experts",) if dist.get_rank() else ())  # experts of one rank only
            watch.check_bits()
            assert ("experts" in watch.seen) == (dist.get_rank() == 0)
            step(model, optimizer, 3, missing=PARAMETERS if zero is None else list(PARAMETERS)[1:])
            watch.check_bits()


def layouts():
    """Yield meshes of four ranks, with the axes of data and tensor parallelism."""
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "dp", "tp"
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")), "dp", "tp"
    yield init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("replicate", "shard", "tp")), ("replicate", "shard"), "tp"
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")), ("replicate", "shard"), None


@ranks(4)
def test_four_ranks_have_a_quarter_each(watched):
    for mesh, data, tensor in layouts():
        for zero in (0, 1, 3):
            with watched(mesh, zero, data=data, tensor=tensor) as (model, optimizer, watch):
                step(model, optimizer, 0)
                check_shares(watch, 4)
                if zero or tensor:
                    assert watch.calls_of_step == ["all_to_all_single"] * 2
                else:
                    assert watch.calls_of_step == ["broadcast"] * 4  # all have everything: one by each owner
                watch.check_bits()
                step(model, optimizer, 1, missing=("rows", "stack", "gain"))
                watch.check_bits()


@ranks(2)
def test_lost_parts_and_lost_results_are_seen(watched, lost_exchanges):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    for lost in (0, 1):
        with watched(mesh, 1) as (model, optimizer, watch), pytest.MonkeyPatch().context() as patch:
            lost_exchanges(patch, lost)
            step(model, optimizer, 0)
            differ = 0
            try:
                watch.check_bits()
            except AssertionError as error:
                differ = int("differs" in str(error))
            seen = torch.tensor(differ)
            dist.all_reduce(seen)
            assert seen.item() == 2


@ranks(2)
def test_one_matrix_that_all_have_is_repeated_and_nothing_travels(watched):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with watched(mesh, None, {"router": PARAMETERS["router"], "gain": PARAMETERS["gain"]}) as (model, optimizer, watch):
        step(model, optimizer, 0)
        assert watch.calls_of_step == []
        assert watch.cost == matrix_cost(3, 6)
        watch.check_bits()
    two = {"router": PARAMETERS["router"], "replicated": PARAMETERS["replicated"], "gain": PARAMETERS["gain"]}
    with watched(mesh, None, two) as (model, optimizer, watch):
        step(model, optimizer, 0)
        assert watch.calls_of_step == ["broadcast"] * 2
        assert watch.cost in (matrix_cost(3, 6), matrix_cost(6, 6))
        watch.check_bits()


@ranks(2)
def test_ragged_shards_of_rows_and_of_whole_matrices(iterations):
    """Submodules that are experts are whole on one rank, which keeps them; other ragged shards are brought."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    placements = {
        "here": ((4, 6), RaggedShard((0,), (1, 0))),
        "there": ((4, 6), RaggedShard((0,), (0, 1))),
        "uneven": ((6, 4), RaggedShard((0,), (1, 2))),
        "flat": ((4, 3), RaggedShard((0, 1), (1, 3))),
        "experts": ((3, 4, 5), RaggedShard((0,), (1, 2))),
    }
    module = Sums(placements, lambda value, p: distribute_tensor(value, mesh, [p]))
    whole = Sums(placements, lambda value, _: value)
    settings = {**SETTINGS, "adamw": []}
    optimizer = DistributedOptimizer(Muon, model=module, **settings)
    expected = Muon(whole.named_parameters(), **settings)
    with pytest.MonkeyPatch().context() as patch:
        watch = Watch(optimizer, patch, iterations)
        for number in range(2):
            step(module, optimizer, number)
    mine = [2 * matrix_cost(4, 6), 2 * matrix_cost(4, 6)][dist.get_rank()] + 2 * (1 + dist.get_rank()) * matrix_cost(
        4, 5
    )
    assert mine < watch.cost <= mine + 2 * max(matrix_cost(6, 4), matrix_cost(4, 3))
    for number in range(2):
        step(whole, expected, number)
    for name, param in module.named_parameters():
        torch.testing.assert_close(param.full_tensor(), dict(whole.named_parameters())[name], rtol=1e-12, atol=1e-14)


@ranks(2)
def test_a_ragged_shard_through_the_matrices_of_a_stack_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    cut = {"experts": ((3, 4, 5), RaggedShard((0, 1), (1, 2)))}
    module = Sums(cut, lambda value, p: distribute_tensor(value, mesh, [p]))
    with pytest.raises(NotImplementedError, match=r"'experts' of shape \(3, 4, 5\) is a stack .* RaggedShard\(\(0,\),"):
        DistributedOptimizer(Muon, model=module, lr=0.02)
    DistributedOptimizer(Muon, model=module, lr=0.02, adamw="experts")


@ranks(2)
def test_ranks_of_a_mesh_in_descending_order(watched):
    mesh = DeviceMesh("cpu", torch.tensor([[1, 0]]), mesh_dim_names=("dp", "tp"))
    for zero in (None, 1):
        with watched(mesh, zero) as (model, optimizer, watch):
            step(model, optimizer, 0)
            check_shares(watch, 2)
            watch.check_bits()


@ranks(4)
def test_axes_that_cross_otherwise_elsewhere_are_an_error():
    for data, tensor in (([[0, 1], [2, 3]], [[0, 3], [1, 2]]), ([[0, 2], [1, 3]], [[0, 1], [3, 2]])):
        data = DeviceMesh("cpu", torch.tensor(data), mesh_dim_names=("other", "dp"))["dp"]
        tensor = DeviceMesh("cpu", torch.tensor(tensor), mesh_dim_names=("other", "tp"))["tp"]
        parameters = {name: PARAMETERS[name] for name in ("up", "down")}
        module = Sums(parameters, lambda value, p, mesh=tensor: distribute_tensor(value, mesh, [p]))
        model = DDP(module, data, zero=0, per_rank=True)
        optimizer = DistributedOptimizer(Muon, model=model, lr=0.02)
        model(0).backward()
        message = r"shared over the axes dp x tp, whose ranks are no grid: on rank \d .* from one init_device_mesh"
        with pytest.raises(ValueError, match=message):
            optimizer.step()


@ranks(2)
def test_ranks_that_disagree_on_a_matrix_are_told(watched):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parameters = {"rows": ((8 + 2 * dist.get_rank(), 6), Shard(0)), "gain": PARAMETERS["gain"]}
    with watched(mesh, None, parameters) as (model, optimizer, _):
        message = (
            r"matrices that ranks share differs .*: rank 0 has 'rows: \(8, 6\) .*', rank 1 has 'rows: \(10.*axis 'tp'"
        )
        with pytest.raises(ValueError, match=message):
            step(model, optimizer, 0)
