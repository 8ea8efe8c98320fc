"""Encoders and decoders: blocks of both are distributed evenly, in the order in which they run."""

import pytest
import torch
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan, SplitError, split_units
from vescale_testing import halved, ranks

transformers = pytest.importorskip("transformers")
TOKENS = {"vocab_size": 40, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
# named here, so that their modules are imported once, before the ranks are forked
MAKERS = {
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config),
    "bart": (transformers.BartForConditionalGeneration, transformers.BartConfig),
}
SIZES = {
    "t5": {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},
    "bart": {
        "d_model": 16,
        **{f"{side}_{size}": value for side in ("encoder", "decoder") for size, value in
           (("layers", 2), ("attention_heads", 4), ("ffn_dim", 24))},
    },
}  # fmt: skip
NO_DROPOUT = {"t5": {"dropout_rate": 0.0}, "bart": {"dropout": 0.0}}


def build(family):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    make, configure = MAKERS[family]
    return make(configure(**SIZES[family], **NO_DROPOUT[family], **TOKENS)).train()


def batch():
    ids = torch.randint(2, 40, (4, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.flip(0)}


class Pair(nn.Module):
    """A decoder is registered before its encoder, and beside a list of small modules."""

    def __init__(self, *, size=4):
        super().__init__()
        self.decoder = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(4, size), nn.Linear(size, 4)) for _ in range(3))
        self.scales = nn.ModuleList(nn.LayerNorm(1) for _ in range(2))
        self.unused, self.head = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        for block in self.encoder:
            x = block(x)
        for block, scale in zip(self.decoder, self.scales, strict=True):
            x = block(x) + scale(x[:, :1])
        return self.head(x)


def test_blocks_of_both_are_distributed():
    example = {"x": torch.ones(2, 4, device="meta")}
    split = split_units(Pair(), PipelinePlan(), 5, example_inputs=example)
    assert split.stages == (
        ("encoder.0",),
        ("encoder.1",),
        ("encoder.2",),
        ("decoder.0", "scales.0"),
        ("decoder.1", "scales.1", "unused", "head"),
    )


def test_without_the_order_the_longest_list_alone_is():
    """Entries of two lists may run in turn."""
    with pytest.raises(SplitError, match="expected at least 5 blocks for 5 pipeline stages, got 3 in `encoder`"):
        split_units(Pair(), PipelinePlan(), 5)


def test_much_smaller_blocks_are_none():
    example = {"x": torch.ones(2, 4, device="meta")}
    with pytest.raises(SplitError, match="got 3 in `encoder`"):
        split_units(Pair(size=64), PipelinePlan(), 5, example_inputs=example)
    with pytest.raises(SplitError, match="got 5 in `encoder` and `decoder`"):
        split_units(Pair(), PipelinePlan(), 6, example_inputs=example)


@halved
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("family", MAKERS)
@ranks(2)
def test_training_is_that_of_one_process(family, schedule, train_one_process, pipeline_mesh):
    expected = train_one_process(build(family), lambda model, **rows: model(**rows).loss, batch(), 2)
    model = build(family)
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan(schedule, 2))
    loss = engine(**batch())
    loss.backward()
    assert sum("block" in unit or "layers" in unit for unit in engine.split.stages[3]) == 1
    torch.testing.assert_close(loss, expected.losses[0], rtol=1e-12, atol=0)
    own = {name: p for name, p in model.named_parameters() if name in expected.gradients}  # without copies
    assert len(own) > 4
    for name, parameter in own.items():  # gradients of the output of the encoder are added stage by stage
        torch.testing.assert_close(parameter.grad, expected.gradients[name], rtol=0, atol=1e-12)
