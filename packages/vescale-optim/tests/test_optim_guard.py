"""The guard of parameters that must not be read now: one list of what may pass, two things that a read does."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale.optim import _torch
from vescale.optim._parameters.guard import (
    MEMORY_FUNCTIONS,
    PASSING_ATTRIBUTES,
    PASSING_FUNCTIONS,
    Guard,
    Memory,
    Refuse,
    Wait,
)
from vescale_testing import ranks

REFUSED = (
    r"'{}' reads or writes the parameter '{}', which has no values here: expected a use while its unit runs, got one "
    r"at another time, when rank 1 holds only a part of its shape \(4, 3\) .*Use `with model.unsharded\(\)"
)

LIKES = ("empty", "rand", "randn")

#: How to use each passing function; those that are not listed are methods without arguments.
CALLS = {
    "is_same_size": lambda p: p.is_same_size(torch.zeros(4, 3)),
    "register_hook": lambda p: p.register_hook(lambda grad: grad).remove(),
    "register_post_accumulate_grad_hook": lambda p: p.register_post_accumulate_grad_hook(lambda _: None).remove(),
    "grad": lambda p: torch.autograd.grad(p.graph, p, torch.ones(4, 3), retain_graph=True)[0].tolist(),
    "backward": lambda p: torch.autograd.backward(p.graph, torch.ones(4, 3), inputs=[p], retain_graph=True),
    "requires_grad_": lambda p: p.requires_grad_().requires_grad,
    **{f"{name}_like": lambda p, name=name: getattr(torch, f"{name}_like")(p).shape for name in ("zeros", "ones")},
    **{
        f"{name}_like": lambda p, name=name: getattr(torch, f"{name}_like")(p).dtype
        for name in ("empty", "rand", "randn")
    },
    "full_like": lambda p: torch.full_like(p, 2).tolist(),
    **{f"new_{name}": lambda p, name=name: getattr(p, f"new_{name}")(2).shape for name in ("empty", "zeros", "ones")},
    "new_full": lambda p: p.new_full((2,), 3).tolist(),
}

#: Reads and writes, and the name by which an error calls them. All of them are absent from the list.
READS = {
    "mul": lambda p: p * 2,
    "__getitem__": lambda p: p[0],
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "fill_": lambda p: p.fill_(1.0),
    "item": lambda p: p.sum().item() if type(p) is nn.Parameter else p.item(),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.numpy(),
    "clone": lambda p: p.clone(),
    "stack": lambda p: torch.stack([torch.zeros(4, 3), p]),
    "linear": lambda p: nn.functional.linear(torch.ones(1, 3), p),
    "data_ptr": lambda p: p.data_ptr(),
    "untyped_storage": lambda p: p.untyped_storage(),
    "deepcopy": lambda p: copy.deepcopy(p),
    "pickle": lambda p: pickle.dumps(p),
}


def parameter():
    param = nn.Parameter(torch.arange(12.0).view(4, 3))
    param.graph = param * 3
    return param


def waiting(**parameters):
    """Return a guard that opens when something is read, and the list of how often that happened."""
    finished = []

    def finish():
        finished.append(True)
        guard.open()

    guard = Guard(parameters, Wait(finish))
    return guard, finished


@pytest.mark.parametrize("name", sorted(PASSING_ATTRIBUTES))
def test_an_attribute_passes(name):
    param = parameter()
    if not hasattr(param, name):
        pytest.skip(f"this torch has no Tensor.{name}")
    expected = getattr(param, name)
    guard, finished = waiting(weight=param)
    refusing = Guard({"weight": param}, Refuse(rank=1))
    for each in (guard, refusing):
        each.close()
        actual = getattr(param, name)
        assert actual is expected or actual == expected
        assert each.is_closed
        each.open()
    assert finished == []


@pytest.mark.parametrize("name", sorted(PASSING_FUNCTIONS))
def test_a_function_passes(name):
    param = parameter()
    call = CALLS.get(name, lambda p: getattr(p, name)())
    expected = call(param)
    guard, finished = waiting(weight=param)
    for each in (guard, Guard({"weight": param}, Refuse(rank=1))):
        each.close()
        assert call(param) == expected
        assert each.is_closed
        each.open()
    assert finished == []


@pytest.mark.parametrize("name", READS)
@torch.no_grad()
def test_a_read_waits(name):
    param = parameter() if name != "item" else nn.Parameter(torch.tensor(2.0))
    guard, finished = waiting(weight=param)
    guard.close()
    assert type(param).__name__ == "InFlightParameter"
    assert isinstance(param, nn.Parameter)
    READS[name](param)
    assert finished == [True]
    assert type(param) is nn.Parameter
    READS[name](param)
    assert finished == [True]


@pytest.mark.parametrize("name", sorted(set(READS) - MEMORY_FUNCTIONS))
@torch.no_grad()
def test_a_read_is_refused(name):
    param = parameter()
    guard = Guard({"layer.weight": param}, Refuse(rank=1))
    guard.close()
    assert repr(param) == "Sharded('layer.weight', shape=(4, 3), dtype=torch.float32)"
    with pytest.raises(RuntimeError, match=REFUSED.format(name, r"layer\.weight")):
        READS[name](param)
    guard.open()
    assert type(param) is nn.Parameter
    assert (param == torch.arange(12.0).view(4, 3)).all()


def test_a_sharded_parameter_shows_its_empty_storage():
    param = parameter()
    guard = Guard({"weight": param}, Refuse(rank=1))
    param.untyped_storage().resize_(0)
    guard.close()
    assert param.untyped_storage().nbytes() == 0
    assert param.data_ptr() == 0
    assert guard.is_closed


def test_the_list_has_no_name_that_gives_values():
    """Each function of the list, run on other values, gives the same; each of `READS` is absent."""
    assert not PASSING_FUNCTIONS.intersection(READS)
    assert not PASSING_ATTRIBUTES.intersection({"data", "T", "mT", "real", "imag", "H"})


def test_text_of_a_parameter_in_flight_is_that_of_its_values():
    param = parameter()
    expected = repr(param)
    guard, finished = waiting(weight=param)
    guard.close()
    assert repr(param) == expected
    assert finished == [True]


def test_several_guards_in_one_call():
    first, second = parameter(), parameter()
    one, finished_one = waiting(first=first)
    two, finished_two = waiting(second=second)
    one.close()
    two.close()
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.arange(12.0).view(4, 3)] * 2))
    assert (finished_one, finished_two) == ([True], [True])
    one.close()
    refusing = Guard({"second": second}, Refuse(rank=1))
    refusing.close()
    with pytest.raises(RuntimeError, match=REFUSED.format("add", "second")):
        first + second


def test_a_failed_wait_leaves_the_guard_closed():
    param = parameter()

    def fail():
        raise RuntimeError("the all-gather failed on rank 0")

    guard = Guard({"weight": param}, Wait(fail))
    guard.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the all-gather failed on rank 0"):
            param + 1
    assert guard.is_closed


@pytest.mark.parametrize("frees", [False, True])
def test_a_leaf_is_guarded_with_its_parameter_as_long_as_it_exists(frees):
    param = parameter()
    guard = Guard({"weight": param}, Refuse(rank=1))
    memory = Memory(guard, frees=frees)
    view, copied = nn.Parameter(param.detach()), nn.Parameter(param.detach().clone())
    guard.close()
    memory.share(param, view, is_view=True)
    memory.share(param, copied, is_view=False)
    with pytest.raises(RuntimeError, match=REFUSED.format("add", "weight")):
        view + 1
    if frees:  # the values of a copy are those of before
        with pytest.raises(RuntimeError, match=REFUSED.format("add", "weight")):
            copied + 1
    else:
        copied + 1
    guard.open()
    assert [leaf is view for leaf in guard.views_of("weight")] == [True]
    assert len(guard.leaves()) == (2 if frees else 1)
    assert guard.views_of("bias") == []
    gone = weakref.ref(view)
    del view
    gc.collect()
    assert gone() is None
    assert guard.views_of("weight") == []
    assert pickle.loads(pickle.dumps(memory)) is None
    assert copy.deepcopy(memory) is None


@ranks(2)
def test_a_dtensor_and_its_local_tensor():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    reads = {
        "to_local": lambda p: p.to_local(),
        "full_tensor": lambda p: p.full_tensor(),
        "redistribute": lambda p: p.redistribute(placements=[Replicate()]),
        "add": lambda p: p + 1,
        "mul": lambda p: _torch.local_tensor(p) * 2,
    }
    for name, read in reads.items():
        param = nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)]))
        guard, finished = waiting(weight=param)
        guard.close()
        assert (param.placements, param.device_mesh, tuple(param.shape)) == ((Shard(0),), mesh, (4, 3))
        assert finished == []
        read(param)
        assert finished == [True], name
        refusing = Guard({"weight": param}, Refuse(rank=1))
        refusing.close()
        with pytest.raises(RuntimeError, match=f"'{name}' reads or writes the parameter 'weight'"):
            read(param)
        refusing.open()
        read(param)
