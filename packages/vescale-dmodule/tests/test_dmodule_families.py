"""Every model family with a ready plan trains in tensor and sequence parallelism as it does in one process."""

import contextlib
import itertools

import pytest
import torch

from vescale.dmodule import Repeat, parallelize_module, plans
from vescale.dtensor import Shard, init_device_mesh
from vescale_testing import ranks

MODES = ("eager", "static")
FAMILIES = sorted(plans.FAMILIES)

# Four query heads over two key-value heads, which over four ranks are repeated. Where it is another code path, as many
# of both over two ranks.
CHANGES = {("phi3", 2): {"num_key_value_heads": 4}, ("olmo2", 2): {"num_key_value_heads": 4}}


def parallel(model, mode="eager", change=lambda plan: plan, **options):
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, change(plans.plan_for(model, degree=world, **options)), mode=mode)


@contextlib.contextmanager
def name_the_case(*case):
    """Add what ran to an error that comes out of it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {case}")
        raise


@pytest.mark.parametrize("world", [2, 4], ids=["tp2", "tp4"])
def test_training_equals_one_process(world, build, train, assert_same_pass):
    # All in the same processes: each works out anew how operators on its tensors are sharded.
    configs = {family: {"dropout": 0.1, **CHANGES.get((family, world), {})} for family in FAMILIES}
    expected = {family: train(build(family, **config), tokens=11) for family, config in configs.items()}

    @ranks(world, timeout=200)
    def on_every_rank():
        for family, mode, sequence_parallel in itertools.product(
            FAMILIES, MODES, (False, True) if world == 2 else (True,)
        ):
            model = build(family, **configs[family])
            with name_the_case(family, mode, sequence_parallel):
                parallel(model, mode, sequence_parallel=sequence_parallel)
                assert_same_pass(train(model, tokens=11), expected[family])

    on_every_rank()


@ranks(3)
def test_heads_that_do_not_divide_are_computed_everywhere(build, train, assert_same_pass):
    for family in ("gpt2", "llama", "phi3"):
        config = {"dropout": 0.1}
        expected = train(build(family, **config), tokens=11)
        for mode in MODES:
            model = parallel(build(family, **config), mode, sequence_parallel=True, replicate_attention=True)
            assert_same_pass(train(model, tokens=11), expected)


@ranks(4)
def test_repeated_heads_in_another_order_differ(build, train, assert_same_pass):
    def side_by_side(plan):  # k0 k1 k0 k1 instead of k0 k0 k1 k1
        key = r"model\.layers\.\d+\.self_attn\.k_proj\.output"
        assert plan["forward"][key] == Repeat({"tp": Shard(2)}, dim=2, parts=2, times=2)
        plan["forward"][key] = Repeat({"tp": Shard(2)}, dim=2, parts=1, times=2)
        return plan

    expected = train(build("llama"), tokens=11)
    wrong = train(parallel(build("llama"), change=side_by_side), tokens=11)
    with pytest.raises(AssertionError):
        assert_same_pass(wrong, expected)


@ranks(4)
def test_generation_caches_repeated_heads(build):
    ids = torch.randint(0, 255, (2, 5), generator=torch.Generator().manual_seed(1))
    options = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    expected = build("llama").eval().generate(ids, **options)
    assert torch.equal(parallel(build("llama").eval()).generate(ids, **options), expected)
