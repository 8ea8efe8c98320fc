"""A part in eager mode keeps its values in a cache of the caller; the rest of the model runs in static mode."""

import torch

from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import init_device_mesh
from vescale_testing import gather_full, ranks

TOKENS = torch.arange(24).view(2, 12) % 60


def train_and_generate(model):
    """Return losses, gradients, the logits of a token after cached ones, and generated tokens."""
    found = []
    for _ in range(3):
        model.zero_grad()
        loss = model(input_ids=TOKENS, labels=TOKENS).loss  # with a cache, the default
        loss.backward()
        found.append(loss.detach())
    found += [gather_full(parameter.grad) for parameter in model.parameters()]
    with torch.no_grad():
        for _ in range(3):
            cache = model(input_ids=TOKENS[:, :6], use_cache=True).past_key_values
            found.append(model(input_ids=TOKENS[:, 6:7], past_key_values=cache, use_cache=True).logits)
    return [*found, model.generate(TOKENS[:, :5], max_new_tokens=4, do_sample=False)]


@ranks(2, timeout=120)
def test_attention_in_eager_mode_fills_a_cache(build):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for family, attention in (("llama", r".*self_attn"), ("gpt2", r".*attn")):
        expected = train_and_generate(build(family))
        for eager in (
            [],
            [attention],
            [attention.replace(r".*", r".*\.0\.", 1)],
        ):  # no layer, all layers, the first one
            model = build(family)
            plan = {**plans.plan_for(model, degree=2, sequence_parallel=False), "eager": eager}
            actual = train_and_generate(parallelize_module(model, mesh, plan, mode="static"))
            for got, wanted in zip(actual, expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
