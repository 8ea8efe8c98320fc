"""A U-Net, and a GPT with dropout and a tied head, split at every point: two and four stages, a loop, a V."""

import pytest
import torch
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan
from vescale_testing import halved, ranks

CHANNELS, SIZE = 4, 8
WORDS, WIDTH, HEADS, LENGTH = 11, 8, 2, 6
ROWS, MICROBATCHES = 8, 4


class Level(nn.Module):
    """Two convolutions at one resolution."""

    def __init__(self, channels, out):
        super().__init__()
        self.first, self.norm = nn.Conv2d(channels, out, 3, padding=1), nn.GroupNorm(2, out)
        self.second = nn.Conv2d(out, out, 3, padding=1)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


class UNet(nn.Module):
    """The way up takes what each level of the way down has given; pooling and joining are code between modules."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = Level(1, CHANNELS), Level(CHANNELS, 2 * CHANNELS)
        self.middle = Level(2 * CHANNELS, 2 * CHANNELS)
        self.raise2 = nn.ConvTranspose2d(2 * CHANNELS, 2 * CHANNELS, 2, stride=2)
        self.up2 = Level(4 * CHANNELS, 2 * CHANNELS)
        self.raise1 = nn.ConvTranspose2d(2 * CHANNELS, CHANNELS, 2, stride=2)
        self.up1 = Level(2 * CHANNELS, CHANNELS)
        self.head = nn.Conv2d(CHANNELS, 1, 1)

    def forward(self, image):
        d1 = self.down1(image)
        d2 = self.down2(nn.functional.max_pool2d(d1, 2))
        y = self.middle(nn.functional.max_pool2d(d2, 2))
        y = self.up2(torch.cat([self.raise2(y), d2], dim=1))
        y = self.up1(torch.cat([self.raise1(y), d1], dim=1))
        return (self.head(y) - image).square().mean()


class Block(nn.Module):
    """A block of a GPT: queries, keys and values of one linear layer, dropout in attention and after both parts."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.2))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(rows, length, WIDTH)))
        return x + self.mlp(self.norm2(x))


class NanoGPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        position = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.wte(tokens) + self.wpe(position))
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


UNITS = {
    UNet: ["down1", "down2", "middle", "raise2", "up2", "raise1", "up1", "head"],
    NanoGPT: ["wte", "wpe", "h.0", "h.1", "h.2", "h.3", "norm", "head"],
}


def batch_of(kind):
    generator = torch.Generator().manual_seed(2)
    if kind is UNet:
        return {"image": torch.randn(ROWS, 1, SIZE, SIZE, generator=generator, dtype=torch.float64)}
    return {"tokens": torch.randint(WORDS, (ROWS, LENGTH), generator=generator)}


def build(kind):
    torch.manual_seed(1)
    return kind().double()


def starts_of(kind, num_stages):
    """Return lists of the modules that begin stages, which together have every module but the first."""
    units = UNITS[kind]
    return [units[first : first + num_stages - 1] for first in range(1, len(units) - num_stages + 2)]


def check_every_split(kind, plan, num_stages, train_one_process, mesh, differences):
    batch = batch_of(kind)
    reference = build(kind)
    torch.manual_seed(3)
    expected = train_one_process(reference, lambda model, **rows: model(**rows), batch, MICROBATCHES, steps=2)
    state = torch.get_rng_state()
    expected.gradients.setdefault("head.weight", None)  # a rank that does not own a tied weight
    splits = starts_of(kind, num_stages)
    for starts in splits:
        model = build(kind)
        engine = PipelineEngine(model, mesh, PipelinePlan(plan, MICROBATCHES, starts), per_microbatch=True)
        torch.manual_seed(3)
        for loss in expected.losses:  # recorded, then followed
            model.zero_grad()
            found = engine(**batch)
            found.backward()
            assert torch.equal(found, loss), starts
        assert torch.equal(torch.get_rng_state(), state), starts
        others = differences(model, expected)
        assert max(others.values(), default=0) < 1e-10, (starts, others)
        assert {*others} <= {"wte.weight"}, (starts, others)  # tied: the order of additions differs


@pytest.mark.parametrize("kind", [UNet, NanoGPT], ids=lambda kind: kind.__name__)
@ranks(2)
def test_two_stages(kind, train_one_process, pipeline_mesh, differences):
    check_every_split(kind, "1f1b", 2, train_one_process, pipeline_mesh(), differences)


@halved
@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zb_v"])
@pytest.mark.parametrize("kind", [UNet, NanoGPT], ids=lambda kind: kind.__name__)
@ranks(2)
def test_two_stages_on_each_of_two_ranks(kind, schedule, train_one_process, pipeline_mesh, differences):
    check_every_split(kind, schedule, 4, train_one_process, pipeline_mesh(), differences)


@pytest.mark.parametrize("kind", [UNet, NanoGPT], ids=lambda kind: kind.__name__)
@ranks(4)
def test_four_stages(kind, train_one_process, pipeline_mesh, differences):
    check_every_split(kind, "zb_h1", 4, train_one_process, pipeline_mesh(), differences)
