"""A negative dim means what it means on one device: for every operator with a dim and for every sharded dim.

The calls come from torch's operator database: each operator with a dim that its samples reach is called on plain and on
sharded tensors, with every negative dim in place of the sample's.
"""

import collections
import importlib
import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from vescale.dtensor import DTensor, Replicate, Shard, disabled, distribute_tensor, init_device_mesh
from vescale_testing import in_halves, ranks, torch_is_before

pytestmark = pytest.mark.filterwarnings("ignore")
COVERAGE = str(Path(__file__).resolve().parents[1] / "coverage")
NAMES = {"dim", "dims", "dim0", "dim1", "dim2", "dimension", "axis"}
MAX_NUMEL, NUM_SAMPLES, NUM_CALLS = 600, 24, 1
SKIPPED = ("empty", "new_empty", "_fft", "fft", "linalg_svd", "_segment_reduce")  # undefined values; no real dims
PARTS = 2


class Calls(TorchDispatchMode):
    """Record the arguments of each operator with a dim: a few calls for each operator."""

    def __init__(self):
        super().__init__()
        self.found = collections.defaultdict(list)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace == "aten" and _dims(op) and torch.Tag.nondeterministic_seeded not in op.tags:
            self._add(op, args, kwargs)
        return op(*args, **kwargs)

    def _add(self, op, args, kwargs):
        known, tensors = self.found[op], [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        shapes = [tuple(t.shape) for t in tensors]
        fits = tensors and all(0 < t.numel() <= MAX_NUMEL and t.layout is torch.strided for t in tensors)
        if fits and len(known) < NUM_CALLS and shapes not in [s for s, *_ in known] and tensors[0].ndim in (2, 3):
            copies = tree_map(lambda v: v.detach().clone() if isinstance(v, torch.Tensor) else v, (args, kwargs))
            known.append((shapes, *copies))


def _dims(op):
    types = ("int", "Optional[int]", "List[int]", "Optional[List[int]]")
    return [a for a in op._schema.arguments if a.name in NAMES and str(a.type) in types]


@pytest.fixture(scope="module")
def calls_of_the_database(tmp_path_factory):
    """The file with ``(operator's name, args, kwargs)`` of each operator with a dim, as its samples call it."""
    path = tmp_path_factory.mktemp("calls") / "calls.pt"
    torch.save(list(recorded_calls()), path)
    return str(path)


def recorded_calls():
    sys.path.insert(0, COVERAGE)
    database = importlib.import_module("_torch").database()
    sys.path.remove(COVERAGE)
    calls = Calls()
    for info in database:
        dtype = next((d for d in (torch.float64, torch.int64) if d in info.supported_dtypes("cpu")), None)
        if dtype is None:
            continue
        torch.manual_seed(2)
        for sample in itertools.islice(_samples(info, dtype), NUM_SAMPLES):
            with calls:
                try:
                    info.op(sample.input, *sample.args, **sample.kwargs)
                except Exception:  # a sample that one device refuses
                    continue
    for op, known in calls.found.items():
        yield from ((op.name(), op._overloadname, args, kwargs) for _, args, kwargs in known)


def loaded_calls(path):
    for name, overload, args, kwargs in torch.load(path, weights_only=False):
        packet = name.removeprefix("aten::").partition(".")[0]
        if not packet.startswith(SKIPPED):
            yield getattr(getattr(torch.ops.aten, packet), overload), args, kwargs


def _samples(info, dtype):
    try:
        yield from info.sample_inputs("cpu", dtype, requires_grad=False)
    except Exception:  # a sample that needs what is not installed
        return


def with_negative_dims(op, args, kwargs):
    """Yield the call with each negative value of each dim."""
    names = [a.name for a in op._schema.arguments]
    num_dims = max(t.ndim for t in tree_leaves(args) if isinstance(t, torch.Tensor))
    for argument, value in itertools.product(_dims(op), range(-num_dims - 1, 0)):
        position = names.index(argument.name)
        if argument.kwarg_only or position >= len(args):
            old, put = kwargs.get(argument.name), lambda new, n=argument.name: (args, {**kwargs, n: new})
        else:
            old, put = args[position], lambda new, i=position: ((*args[:i], new, *args[i + 1 :]), kwargs)
        if not isinstance(old, (list, tuple)):
            yield put(value)
        elif old:
            yield put([value, *[dim % num_dims for dim in old[1:] if dim % num_dims != value % num_dims]])


def run(op, args, kwargs):
    """Return what the call gives and leaves in its operands, on copies of them; None if one device refuses it."""
    args, kwargs = tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, (args, kwargs))
    try:
        return op(*args, **kwargs), args
    except (RuntimeError, IndexError, ValueError):
        return None


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def differing_calls(path, part, half):
    """Return the calls of one part of the operators whose sharded result differs, and the number of calls.

    In each half, operators alternate in the sharded dims that they have for a negative dim.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    differing, count = [], 0
    for number, (op, *call) in enumerate(itertools.islice(loaded_calls(path), part, None, PARTS)):
        for which, (args, kwargs) in enumerate(with_negative_dims(op, *call)):
            if (expected := run(op, args, kwargs)) is None:
                continue
            shape = next(tuple(t.shape) for t in tree_leaves(args) if isinstance(t, torch.Tensor))
            for sharded_dim in range((half + number + which) % 2, len(shape), 2):

                def shard(value, shape=shape, sharded_dim=sharded_dim):
                    if not isinstance(value, torch.Tensor):
                        return value
                    fits = value.ndim == len(shape) and value.shape[sharded_dim] == shape[sharded_dim]
                    return distribute_tensor(value, mesh, [Shard(sharded_dim) if fits else Replicate()])

                try:
                    actual = op(*tree_map(shard, args), **tree_map(shard, kwargs))
                except NotImplementedError:  # refused on all ranks alike
                    continue
                count += 1
                pairs = zip(tree_leaves(actual), tree_leaves(expected[0]), strict=True)
                if not all(same(whole(a), e) for a, e in pairs):
                    differing.append((str(op), [v for v in args if not isinstance(v, torch.Tensor)], sharded_dim))
    return differing, count


def same(actual, expected):
    if not isinstance(expected, torch.Tensor):
        return actual == expected
    return actual.shape == expected.shape and torch.allclose(actual, expected, 1e-10, 1e-10, equal_nan=True)


@in_halves
@pytest.mark.parametrize("part", range(PARTS))
def test_every_operator_with_a_dim(part, half, calls_of_the_database):
    @ranks(2, timeout=240)
    def on_every_rank():
        differing, count = differing_calls(calls_of_the_database, part, half)
        assert not differing
        assert count > 100

    on_every_rank()


@ranks(2)
def test_stock_torch_takes_them_for_dims_that_are_not_sharded():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.tensor([[1.0, 2.0, 4.0, 3.0], [5.0, 2.0, 3.0, 1.0]])
    sharded = distribute_tensor(x, mesh, [Shard(1)])
    for function in (torch.cumsum, torch.cumprod):
        with disabled("operators"):
            same = torch.equal(function(sharded, -1).full_tensor(), function(x, -1))
        assert same is not torch_is_before("2.14")
        assert torch.equal(function(sharded, -1).full_tensor(), function(x, -1))


@ranks(2)
def test_a_dim_out_of_range_is_reported_as_on_one_device():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = distribute_tensor(torch.ones(3, 4), mesh, [Shard(1)])
    for function in (torch.cumsum, torch.softmax, torch.unbind):
        with pytest.raises((IndexError, RuntimeError), match=r"out of range|Dim"):
            function(sharded, -3)
