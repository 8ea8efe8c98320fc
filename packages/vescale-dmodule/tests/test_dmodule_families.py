"""Every model family with a ready plan trains in parallel as in one process, dropout included, in every mode.

By default: every family in one or two of the modes over two ranks, and what more ranks and sharded batches change.
Every family, mode and degree with and without sequence parallelism and a sharded batch is marked thorough.
"""

import contextlib
import functools
import itertools
from dataclasses import dataclass

import pytest
import torch

from vescale.dmodule import NotLocalFriendlyError, Repeat, parallelize_module, plans
from vescale.dtensor import DTensor, Shard, init_device_mesh
from vescale_testing import half_of, ranks

MODES = ("eager", "static", "compile")
FAMILIES = sorted(plans.FAMILIES)

# Four query heads over two key-value heads, which over four ranks are repeated. Where it is another code path, as many
# of both.
CHANGES = {("phi3", 4): {"num_key_value_heads": 4}, ("olmo2", 2): {"num_key_value_heads": 4}}

# All layers share one graph. Experts are not in it, so that what is around them is compiled part by part.
NUM_GRAPHS = {"mixtral": 3, "qwen2_moe": 6, "qwen3_moe": 4}


@dataclass(frozen=True)
class Case:
    family: str
    mode: str
    sequence_parallel: bool
    tp: int = 2
    dp: int = 1
    axes: tuple[str, ...] = ("dp", "tp")
    fused: bool = False

    @property
    def config(self):
        # torch's planner needs seconds for each matrix product of heads on two axes; fused attention has none of them
        fused = {"attention": "sdpa", "attn_pdrop": 0.0} if self.fused else {}
        return {"dropout": 0.1, **fused, **CHANGES.get((self.family, self.tp), {})}

    def parallelize(self, model, shard_batch, change=lambda plan: plan):
        plan = change(plans.plan_for(model, degree=self.tp, sequence_parallel=self.sequence_parallel))
        plan = shard_batch(plan, "dp") if self.dp > 1 else plan
        return parallelize_module(model, mesh_of(self.axes, self.dp, self.tp), plan, mode=self.mode)


@functools.cache  # a rank lives for one test
def mesh_of(axes, dp, tp):
    if dp == 1:
        return init_device_mesh("cpu", (tp,), mesh_dim_names=("tp",))
    sizes = {"dp": dp, "tp": tp}
    return init_device_mesh("cpu", tuple(sizes[axis] for axis in axes), mesh_dim_names=axes)


@pytest.fixture
def run_cases(build, train, assert_same_pass, shard_batch, graphs):
    """`run_cases(cases)` gives what a rank shall do to train all of them and compare; call that on every rank."""

    def run(case, expected):
        graphs.clear()
        graphs.differentiates = case.family == "llama" and case.sequence_parallel and case.tp == 2
        model = case.parallelize(build(case.family, **case.config), shard_batch)
        is_compiled = case.mode == "compile"
        actual = train(model, tokens=11, **({"use_cache": False} if is_compiled else {}))
        assert_same_pass(actual, expected[case.family, case.tp, case.fused])
        assert all(p.grad.placements == p.placements for p in model.parameters())
        assert len(graphs.forward) == (NUM_GRAPHS.get(case.family, 1) if is_compiled else 0)
        if graphs.backward:  # in and out of attention and of the feed-forward part
            both = ["all_gather_into_tensor"] * 2 + ["reduce_scatter_tensor"] * 2
            assert collectives(graphs.forward[0]) == collectives(graphs.backward[0]) == both
            assert "dropout_factors" in str(graphs.forward[0].graph)

    def prepare(cases):
        # here, once for all ranks
        configs = {(case.family, case.tp, case.fused): case.config for case in cases}
        expected = {key: train(build(key[0], **config), tokens=11) for key, config in configs.items()}

        def on_a_rank():
            for case in cases:
                with name_the_case(case):
                    run(case, expected)

        return on_a_rank

    return prepare


def collectives(graph):
    """Names of the collectives in a graph."""
    names = [str(node.target) for node in graph.graph.nodes]
    return sorted(name.split(".")[1] for name in names if name.startswith("_c10d_functional") and "wait" not in name)


