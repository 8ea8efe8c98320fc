"""Hybrid sharding: shards over one mesh axis, replicas over another, and the training of one process.

With ordered reduction it has, too, the bits of the same ranks on one axis without any sharding.
"""

import contextlib
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale.optim import DDP, DistributedOptimizer, clip, clip_grad_norm_, ddp
from vescale_testing import TrainingRecord, assert_same_training, run_ranks

pytestmark = pytest.mark.usefixtures("impatient_reducer")

#: Rows per batch: 1, 2, 3, 4 and 6 ranks divide it evenly.
ROWS = 12
CLIP = 0.05


class Net(nn.Module):
    """Units, a tied weight, a frozen one, dropout, and parameters that every other call or some rows of a batch use."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 7)])
        self.layers[2].weight = self.layers[1].weight
        self.layers[2].bias.requires_grad_(False)
        self.drop = nn.Dropout(0.3)
        self.sometimes = nn.Linear(7, 7, bias=False)
        self.rare = nn.Linear(5, 7)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.calls = 0

    def forward(self, x):
        hidden = x
        for layer in self.layers:
            hidden = self.drop(torch.tanh(layer(hidden)))
        self.calls += 1
        hidden = self.sometimes(hidden) if self.calls % 2 else hidden
        chosen = x[:, 0] > 1
        if chosen.any():
            hidden = hidden.index_add(0, chosen.nonzero()[:, 0], self.rare(x[chosen]))
        return hidden * self.scale


def build():
    torch.manual_seed(1)
    return Net().double()


def batch(index, coord, size):
    generator = torch.Generator().manual_seed(index)
    x = torch.randn(ROWS, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(ROWS, 7, generator=generator, dtype=torch.float64)
    return x.chunk(size)[coord], y.chunk(size)[coord]


@dataclass(frozen=True)
class Training:
    """What is computed: AdamW with clipping, gradients accumulated locally or by a reduction each."""

    no_sync: bool = True
    steps: int = 2
    accumulation: int = 2

    def run(self, model, optimizer, coord=0, size=1, before_step=lambda: None):
        torch.manual_seed(7)  # masks of dropout
        norms = []
        for step in range(self.steps):
            for micro in range(self.accumulation):
                x, y = batch(10 * step + micro, coord, size)
                local = self.no_sync and isinstance(model, DDP) and micro < self.accumulation - 1
                with model.no_sync() if local else contextlib.nullcontext():
                    (((model(x) - y) ** 2).mean() / self.accumulation).backward()
            norm = before_step()
            optimizer.step()
            norms.append(getattr(optimizer, "grad_norm", norm))
            optimizer.zero_grad()
        with model.unsharded() if isinstance(model, DDP) else contextlib.nullcontext():
            return TrainingRecord.collect(getattr(model, "module", model), optimizer, grad_norms=norms)

    def on_one_process(self):
        model = build()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
        return self.run(model, optimizer, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP))

    def on_ranks(self, mesh, **settings):
        model = DDP(build(), mesh, **settings)
        optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, weight_decay=0.1, clip_grad_norm=CLIP)
        coord, size = place(mesh)
        return self.run(model, optimizer, coord, size)


def place(mesh):
    """Return this rank's number among all ranks of a mesh, row by row, and their number."""
    coord = 0
    for dim in range(mesh.ndim):
        coord = coord * mesh.size(dim) + mesh.get_local_rank(dim)
    return coord, mesh.size()


def grid(shape, *, transposed=False):
    """Return a mesh of replicas and shards; transposed: neighbouring ranks are replicas."""
    if not transposed:
        return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    ranks = torch.arange(shape[0] * shape[1]).view(shape[::-1]).T
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))


def ways(*pairs):
    """Give (zero, reduction) settings in which every bucket size and kind of overlap occurs."""
    return tuple(
        {"zero": zero, "reduction": reduction, "bucket_bytes": (1, 300, 2**20)[i % 3], "overlap": i % 4 != 3}
        for i, (zero, reduction) in enumerate(pairs)
    )


