"""How a device draws whose element map depends on the length: the whole tensor at once, of which a rank keeps its part.

Run on the CPU here, where the same native operators give the reference.
"""

import torch

from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.dtensor._random.global_position import position_of
from vescale.dtensor._random.stock.draw import _draw_full
from vescale.dtensor._random.stock.elements import _bernoulli_full, _dropout_full
from vescale_testing import ranks

aten = torch.ops.aten
LAYOUTS = [(Shard(0), Replicate()), (Shard(1), Shard(0)), (Shard(0), Shard(0))]


def positions(shard, whole):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for placements in LAYOUTS:
        tensor = shard(whole, mesh, placements)
        yield placements, mesh, tensor.to_local(), position_of(aten.uniform_.default, tensor, ())


@ranks(4)
def test_fills(shard, shard_of):
    for whole in (torch.zeros(5, 7), torch.zeros(7, 5).t()):
        for placements, mesh, local, position in positions(shard, whole):
            for op, args in ((aten.uniform_.default, (0.0, 1.0)), (aten.bernoulli_.float, (0.3,))):
                torch.manual_seed(1)
                expected = op(whole.clone(), *args)
                torch.manual_seed(1)
                _draw_full(op, local, position, args, {})
                assert torch.equal(local, shard_of(expected, mesh, placements)), (op, placements)


@ranks(4)
def test_dropout_keeps_the_kernels_own_arithmetic(shard, shard_of):
    for p in (0.15, 0.42, 0.5):  # 1 / (1 - p) is rounded by the kernel in its own way
        for whole in (torch.randn(5, 7), torch.randn(7, 5).t()):
            for placements, mesh, local, position in positions(shard, whole):
                for is_dense in (True, False):
                    order = torch.contiguous_format if not is_dense else torch.preserve_format
                    torch.manual_seed(2)
                    expected = aten.native_dropout.default(whole.clone(memory_format=order), p, True)
                    results = torch.empty_like(local), torch.empty_like(local, dtype=torch.bool)
                    torch.manual_seed(2)
                    _dropout_full(position, local, results, p, is_dense=is_dense)
                    for actual, wanted in zip(results, expected, strict=True):
                        assert torch.equal(actual, shard_of(wanted, mesh, placements)), (p, placements)


@ranks(4)
def test_probabilities(shard, shard_of):
    whole = torch.rand(5, 7)
    for placements, mesh, local, position in positions(shard, whole):
        torch.manual_seed(3)
        expected = torch.bernoulli(whole)
        drawn = torch.empty_like(local)
        torch.manual_seed(3)
        _bernoulli_full(position, drawn, local, {})
        assert torch.equal(drawn, shard_of(expected, mesh, placements)), placements
        assert not torch.equal(drawn, torch.bernoulli(local))  # what a shard draws by itself