@contextlib.contextmanager
def name_the_case(case):
    """Add what ran to an error that comes out of it."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {case}")
        raise


def test_every_family_and_every_mode(run_cases):
    # every second family in sequence parallelism
    cases = [Case(family, mode, FAMILIES.index(family) % 2 == 0) for family, mode in half_of(0, FAMILIES, MODES)]
    ranks(2, timeout=300)(run_cases(cases))()


def test_more_ranks_and_sharded_batches(run_cases, build, train, assert_same_pass, shard_batch):
    together = run_cases(
        [
            Case("llama", "eager", False, tp=4),
            Case("llama", "compile", True, tp=4),
            Case("phi3", "static", False, tp=4),
            Case("qwen2_moe", "static", True, tp=4),
            Case("gpt2", "eager", True, dp=2, axes=("tp", "dp"), fused=True),
            Case("gpt2", "static", False, dp=2, fused=True),
            Case("gpt2", "compile", True, dp=2, fused=True),
        ]
    )

    @ranks(4, timeout=300)
    def on_every_rank():
        together()
        repeated_heads_in_another_order_differ(build, train, assert_same_pass, shard_batch)
        a_batch_that_is_forgotten_differs(build, train, assert_same_pass, shard_batch)
        a_loss_of_a_sharded_batch_is_refused_in_static_mode(build, train, shard_batch)
        generation_caches_repeated_heads(build, shard_batch)

    on_every_rank()


@pytest.mark.thorough
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (4, 1), (2, 2), (4, 2)])
def test_all(tp, dp, run_cases):
    cases = [Case(*case, tp, dp) for case in itertools.product(FAMILIES, MODES, (False, True))]
    if tp * dp == 8:  # every second family in sequence parallelism
        cases = [case for case in cases if case.sequence_parallel == (FAMILIES.index(case.family) % 2 == 0)]
    ranks(tp * dp, timeout=3000)(run_cases(cases))()


def repeated_heads_in_another_order_differ(build, train, assert_same_pass, shard_batch):
    def side_by_side(plan):  # k0 k1 k0 k1 instead of k0 k0 k1 k1
        key = r"model\.layers\.\d+\.self_attn\.k_proj\.output"
        assert plan["forward"][key] == Repeat({"tp": Shard(2)}, dim=2, parts=2, times=2)
        plan["forward"][key] = Repeat({"tp": Shard(2)}, dim=2, parts=1, times=2)
        return plan

    case = Case("llama", "eager", False, tp=4)
    expected = train(build("llama"), tokens=11)
    wrong = train(case.parallelize(build("llama"), shard_batch, side_by_side), tokens=11)
    with pytest.raises(AssertionError):
        assert_same_pass(wrong, expected)


def a_batch_that_is_forgotten_differs(build, train, assert_same_pass, shard_batch):
    case = Case("gpt2", "eager", True, dp=2, fused=True)
    expected = train(build("gpt2", **case.config), tokens=11)
    model = case.parallelize(build("gpt2", **case.config), shard_batch)
    model.transformer.ln_f.bias.register_hook(lambda gradient: gradient * 2)  # as if the sum over dp came twice
    with pytest.raises(AssertionError, match=r"transformer\.ln_f\.bias"):
        assert_same_pass(train(model, tokens=11), expected)


def a_loss_of_a_sharded_batch_is_refused_in_static_mode(build, train, shard_batch):
    """A mean over the batch inside of the model, with no boundary after it; in eager mode it is right."""

    def to_the_end(plan):
        plan["forward"][r"lm_head\.output"] = [{"dp": Shard(0)}]
        return plan

    def with_labels(plan, axis):
        plan = shard_batch(plan, axis)
        plan["forward"]["input"]["labels"] = {axis: Shard(0)}
        return plan

    expected = train(build("gpt2", attention="sdpa"), tokens=11)
    model = Case("gpt2", "eager", True, dp=2).parallelize(build("gpt2", attention="sdpa"), with_labels, to_the_end)
    actual = train(model, tokens=11)
    assert isinstance(actual.logits, DTensor)  # still sharded over the batch
    torch.testing.assert_close(actual.losses, expected.losses, rtol=1e-12, atol=0)
    model = Case("gpt2", "static", True, dp=2).parallelize(build("gpt2", attention="sdpa"), with_labels, to_the_end)
    with pytest.raises(NotLocalFriendlyError, match=r"after 'lm_head\.output': \"returns 'loss'\" differs"):
        train(model, tokens=11)


def generation_caches_repeated_heads(build, shard_batch):
    ids = torch.randint(0, 255, (2, 5), generator=torch.Generator().manual_seed(1))
    options = {"do_sample": False, "max_new_tokens": 3, "pad_token_id": 0}
    expected = build("llama").eval().generate(ids, **options)
    model = Case("llama", "eager", False, tp=4).parallelize(build("llama").eval(), shard_batch)
    assert torch.equal(model.generate(ids, **options), expected)


@ranks(3)
def test_heads_that_do_not_divide_are_computed_everywhere(build, train, assert_same_pass):
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    for family, mode in (("gpt2", "static"), ("llama", "eager"), ("phi3", "static")):
        expected = train(build(family, dropout=0.1), tokens=11)
        model = build(family, dropout=0.1)
        plan = plans.plan_for(model, degree=3, sequence_parallel=True, replicate_attention=True)
        assert_same_pass(train(parallelize_module(model, mesh, plan, mode=mode), tokens=11), expected)
