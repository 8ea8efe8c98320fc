"""Unmodified Hugging Face models in tensor and sequence parallelism train as they do in one process."""

import itertools

import pytest
import torch
from torch.distributed.tensor import DTensor

from vescale.dmodule import no_sync, parallelize_module, plans
from vescale.dtensor import Replicate, disabled, init_device_mesh
from vescale_testing import halved, ranks

ALL = list(itertools.product(("eager", "sdpa"), (0.0, 0.1), (False, True)))
SOME = [("eager", 0.1, True)]


def parallel(model, **options):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    return parallelize_module(model, mesh, plans.plan_for(model, degree=mesh.size(), **options))


@halved
@pytest.mark.parametrize(("world", "cases"), [(2, ALL), (4, SOME)], ids=["tp2", "tp4"])
@pytest.mark.parametrize("family", ["mixtral", "llama", "gpt2"])
def test_training_equals_one_process(family, world, cases, build, train, assert_same_pass):
    heads = {} if family == "gpt2" else {"num_key_value_heads": world}

    @ranks(world)
    def on_every_rank():
        for attention, dropout, sequence_parallel in cases:
            config = {"attention": attention, "dropout": dropout, **heads}
            expected = train(build(family, **config))
            model = parallel(build(family, **config), sequence_parallel=sequence_parallel)
            assert_same_pass(train(model), expected)

    on_every_rank()


@ranks(2)
def test_accumulation_over_two_backward_calls(build, train, assert_same_pass):
    for family in ("mixtral", "gpt2"):
        expected = train(build(family, dropout=0.1), passes=2)
        model = parallel(build(family, dropout=0.1), sequence_parallel=True)
        assert_same_pass(train(model, passes=2), expected)
        for name, parameter in model.named_parameters():
            assert parameter.grad.placements == parameter.placements, name


@ranks(2)
def test_tied_and_frozen_parameters(build, train, assert_same_pass):
    for family, tied in (("llama", "model.embed_tokens"), ("gpt2", "transformer.wte")):
        models = [build(family, tie_word_embeddings=True) for _ in range(2)]
        for model in models:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("norm" not in name and "ln_" not in name)
        expected = train(models[0])
        model = parallel(models[1], sequence_parallel=True)
        assert model.lm_head.weight is model.get_submodule(tied).weight
        frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert frozen == [name for name, p in models[0].named_parameters() if not p.requires_grad]
        assert frozen
        assert_same_pass(train(model), expected)


@ranks(2)
def test_unfreezing_later(build, train, assert_same_pass):
    models = [build("llama") for _ in range(2)]
    models[1].requires_grad_(False)
    model = parallel(models[1], sequence_parallel=True).requires_grad_(True)
    assert_same_pass(train(model), train(models[0]))
    assert all(p.grad.placements == p.placements for p in model.parameters())


@ranks(2)
def test_low_precision_parameters_stay(build):
    ids = torch.arange(12).view(2, 6)
    plain = build("llama", dtype=torch.bfloat16)
    expected = plain(input_ids=ids, labels=ids).loss
    model = parallel(build("llama", dtype=torch.bfloat16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    assert loss.dtype == expected.dtype
    torch.testing.assert_close(loss, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=0)  # one rounding of the loss
    assert all(p.dtype == torch.bfloat16 and p.grad.dtype == torch.bfloat16 for p in model.parameters())


@ranks(2)
def test_evaluation_and_generation(build):
    ids = torch.randint(0, 255, (2, 5), generator=torch.Generator().manual_seed(1))
    plain = build("llama").eval()
    model = parallel(build("llama").eval(), sequence_parallel=False)
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits)
            cached = model(input_ids=ids[:, :3], use_cache=True)
            rest = model(input_ids=ids[:, 3:], past_key_values=cached.past_key_values)
            torch.testing.assert_close(rest.logits, plain(input_ids=ids).logits[:, 3:])
    options = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@ranks(2)
def test_a_mesh_axis_of_one_rank(build, train, assert_same_pass):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    plain = build("mixtral", dropout=0.1)
    model = parallelize_module(build("mixtral", dropout=0.1), mesh["tp"], plans.mixtral())
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    assert_same_pass(train(model), train(plain), bound=1e-15)


@ranks(2)
def test_an_attention_mask_and_position_ids(build, train, assert_same_pass):
    mask = torch.ones(4, 17, dtype=torch.int64)
    mask[1, :5] = 0
    mask[3, 9:] = 0
    for attention in ("eager", "sdpa"):
        inputs = {"attention_mask": mask, "position_ids": torch.arange(17).expand(4, -1)}
        model = parallel(build("llama", attention=attention), sequence_parallel=True)
        assert_same_pass(train(model, **inputs), train(build("llama", attention=attention), **inputs))


@ranks(2)
def test_without_the_sum_over_ranks_gradients_of_norms_are_partial(build, train):
    expected = train(build("llama"))
    model = parallel(build("llama"), sequence_parallel=True)
    with no_sync(model):
        train(model)
    gradient = model.model.norm.weight.grad
    assert gradient.placements != (Replicate(),)
    assert not torch.allclose(gradient.to_local(), expected.grads["model.norm.weight"])


@ranks(2)
def test_with_stock_randomness_dropout_differs(build, train, assert_same_pass):
    expected = train(build("llama", dropout=0.1))
    with disabled("random"):
        actual = train(parallel(build("llama", dropout=0.1)))
    with pytest.raises(AssertionError):
        assert_same_pass(actual, expected)
