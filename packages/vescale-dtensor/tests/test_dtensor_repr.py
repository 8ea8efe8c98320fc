"""A DTensor's text says whose values it shows; only `debug.show` communicates."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from vescale.dtensor import DTensor, Partial, Replicate, Shard, debug, disabled, init_device_mesh
from vescale_testing import ranks

X = torch.arange(10.0).view(5, 2)


@ranks(4)
def test_a_shard_names_its_rank_and_box(shard):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = shard(X, mesh, [Shard(0), Replicate()])
    rank = dist.get_rank()
    values = (
        "tensor([[0., 1.],\n        [2., 3.],\n        [4., 5.]])"
        if rank < 2
        else "tensor([[6., 7.],\n        [8., 9.]])"
    )
    assert repr(x) == (
        "DTensor(shape=(5, 2), dtype=torch.float32, dp: Shard(dim=0), tp: Replicate(), mesh dp=2, tp=2 (cpu))\n"
        f"rank {rank} (dp={rank // 2}, tp={rank % 2}) holds {'[0:3, 0:2]' if rank < 2 else '[3:5, 0:2]'}:\n{values}"
    )


@ranks(2)
def test_it_never_communicates(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = shard(X, mesh, [Shard(0)])
    if dist.get_rank() == 0:  # would hang
        with CommDebugMode() as counts:
            for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
                repr(shard(X, mesh, placements))
            repr(x.sum())
        assert counts.get_total_counts() == 0
    dist.barrier()


@ranks(2)
def test_other_placements(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = dist.get_rank()
    assert repr(shard(X, mesh, [Replicate()])).endswith(
        f"mesh tp=2 (cpu))\nevery rank holds the whole, this is rank {rank} (tp={rank}):\n{X!r}"
    )
    total = shard(X, mesh, [Shard(0)]).sum()
    part = "15." if rank == 0 else "30."
    assert repr(total).endswith(
        f"rank {rank} (tp={rank}) holds the whole, parts of the values whose sum over tp is the tensor:\ntensor({part})"
    )
    one = shard(torch.ones(1, 2), mesh, [Shard(0)])
    assert ("rank 1 (tp=1) holds nothing:\ntensor([], size=(0, 2))" in repr(one)) == (rank == 1)
    x = shard(X, mesh, [Shard(1)]).requires_grad_()
    assert "(cpu), requires_grad=True)" in repr(x)
    assert "(cpu), grad_fn=<MulBackward0>)" in repr(x * 2)


@ranks(3)
def test_outside_of_its_mesh():
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    from torch.distributed.device_mesh import DeviceMesh

    small = DeviceMesh("cpu", [0, 2], mesh_dim_names=("tp",))
    x = DTensor.from_local(torch.ones(2), small, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    assert ("rank 1 is not in the mesh and holds nothing" in repr(x)) == (mesh.get_local_rank() == 1)
    assert ("rank 2 (tp=1) holds [2:4]" in repr(x)) == (mesh.get_local_rank() == 2)
    assert "│ rank 0 │ rank 2 │" in debug.explain(x)


@ranks(2)
def test_what_cannot_be_described_prints_as_in_torch(shard, monkeypatch):
    x = shard(X, init_device_mesh("cpu", (2,)), [Shard(0)])
    monkeypatch.setattr("vescale.dtensor.debug._repr.pieces", lambda *_: 1 / 0)
    assert repr(x).startswith("DTensor(local_tensor=tensor(")


@ranks(2)
def test_disabled_prints_as_torch(shard):
    x = shard(X, init_device_mesh("cpu", (2,)), [Shard(0)])
    with disabled():
        assert repr(x).startswith("DTensor(local_tensor=tensor(")
        with disabled():
            pass
        assert repr(x).startswith("DTensor(local_tensor=tensor(")
    assert repr(x).startswith("DTensor(shape=(5, 2)")


@ranks(2)
def test_show_has_the_global_values(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for placements in ([Shard(0)], [Shard(1)], [Replicate()]):
        assert debug.show(shard(X, mesh, placements)).endswith(f"mesh tp=2 (cpu))\nglobal values:\n{X!r}")
    total = shard(X, mesh, [Shard(0)]).sum()
    assert total.placements == (Partial(),)
    assert debug.show(total).endswith("global values:\ntensor(45.)")
    with torch.enable_grad():
        x = shard(X, mesh, [Shard(0)]).requires_grad_()
        assert "grad_fn=<MulBackward0>" in debug.show(x * 2)
    with CommDebugMode() as counts:
        assert debug.show(x, max_elements=9).endswith("10 elements are more than max_elements=9: not gathered")
    assert counts.get_total_counts() == 0
    with pytest.raises(TypeError, match="expected a DTensor, got Tensor; print a plain tensor as it is"):
        debug.show(X)


def test_plain_tensors_print_as_ever():
    assert repr(X[:1]) == "tensor([[0., 1.]])"
