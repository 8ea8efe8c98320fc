"""What is written through strides (`as_strided`, `fill_diagonal_`) arrives in the tensor, however its memory lies.

The stride of a dim with one element tells nothing about memory, so two tensors with the same layout may differ in it:
torch's own operators do, and DTensor's results and their local tensors do. In a sharded tensor such a view is a copy.
"""

import itertools

import pytest
import torch

from vescale.dtensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from vescale_testing import ranks

LAYOUTS = {
    "rows": lambda x: x + 1,
    "columns": lambda x: x.t() + 1,
    "columns of a copy": lambda x: x.t().clone(),
    "of a transform": lambda x: torch.fft.fft(x, dim=0).abs(),
    "of one row": lambda x: x[:1] * 2,
    "of one column": lambda x: x[:, 1:2] * 2,
}


def write_diagonal(x):
    """Write to a view by strides, and to the tensor; read the view in between."""
    view = x.as_strided([min(x.shape)], [sum(x.stride())])
    view.mul_(3)
    x.add_(1)
    seen = view + 0
    view[:1].fill_(0.5)
    return seen, x


def fill_diagonal(x):
    x.fill_diagonal_(0.25)
    return (x,)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(mesh, placements, shape, write):
    """Yield the layouts in which a result differs from that of one device."""
    values = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for name, lay_out in LAYOUTS.items():
        expected = write(lay_out(values.clone()))
        found = write(lay_out(distribute_tensor(values, mesh, placements, src_data_rank=None)))
        if not all(torch.equal(whole(one), other) for one, other in zip(found, expected, strict=True)):
            yield name


@pytest.mark.parametrize("write", [write_diagonal, fill_diagonal])
@ranks(4)
def test_values_are_those_of_one_device(write):
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("line",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    kinds = Replicate(), Shard(0), Shard(1)
    for shape in ((4, 4), (3, 5), (2, 2)):
        for kind in kinds:
            assert not [*differences(line, [kind], shape, write)], (shape, kind)
        for pair in itertools.permutations(kinds, 2):
            assert not [*differences(grid, pair, shape, write)], (shape, pair)


@ranks(2)
def test_a_copy_that_nobody_remembers_loses_it(monkeypatch):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("line",))
    monkeypatch.setattr("vescale.dtensor._operators.gather.remember_copy", lambda *_: None)
    assert {"rows", "columns", "columns of a copy"} <= set(differences(mesh, [Shard(0)], (4, 4), write_diagonal))
