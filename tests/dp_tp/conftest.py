"""Where the tests of this folder look into `vescale.optim` or break it; only this file knows its code."""

import pytest

from vescale.optim._gradients.bucket import FlatBucket
from vescale.optim._parameters.gathers import BucketGather
from vescale.optim._parameters.guard import Guard
from vescale.optim._parameters.sharded_values import ShardedValues
from vescale_testing import ask_again, begin_late


@pytest.fixture
def settled_sharing(monkeypatch):
    """Ignore the thread of gloo that holds the memory of the last gather a moment longer."""
    ask_again(monkeypatch, BucketGather, "is_shared")


@pytest.fixture
def late_gathers():
    """Return what lets gathers begin late, given a monkeypatch; all ranks must wait for buckets in the same order."""

    def install(patch):
        begin_late(patch, FlatBucket, "gather_values")
        # Outside of an optimizer's step its tensors over a bucket would count as those of strangers.
        patch.setattr(BucketGather, "is_shared", lambda _values, _num_views: False)

    return install


@pytest.fixture
def on_gathers():
    """`on_gathers(patch, before, after)` calls both with the number of a bucket, around its gather."""

    def install(patch, before, after):
        gather = FlatBucket.gather_values

        def gather_values(bucket):
            before(bucket.plan.index)
            pending = gather(bucket)
            pending.at_end = lambda: after(bucket.plan.index)
            return pending

        patch.setattr(FlatBucket, "gather_values", gather_values)

    return install


@pytest.fixture
def without_leaves():
    """`without_leaves(patch)` guards parameters only, not the local tensors over their memory."""
    return lambda patch: patch.setattr(Guard, "add_leaf", lambda *_, **__: None)


@pytest.fixture
def lost_values():
    """`lost_values(patch, is_lost)` zeroes gathered parameters where ``is_lost(name of the first)`` (ZeRO 3)."""

    def install(patch, is_lost):
        finish = ShardedValues.finish

        def finish_without_values(held):
            finish(held)
            if is_lost(held.plan.slots[0].fqn):
                for param in held.params:
                    param.data.zero_()  # unseen by autograd

        patch.setattr(ShardedValues, "finish", finish_without_values)

    return install