ALL = ways(*((zero, reduction) for zero in range(4) for reduction in ("ordered", "backend")))
SOME = ways((1, "ordered"), (2, "backend"), (3, "ordered"))
TABLE = (((2, 2), False, ALL), ((2, 2), True, SOME), ((1, 4), False, SOME), ((4, 1), False, SOME))


def compare(training, expected, table, prepare=lambda: None):
    """Run a training in each way of the table, on the ranks of this world."""
    prepare()
    flat = training.on_ranks(init_device_mesh("cpu", (grid_size(table),)), zero=0, reduction="ordered")
    for shape, transposed, rows in table:
        for row in rows:
            record = training.on_ranks(grid(shape, transposed=transposed), **row)
            try:
                assert_same_training(record, expected, rtol=1e-12)
                if row["reduction"] == "ordered":
                    assert_same_training(record, flat, bitwise=True)
            except AssertionError as error:
                raise AssertionError(f"{training} on {shape}, transposed={transposed}, {row}: {error}") from None


def grid_size(table):
    (rows, cols), *_ = table[0]
    return rows * cols


def check(table, training=Training(), **kwargs):
    run_ranks(compare, grid_size(table), training, training.on_one_process(), table, timeout=100, **kwargs)


def test_every_stage_and_reduction():
    check(TABLE)


def test_a_reduction_for_each_of_several_backwards():
    check([((2, 2), False, SOME)], Training(no_sync=False))


def narrow_on_the_wire():
    dtypes = {"grad_dtype": torch.float64, "reduce_dtype": torch.float32, "reduction": "ordered", "bucket_bytes": 300}
    training = Training(no_sync=False)
    flat = training.on_ranks(init_device_mesh("cpu", (4,)), zero=0, **dtypes)
    for zero in (1, 3):
        assert_same_training(training.on_ranks(grid((2, 2)), zero=zero, **dtypes), flat, bitwise=True)
    backend = training.on_ranks(grid((2, 2)), zero=2, **dtypes | {"reduction": "backend"})
    assert_same_training(backend, flat, rtol=1e-4)
    with pytest.raises(AssertionError, match=r"differs by .*, allowed is 1e-10"):
        assert_same_training(training.on_one_process(), flat, rtol=1e-10)


def test_sums_in_another_dtype():
    run_ranks(narrow_on_the_wire, 4)


def test_more_shards_than_replicas():
    check([((2, 3), False, ways((2, "ordered"), (3, "backend")))])


# ------------------------------------------------------------------------------------------- what must be seen


def replicas_are_not_added():
    """On a grid of 2 x 2 ranks, whose replicas are 0 and 2, 1 and 3."""
    reduce = dist.all_reduce

    def rows_only(tensor, *args, group=None, **kwargs):
        of_replicas = group is not None and dist.get_process_group_ranks(group) in ([0, 2], [1, 3])
        return reduce(tensor.clone() if of_replicas else tensor, *args, group=group, **kwargs)

    pytest.MonkeyPatch().setattr(dist, "all_reduce", rows_only)


def pieces_in_the_order_of_the_batch():
    """As if pieces lay in the buffer as the ranks are numbered, row by row."""
    exchange = dist.all_to_all_single

    def unordered(received, buffer, *args, **kwargs):
        return exchange(received, buffer.view(4, -1)[[0, 2, 1, 3]].view(-1), *args, **kwargs)

    pytest.MonkeyPatch().setattr(dist, "all_to_all_single", unordered)


