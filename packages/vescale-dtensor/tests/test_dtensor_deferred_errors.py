"""What a deferred tensor cannot do is refused, with the name of the tensor and the way out."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

from vescale.dtensor import Partial, Replicate, Shard, deferred_init, init_device_mesh, is_deferred, materialize, random
from vescale_testing import ranks

WAY_OUT = r"Call vescale\.dtensor\.materialize\(module\)"


def test_forward_before_materialize():
    module = deferred_init(lambda: nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(
        RuntimeError, match=rf"aten\.t\.default on '0\.weight' DeferredTensor\(shape=\(3, 3\).*{WAY_OUT}"
    ):
        module(torch.ones(2, 3))


@pytest.mark.parametrize(
    "use",
    [
        lambda module: module.to(torch.float64),
        lambda module: module.load_state_dict(nn.Linear(3, 3).state_dict()),
        lambda module: nn.init.zeros_(module.weight),
        lambda module: module.weight.sum().item(),
        lambda module: torch.optim.SGD(module.parameters(), lr=0.1).zero_grad() or module.weight + 1,
    ],
)
def test_compute_after_the_constructor(use):
    with pytest.raises(RuntimeError, match=WAY_OUT):
        use(deferred_init(nn.Linear, 3, 3))


def test_to_dtype_names_the_way_through_the_constructor():
    with pytest.raises(RuntimeError, match=r"deferred_init\(lambda: Model\(config\)\.to\(dtype\)\)"):
        deferred_init(nn.Linear, 3, 3).to(torch.float64)


@pytest.mark.parametrize("read", ["tolist", "numpy"])
def test_reading_after_the_constructor(read):
    weight = deferred_init(nn.Linear, 3, 3).weight
    with pytest.raises(RuntimeError, match=rf"{read}\(\) of 'weight'.*has no contents yet"):
        getattr(weight, read)()


def test_saving():
    module = deferred_init(nn.Linear, 3, 3)
    for save in (pickle.dumps, lambda tensor: torch.save(tensor, io.BytesIO())):
        with pytest.raises(
            RuntimeError, match=r"'weight' .* cannot be saved or pickled; call vescale\.dtensor\.materialize"
        ):
            save(module.weight)


def test_what_is_allowed_between():
    module = deferred_init(nn.Linear, 3, 3)
    module.requires_grad_(False)
    module.eval()
    assert set(module.state_dict()) == {"weight", "bias"}
    assert is_deferred(copy.deepcopy(module))
    assert is_deferred(nn.Parameter(module.weight.data))
    assert is_deferred(module.weight)
    assert not is_deferred(torch.ones(1))
    assert not is_deferred(nn.ReLU())


def test_materialize_inside_the_constructor():
    with pytest.raises(RuntimeError, match="materialize was called inside deferred_init"):
        deferred_init(lambda: materialize(nn.Linear(3, 3)))


def test_materialize_takes_modules():
    with pytest.raises(TypeError, match="expected Module for module, got Deferred"):
        materialize(deferred_init(nn.Linear, 3, 3).weight)


def test_random_values_into_memory_of_numpy():
    with pytest.raises(
        NotImplementedError, match=r"aten\.normal_\.default .* real tensor of shape \(4,\) \(memory of numpy\)"
    ):
        deferred_init(lambda: nn.Parameter(torch.from_numpy(np.zeros(4)).normal_()))


def test_writing_into_an_outside_tensor():
    outside = torch.zeros(3)
    with pytest.raises(NotImplementedError, match=r"writes deferred or random values into a real tensor.*made outside"):
        deferred_init(lambda: outside.copy_(torch.ones(3)))


def test_arrays_read_in_the_constructor_are_read_only():
    def ctor():
        torch.zeros(3).numpy()[0] = 1.0

    with pytest.raises(ValueError, match="read-only"):
        deferred_init(ctor)


def test_sparse_tensors():
    with pytest.raises(NotImplementedError, match="deferred_init records strided tensors"):
        deferred_init(lambda: torch.eye(3).to_sparse())


def test_resizing():
    with pytest.raises(NotImplementedError, match=r"aten\.resize_\.default .* is not supported in deferred_init"):
        deferred_init(lambda: torch.empty(3).resize_(5))


def test_tensors_of_another_deferred_init():
    first = deferred_init(nn.Linear, 3, 3)
    with pytest.raises(RuntimeError, match="uses tensors of another deferred_init"):
        deferred_init(lambda: nn.Parameter(first.weight.detach() * 2))


# ------------------------------------------------------------------------------------------------- placements


@ranks(2)
def test_placements_that_do_not_fit():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def refused(error, text, placements, ctor=lambda: nn.Linear(4, 6), use_mesh=mesh):
        module = deferred_init(ctor)
        with pytest.raises(error, match=text):
            materialize(module, use_mesh, placements)
        assert is_deferred(module)

    refused(ValueError, "placements but no mesh", {"weight": [Shard(0)]}, use_mesh=None)
    refused(
        ValueError, "'wieght', which names no parameter or buffer; nearest names: .*'weight'", {"wieght": [Shard(0)]}
    )
    refused(
        ValueError, r"'weight': expected one placement for each mesh axis \('tp',\)", {"weight": [Shard(0), Shard(1)]}
    )
    refused(TypeError, r"expected Sequence or None for placements\['weight'\], got S", {"weight": Shard(0)})
    refused(ValueError, r"'bias': S.*1.* does not fit a tensor of shape \(6,\)", {"bias": [Shard(1)]})
    refused(NotImplementedError, "'weight': materialize supports placements that .* got P", {"weight": [Partial()]})


@ranks(2)
def test_ties_and_shared_memory_that_shards_would_break():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def tied():
        module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
        module["b"].weight = module["a"].weight
        return module

    with pytest.raises(ValueError, match=r"tied tensors must have the same placements, got 'a\.weight'.*'b\.weight'"):
        materialize(deferred_init(tied), mesh, {"a.weight": [Shard(0)], "b.weight": [Replicate()]})

    module = deferred_init(tied)
    materialize(module["a"], mesh, {"weight": [Shard(0)]})
    with pytest.raises(ValueError, match="'weight' is tied to a tensor that was materialized before with placements"):
        materialize(module["b"], mesh, {"weight": [Shard(1)]})

    def sharing():
        module = nn.Module()
        module.whole = nn.Parameter(torch.randn(4, 4))
        module.row = nn.Parameter(module.whole.detach()[0])
        return module

    with pytest.raises(NotImplementedError, match=r"share memory, but their shards could not: 'whole'.*'row'"):
        materialize(deferred_init(sharing), mesh, {"whole": [Shard(0)]})


@ranks(2)
def test_materialize_inside_a_local_batch():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    module = deferred_init(nn.Linear, 3, 3)
    with random.local_batch(mesh["dp"]), pytest.raises(ValueError, match=r"called inside random\.local_batch"):
        materialize(module)
    materialize(module)


@ranks(1)
def test_keys_of_modules_that_another_stage_has():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    module = deferred_init(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    module[0] = nn.Identity()
    module[0].absent_fqns = ("", "weight", "bias")
    materialize(module, mesh, {"0.weight": [Shard(0)], "1.weight": [Shard(0)]})
    assert module[1].weight.placements == (Shard(0),)
