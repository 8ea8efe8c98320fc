"""Mixtral 8x7b, on the meta device: plans that fit real clusters, in milliseconds and without memory."""

import pytest
import torch

from vescale.plan import Cluster, Constraints, NoPlanFitsError, generate_plan, profile

GIB = 2**30


def constraints(devices, **kwargs):
    return Constraints(global_batch_size=4 * devices, sequence_length=4096, **kwargs)


@pytest.mark.parametrize("devices", [8, 16, 64, 1024])
def test_8x7b_fits_80_gib_gpus(build_mixtral, devices):
    plan = generate_plan(build_mixtral(), Cluster(devices, memory_bytes=80 * GIB), constraints(devices))
    plan.check_world(devices)
    plan.check_batch(4 * devices)
    assert plan.tp * plan.pp > 1
    assert plan.tp <= 8
    assert max(stage.total for stage in plan.memory) <= 72 * GIB


def test_8x7b_does_not_fit_one_gpu_and_says_how_far_it_is(build_mixtral):
    with pytest.raises(
        NoPlanFitsError,
        match=r"expected a plan for 1 cuda devices with at most .* the nearest, dp=1 tp=1 pp=1 .* over the limit",
    ):
        generate_plan(build_mixtral(), Cluster(1, memory_bytes=80 * GIB), constraints(1))


def test_float32_needs_more_ranks_per_replica(build_mixtral):
    cluster = Cluster(64, memory_bytes=80 * GIB)
    half, single = (
        generate_plan(build_mixtral(dtype=dtype), cluster, constraints(64)) for dtype in (torch.bfloat16, torch.float32)
    )
    assert single.tp * single.pp > half.tp * half.pp


def test_explain_shows_choice_refusals_and_what_is_covered(build_mixtral):
    plan = generate_plan(build_mixtral(), Cluster(16, memory_bytes=80 * GIB), constraints(16))
    text = plan.explain(max_rows=200)
    assert "Layouts in the order of preference, limit 72.00 GiB per rank:" in text
    assert text.count(" chosen") == 1
    assert "over the limit" in text
    assert "8 experts are not divisible by tp = 16" in text
    assert "Not counted: workspaces of kernels" in text
    assert "fullest rank uses" in text


def test_profile_of_the_hugging_face_model_is_that_of_the_tree(build_mixtral):
    """The unmodified model gives the same plan as the tree of torch modules used here."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig()).to(torch.bfloat16)
    theirs, ours = profile(model), profile(build_mixtral())
    assert theirs.num_parameters == ours.num_parameters
    cluster = Cluster(16, memory_bytes=80 * GIB)
    assert generate_plan(theirs, cluster, constraints(16)) == generate_plan(ours, cluster, constraints(16))
