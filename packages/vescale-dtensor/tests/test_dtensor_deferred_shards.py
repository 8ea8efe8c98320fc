"""Each rank's shard is bit for bit its slice of the eager parameter, for any mesh, placement, shape and initializer."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale.dtensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    deferred_init,
    distribute_tensor,
    init_device_mesh,
    materialize,
)
from vescale_testing import ranks

S0, S1, R = Shard(0), Shard(1), Replicate()
FILLS = {
    "uniform": lambda x: x.uniform_(-1, 1),
    "normal": lambda x: x.normal_(0.0, 0.02),
    "exponential": lambda x: x.exponential_(),
    "transposed": lambda x: x.permute(*range(x.ndim - 1, -1, -1)).normal_(),
}
SHAPES = [(7, 5), (1, 16), (16, 1), (17, 3), (2, 3), (33, 31), (3, 5, 4)]


class Model(nn.Module):
    """Parameters of one shape, each made in another way: as shards throughout, or whole for a while."""

    def __init__(self, shape):
        super().__init__()
        self.uniform = nn.Parameter(torch.empty(shape).uniform_(-1, 1))
        self.normal_twice = nn.Parameter(torch.empty(shape))
        nn.init.kaiming_uniform_(self.normal_twice.view(shape[0], -1))
        nn.init.normal_(self.normal_twice, 0.0, 0.02)
        self.randn = nn.Parameter(torch.randn(shape))
        self.ones = nn.Parameter(torch.ones(shape))
        self.scaled = nn.Parameter(torch.rand(shape).mul_(3.0).sub_(0.5).clamp_(0.0, 2.0))
        self.padded = nn.Parameter(torch.randn(shape))
        with torch.no_grad():
            self.padded[-1].zero_()
        self.widened = nn.Parameter(torch.randn(shape).to(torch.float64))
        self.narrowed = nn.Parameter(torch.randn(shape).to(torch.bfloat16).div(3.0))
        self.copied = nn.Parameter(torch.empty(shape))
        self.copied.data.copy_(self.randn.data)
        self.constant = nn.Parameter(torch.arange(self.ones.numel()).view(shape).float())
        self.given = nn.Parameter(torch.tensor(torch.ones(shape).tolist()))
        self.exponential = nn.Parameter(torch.empty(shape).exponential_())
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(shape)))
        self.trunc_normal = nn.Parameter(nn.init.trunc_normal_(torch.empty(shape), 0.0, 1.0, -1.0, 1.0))
        self.column = nn.Parameter(torch.zeros(shape))
        self.column.data[:, 0].normal_()
        self.erfinv = nn.Parameter(torch.empty(shape).uniform_(-0.5, 0.5).erfinv_())
        self.swapped = nn.Parameter(torch.empty(shape[::-1]).normal_().permute(*range(len(shape) - 1, -1, -1)))


def slice_of(tensor, mesh, placements):
    """What this rank holds of a tensor: chunk by chunk, one mesh axis after the other."""
    for coord, size, placement in zip(mesh.get_coordinate(), mesh.shape, placements, strict=True):
        if placement.is_shard():
            chunks = tensor.chunk(size, dim=placement.dim)
            tensor = chunks[coord] if coord < len(chunks) else tensor.narrow(placement.dim, 0, 0)
    return tensor


def compare(mesh, placements, shape, *, seed=4, ctor=Model):
    torch.manual_seed(seed)
    eager = ctor(shape)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    module = deferred_init(ctor, shape)
    materialize(module, mesh, lambda *_: placements)
    assert torch.equal(state, torch.get_rng_state())
    for name, parameter in eager.named_parameters():
        shard = getattr(module, name)
        assert isinstance(shard, nn.Parameter)
        assert isinstance(shard, DTensor)
        assert shard.placements == tuple(placements)
        assert (shard.shape, shard.stride(), shard.dtype) == (parameter.shape, parameter.stride(), parameter.dtype), (
            name
        )
        assert torch.equal(shard.to_local(), slice_of(parameter, mesh, placements)), (name, shape, placements)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@ranks(2)
def test_two_ranks(shape):
    mesh = init_device_mesh("cpu", (2,))
    for placements in ([S0], [S1], [Shard(-1)], [R]):
        compare(mesh, [Shard(p.dim % len(shape)) if p.is_shard() else p for p in placements], shape)


@ranks(3)
def test_three_ranks_with_uneven_and_empty_shards():
    mesh = init_device_mesh("cpu", (3,))
    for shape in SHAPES:
        for placements in ([S0], [S1]):
            compare(mesh, placements, shape)


@ranks(4)
def test_two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for shape in ((33, 31), (3, 5, 4)):
        for placements in ([S0, R], [R, S1], [S1, S0], [S0, S0], [S1, S1]):
            compare(mesh, placements, shape)


@ranks(3)
def test_torch_agrees_on_the_layout():
    """Gathering gives the eager parameter; torch's own distribution of it gives the same shards."""
    mesh = init_device_mesh("cpu", (3,))
    for placements in ([S0], [S1], [R]):
        torch.manual_seed(0)
        eager = nn.Linear(7, 5)
        torch.manual_seed(0)
        module = materialize(deferred_init(nn.Linear, 7, 5), mesh, {"weight": placements})
        assert torch.equal(module.weight.full_tensor(), eager.weight)
        theirs = distribute_tensor(eager.weight.detach(), mesh, placements)
        assert torch.equal(module.weight.to_local(), theirs.to_local())
        assert (module.weight.stride(), module.weight.to_local().stride()) == (
            theirs.stride(),
            theirs.to_local().stride(),
        )