def sums_by_shard():
    """The ranks of a shard come first, as they do in the exchange; the order of the batch is another one."""
    exchange = dist.all_to_all_single

    def by_shard(received, *args, group, **kwargs):
        work = exchange(received, *args, group=group, **kwargs)
        if dist.get_process_group_ranks(group) == [0, 2, 1, 3]:  # not where all ranks are on one axis
            work.wait()
            received.copy_(received.view(4, -1)[[0, 2, 1, 3]].view(-1))
        return work

    pytest.MonkeyPatch().setattr(dist, "all_to_all_single", by_shard)


def masks_by_shard_only():
    pytest.MonkeyPatch().setattr(ddp, "attach_local_batch", masks(slice(-1, None)))


def masks_of_columns_first():
    pytest.MonkeyPatch().setattr(ddp, "attach_local_batch", masks(slice(None, None, -1)))


def masks(chosen):
    nothing = SimpleNamespace(covers_rows=False, attach=lambda: None)
    ddp.rows_program = lambda _module: lambda *_, **__: nothing  # so that no recording finds it
    attach = ddp.attach_local_batch
    return lambda module, meshes, **settings: attach(module, meshes[chosen], **settings)


def norms_count_replicas_twice():
    pytest.MonkeyPatch().setattr(clip, "_zero_axis", lambda _param, model: model.data_axes.all)


def each_replica_adds_norms_in_an_order_of_its_own():
    found = clip._power_sum
    noise = 1 + 1e-14 * (dist.get_rank() // 2)
    pytest.MonkeyPatch().setattr(clip, "_power_sum", lambda *args: found(*args) * noise)


def each_replica_adds_norms_for_itself():
    """As where the mesh is not known of which the axes are slices."""
    each_replica_adds_norms_in_an_order_of_its_own()
    known = clip._known_axes
    alone = lambda *args: {r: each for r, each in known(*args).items() if each.axis.name == "shard"}  # noqa: E731
    pytest.MonkeyPatch().setattr(clip, "_known_axes", alone)


def replicas_do_not_agree_on_the_norm():
    each_replica_adds_norms_for_itself()
    pytest.MonkeyPatch().setattr(clip.Counting, "same", lambda _self, number: number)


@pytest.mark.parametrize(
    "prepare", [each_replica_adds_norms_in_an_order_of_its_own, each_replica_adds_norms_for_itself]
)
def test_replicas_stay_equal_though_they_add_norms_in_another_order(prepare):
    check([((2, 2), False, ways((2, "backend"), (3, "backend")))], prepare=prepare)


@pytest.mark.parametrize(
    "prepare, row, seen",
    [
        (replicas_are_not_added, (2, "backend"), "gradient norm of step 1 differs|replicas differ"),
        (pieces_in_the_order_of_the_batch, (2, "ordered"), "gradient norm of step 1 differs"),
        (sums_by_shard, (2, "ordered"), "differs by .*allowed is 0"),
        (masks_by_shard_only, (2, "backend"), "gradient norm of step 1 differs"),
        (masks_of_columns_first, (2, "backend"), "gradient norm of step 1 differs"),
        (replicas_do_not_agree_on_the_norm, (2, "backend"), "replicas differ in"),
        (norms_count_replicas_twice, (2, "backend"), "gradient norm of step 1 differs by 0.414"),
        (norms_count_replicas_twice, (3, "ordered"), "gradient norm of step 1 differs by 0.414"),
    ],
)
def test_a_wrong_variant_is_seen(prepare, row, seen):
    with pytest.raises(AssertionError, match=seen):
        check([((2, 2), False, ways(row))], prepare=prepare)


def test_clipping_without_a_model():
    """Gradients know themselves over which axis they are sharded."""

    def body():
        norms = []
        for zero in (0, 2):
            model = DDP(build(), grid((2, 2)), zero=zero)
            x, y = batch(0, *place(grid((2, 2))))
            torch.manual_seed(7)
            ((model(x) - y) ** 2).mean().backward()
            norms.append(clip_grad_norm_([p for p in model.parameters() if p.requires_grad], CLIP))
        return norms

    for first, second in run_ranks(body, 4):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=0)
