"""A nanoGPT with dropout everywhere, trained on sharded parameters and batches, gives the losses of one process.

The model is written as nanoGPT is (merged query-key-value, attention spelled out, tied embedding) and knows of no
DTensor. Twenty steps of AdamW: a mask that differs once shows in every later loss.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication

from vescale.dtensor import DTensor, InterleavedShard, Replicate, Shard, disabled, init_device_mesh
from vescale_testing import ranks

VOCABULARY, BLOCK, WIDTH, BATCH = 33, 8, 24, 4


class Attention(nn.Module):
    def __init__(self, heads, dropout):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("mask", torch.ones(BLOCK, BLOCK).tril().view(1, 1, BLOCK, BLOCK))

    def forward(self, x):
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (y.view(B, T, self.heads, C // self.heads).transpose(1, 2) for y in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class MLP(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, heads, dropout):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(heads, dropout), MLP(dropout)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, heads, dropout):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.drop, self.block, self.ln_f = nn.Dropout(dropout), Block(heads, dropout), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight
        nn.init.normal_(self.wte.weight, std=0.05)

    def forward(self, idx, targets):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        logits = self.lm_head(self.ln_f(self.block(x)))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def build(heads, dropout):
    torch.manual_seed(0)
    return GPT(heads, dropout).double()


SHARDED = {
    "c_attn.weight": InterleavedShard(0, 3),
    "c_attn.bias": InterleavedShard(0, 3),
    "attn.c_proj.weight": Shard(1),
    "c_fc.weight": Shard(0),
    "c_fc.bias": Shard(0),
    "mlp.c_proj.weight": Shard(1),
    "wte.weight": Shard(0),
    "lm_head.weight": Shard(0),
}


def on_axes(mesh, **placements):
    """Placements by the names of axes; the others are replicated."""
    return [placements.get(name, Replicate()) for name in mesh.mesh_dim_names]


def distribute(model, mesh, shard):
    """Shard the parameters over tp, and reduce where partial sums leave a sharded layer."""
    made = {}
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = next((p for end, p in SHARDED.items() if f"{prefix}.{name}".endswith(end)), Replicate())
            if parameter not in made:
                made[parameter] = nn.Parameter(_cut(parameter.detach(), mesh, placement, shard))
            setattr(module, name, made[parameter])
        if prefix.endswith(("wte", "c_proj")):
            module.register_forward_hook(
                lambda _module, _args, out: out.redistribute(
                    placements=[Replicate() if p.is_partial() else p for p in out.placements]
                )
            )
    return model


def _cut(tensor, mesh, placement, shard):
    if "tp" not in mesh.mesh_dim_names or not isinstance(placement, InterleavedShard):
        return shard(tensor, mesh, on_axes(mesh, tp=placement))
    tp = mesh["tp"]
    parts = tensor.view(3, WIDTH, *tensor.shape[1:]).chunk(tp.size(), 1)
    local = parts[tp.get_local_rank()].flatten(0, 1)
    size = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local, mesh, on_axes(mesh, tp=placement), run_check=False, **size).detach()


def train(model, steps, mesh=None, shard=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator, losses = torch.Generator().manual_seed(1), []
    torch.manual_seed(5)
    for _ in range(steps):
        tokens = torch.randint(8, (BATCH, BLOCK + 1), generator=generator)  # few of them occur, which is learnt
        idx, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        targets[0, :6] = -1
        if mesh is not None:
            idx, targets = (shard(t, mesh, on_axes(mesh, dp=Shard(0))) for t in (idx, targets))
        with implicit_replication():
            loss = model(idx, targets)
            loss.backward()
        if mesh is not None:
            loss = loss.full_tensor()
            for parameter in model.parameters():
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def distance(one, other):
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_twenty_steps(axis, shard):
    @ranks(2, timeout=120)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
        expected = train(build(6, 0.1), 20)
        actual = train(distribute(build(6, 0.1), mesh, shard), 20, mesh, shard)
        assert distance(actual, expected) < 1e-10
        assert expected[-1] < expected[0] - 0.5  # it does train
        with disabled("random"):
            stock = train(distribute(build(6, 0.1), mesh, shard), 3, mesh, shard)
        assert distance(stock, expected[:3]) > 1e-4

    on_every_rank()


@ranks(2, timeout=120)
def test_heads_that_the_ranks_do_not_divide(shard):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    actual = train(distribute(build(3, 0.1), mesh, shard), 3, mesh, shard)
    assert distance(actual, train(build(3, 0.1), 3)) < 1e-12
