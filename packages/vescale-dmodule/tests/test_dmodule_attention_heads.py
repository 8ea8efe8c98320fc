"""`nn.MultiheadAttention` with heads on several ranks, in every form, is that of one process."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from vescale.dmodule import ImplicitRedistributionError, parallelize_module, plans
from vescale.dtensor import InterleavedShard, init_device_mesh
from vescale_testing import gather_full, ranks

WIDTH, HEADS = 16, 4
MASK = torch.ones(6, 6).triu(1).bool()
PADDING = torch.tensor([[False] * 5 + [True], [False] * 6])


class Attends(nn.Module):
    """Attention with its weights, which count."""

    def __init__(self, *, other=False, masks=None, **arguments):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, "dropout": 0.1, **arguments})
        self.other, self.masks = other, masks or {}

    def forward(self, x):
        key = x[..., : self.attention.kdim] * 2 if self.other else x
        out, weights = self.attention(x, key, key, **self.masks)
        return x + out, weights


class Encodes(nn.Module):
    """An encoder and a decoder of torch."""

    def __init__(self):
        super().__init__()
        sizes = {"dim_feedforward": 24, "batch_first": True, "dropout": 0.1}
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, **sizes)
        # nested tensors, in evaluation on one process only, have zeros for padding
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, norm_first=True, **sizes), 1)

    def forward(self, x):
        memory = self.encoder(x, src_key_padding_mask=PADDING)
        return self.decoder(x, memory, tgt_mask=MASK, tgt_is_causal=True, memory_key_padding_mask=PADDING)


FORMS = {
    "weights": {},
    "rows last": {"batch_first": False},
    "no weights": {"masks": {"need_weights": False}},
    "weights of heads": {"masks": {"average_attn_weights": False}},
    "masks": {"masks": {"attn_mask": MASK, "key_padding_mask": PADDING}},
    "other keys": {"other": True, "kdim": 8, "vdim": 8, "bias": False},
    "keys of its own": {"other": True, "add_bias_kv": True, "add_zero_attn": True, "masks": {"attn_mask": MASK}},
}


def build(form):
    torch.manual_seed(0)
    model = Encodes() if form is None else Attends(**FORMS[form])
    for part in model.modules():
        if isinstance(part, nn.MultiheadAttention) and part.in_proj_bias is not None:
            nn.init.normal_(part.in_proj_bias)
            nn.init.normal_(part.out_proj.bias)
    return model.double()


def batch():
    return torch.randn(2, 6, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def use(model):
    """Train a step and evaluate; return outputs and gradients."""
    torch.manual_seed(1)
    found = {}
    outputs = model.train()(batch())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum(t.square().sum() for t in outputs if t is not None).backward()
    found |= {f"output {i}": gather_full(t.detach()) for i, t in enumerate(outputs) if t is not None}
    found |= {f"gradient of {name}": gather_full(p.grad) for name, p in model.named_parameters()}
    with torch.no_grad():
        outputs = model.eval()(batch())
    output = outputs[0] if isinstance(outputs, tuple) else outputs
    return {**found, "evaluated": gather_full(output), "random state": torch.get_rng_state().double()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] - value).abs().max() < 1e-10, name


@pytest.mark.parametrize("form", [*FORMS, None])
def test_a_form_trains_as_on_one_process(form):
    derived = plans.derive(build(form), {"x": batch()}, degree=2)
    assert not derived.replicated
    assert "eager" not in derived.plan
    expected = use(build(form))

    @ranks(2, timeout=240)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for mode in ("eager", "static"):
            assert_equal(use(parallelize_module(build(form), mesh, derived.plan, mode=mode)), expected)

    on_every_rank()


def test_queries_keys_and_values_are_an_interleaved_shard():
    plan = plans.derive(build("weights"), {"x": batch()}, degree=2).plan
    assert plan["parameter"][r"attention\.(in_proj_bias|in_proj_weight)"] == {"tp": InterleavedShard(0, 3)}
    wrong = copy.deepcopy(plan)
    wrong["parameter"][r"attention\.(in_proj_bias|in_proj_weight)"] = {"tp": Shard(0)}

    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ImplicitRedistributionError, match="would communicate on its own"):
            use(parallelize_module(build("weights"), mesh, wrong))

    on_every_rank()
