"""The random operators of torch's own catalogue of test samples equal one device on every sample.

The catalogue's entries seed the generator themselves, on one device and on shards alike.
"""

import itertools

import torch
from torch.distributed.tensor.experimental import implicit_replication
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

from vescale.dtensor import DTensor, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

DRAWING = {
    *("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "multinomial"),
    *("rand_like", "randint_like", "randn_like"),
    *("nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.alpha_dropout"),
    *("nn.functional.feature_alpha_dropout", "nn.functional.rrelu", "nn.functional.scaled_dot_product_attention"),
}

STOCK_DIFFERS = {"nn.functional.dropout", "exponential", "uniform", "bernoulli", "rand_like"}

NUM_SAMPLES = 4


def entries():
    found = [entry for entry in op_db if entry.name in DRAWING]
    assert {entry.name for entry in found} == DRAWING
    return found


def samples(entry):
    """Sample inputs, which take long to make: call it before the ranks start."""
    made = itertools.islice(entry.sample_inputs("cpu", torch.float32), NUM_SAMPLES)
    return [s for s in made if isinstance(s.input, torch.Tensor)]


def layouts(ndim):
    """One axis of 4 ranks on every dim, and a mesh of (2, 2) on pairs of dims."""
    shards = [Shard(dim) for dim in range(ndim)]
    yield from (((4,), (p,)) for p in (*shards, Replicate()))
    if ndim:
        yield from (((2, 2), p) for p in [(shards[0], shards[-1]), (shards[-1], shards[0]), (Replicate(), shards[0])])


def outcome(entry, sample, cut):
    """Run an entry on tensors that ``cut`` makes of the sample's; results as they come."""
    arguments = (sample.input, sample.args, sample.kwargs)
    tensor, args, kwargs = tree_map_only(torch.Tensor, lambda x: cut(x.detach().clone()), arguments)
    return [leaf for leaf in tree_leaves(entry.op(tensor, *args, **kwargs)) if isinstance(leaf, torch.Tensor)]


def compare(entry, sample, mesh, placements, shard, shard_of):
    """Tensors with the dims of the first one are sharded; others (one number, a mask) are replicated."""
    whole = (Replicate(),) * mesh.ndim
    ndim = sample.input.ndim
    actual = outcome(entry, sample, lambda x: shard(x, mesh, placements if x.ndim == ndim else whole))
    for ours, theirs in zip(actual, outcome(entry, sample, lambda x: x), strict=True):
        assert isinstance(ours, DTensor)
        if "attention" in entry.name:  # products of matrices
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-4)
        else:
            expected = shard_of(theirs, mesh, ours.placements)
            torch.testing.assert_close(ours.to_local(), expected, rtol=0, atol=0, equal_nan=True)


def test_samples_of_the_catalogue(shard, shard_of):
    prepared = [(entry, sample) for entry in entries() for sample in samples(entry)]

    @ranks(4)
    def on_every_rank():
        meshes = {shape: init_device_mesh("cpu", shape) for shape in [(4,), (2, 2)]}
        for entry, sample in prepared:
            for mesh_shape, placements in layouts(sample.input.ndim):
                try:
                    with implicit_replication():  # attention makes its causal mask as a plain tensor
                        compare(entry, sample, meshes[mesh_shape], placements, shard, shard_of)
                except (AssertionError, NotImplementedError, RuntimeError, IndexError) as error:
                    name = f"{entry.name} {entry.variant_test_name}".strip()
                    raise AssertionError((name, tuple(sample.input.shape), mesh_shape, placements)) from error

    on_every_rank()


def test_stock_torch_differs_on_the_same_samples(shard, shard_of):
    chosen = [entry for entry in entries() if entry.name in STOCK_DIFFERS]
    prepared = [(entry, s) for entry in chosen for s in samples(entry) if s.input.ndim and s.input.shape[0] > 1]

    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,))
        seen = set()
        for entry, sample in prepared:
            try:
                with disabled("random"):
                    compare(entry, sample, mesh, (Shard(0),), shard, shard_of)
            except AssertionError:
                seen.add(entry.name)
        assert seen == STOCK_DIFFERS or mesh.get_local_rank() == 0  # the first shard is the same

    on_every_rank()