@ranks(3)
def test_axes_of_size_one():
    for sizes in ((1, 3), (3, 1)):
        mesh = init_device_mesh("cpu", sizes)
        for placements in ([S0, S1], [S0, S0], [R, S0]):
            compare(mesh, placements, (7, 5))


@ranks(3)
def test_a_rank_outside_the_mesh_draws_along():
    mesh = DeviceMesh("cpu", [0, 2])
    torch.manual_seed(1)
    eager = nn.Linear(4, 6)
    state = torch.get_rng_state()
    torch.manual_seed(1)
    module = materialize(deferred_init(nn.Linear, 4, 6), mesh, {"weight": [S0], "bias": [R]})
    assert torch.equal(state, torch.get_rng_state())
    weight = module.weight.to_local()
    if dist.get_rank() == 1:
        assert weight.numel() == 0
    else:
        half = slice(0, 3) if dist.get_rank() == 0 else slice(3, 6)
        assert torch.equal(weight, eager.weight[half])


@ranks(2)
def test_shards_of_many_pieces():
    """A fill draws 2^17 elements at a time: each shard is put together from several pieces of the global draw."""
    mesh = init_device_mesh("cpu", (2,))

    def ctor(shape):
        module = nn.Module()
        for name, fill in FILLS.items():
            module.register_parameter(name, nn.Parameter(fill(torch.empty(shape))))
        return module

    for shape in ((1030, 517), (3, 1030, 170)):
        for placements in ([S0], [S1]):
            compare(mesh, placements, shape, ctor=ctor)


@ranks(2)
def test_one_dictionary_for_parameters_and_buffers():
    mesh = init_device_mesh("cpu", (2,))

    def ctor():
        module = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
        module.register_buffer("table", torch.arange(8.0) ** 2, persistent=False)
        return module

    torch.manual_seed(0)
    eager = ctor()
    torch.manual_seed(0)
    module = deferred_init(ctor)
    module[0].weight.requires_grad_(False)
    materialize(module, mesh, {"0.weight": [S1], "table": [S0], "1.running_var": None})
    rank = dist.get_rank()
    assert torch.equal(module[0].weight.to_local(), eager[0].weight.chunk(2, dim=1)[rank])
    assert not module[0].weight.requires_grad
    assert torch.equal(module.table.to_local(), eager.table.chunk(2)[rank])
    assert "table" not in module.state_dict()
    assert type(module[0].bias) is nn.Parameter
    assert torch.equal(module[0].bias, eager[0].bias)
    assert type(module[1].running_var) is torch.Tensor


@ranks(2)
def test_tied_shards_stay_tied_and_keep_their_attributes():
    mesh = init_device_mesh("cpu", (2,))

    def ctor():
        module = nn.ModuleDict({"embed": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
        module["head"].weight = module["embed"].weight
        module["embed"].weight.tag = "vocabulary"
        return module

    module = materialize(deferred_init(ctor), mesh, {"embed.weight": [S0]})
    assert module["head"].weight is module["embed"].weight
    assert module["head"].weight.tag == "vocabulary"
    assert module["head"].weight.to_local().shape == (4, 4)
    assert len(list(module.parameters())) == 1


@ranks(2)
def test_tensors_that_were_real_get_their_placements_too():
    mesh = init_device_mesh("cpu", (2,))
    given = nn.Parameter(torch.arange(12.0).view(6, 2))

    def ctor():
        module = nn.Linear(2, 6)
        module.weight = given
        return module

    module = deferred_init(ctor)
    materialize(module, mesh, lambda *_: [S0])
    assert torch.equal(module.weight.to_local(), given.chunk(2)[dist.get_rank()])
    weight = module.weight
    materialize(module, mesh, lambda *_: [S0])
    assert module.weight is weight


@ranks(2)
def test_drawing_the_shard_alone_differs():
    """The negative sibling: a shard drawn by itself is not the slice of the whole draw."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    module = materialize(deferred_init(lambda: nn.Linear(4, 6, bias=False)), mesh, {"weight": [S0]})
    torch.manual_seed(0)
    alone = nn.Linear(4, 3, bias=False)
    same = torch.equal(module.weight.to_local(), alone.weight.detach())
    assert same == (dist.get_rank() == 0)  # the first rows are the beginning of the draw in both
