"""nanoGPT's attention, one projection for queries, keys and values and sizes in attributes, in every mode."""

import math

import pytest
import torch
from torch import nn

from vescale.dmodule import Divided, ImplicitRedistributionError, NotLocalFriendlyError, parallelize_module, plans
from vescale.dtensor import init_device_mesh
from vescale_testing import ranks

MODES = ("eager", "static", "compile")
WIDTH = 24
X = torch.randn(2, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Attention(nn.Module):
    """Takes the width of its input for that of its heads, too, as nanoGPT's does."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = 4, WIDTH
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("bias", torch.tril(torch.ones(8, 8)).view(1, 1, 8, 8))

    def forward(self, x):
        return self.attend(x, x.size(-1))

    def attend(self, x, width):
        batch, length, _ = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(batch, length, self.n_head, width // self.n_head).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        weights = weights.masked_fill(self.bias[:, :, :length, :length] == 0, float("-inf")).softmax(dim=-1)
        y = self.attn_dropout(weights) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width)))


class AttentionByAttributes(Attention):
    """The same with all sizes from attributes."""

    def forward(self, x):
        return self.attend(x, self.n_embd)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_fc, self.c_proj, self.dropout = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH), nn.Dropout(0.1)

    def forward(self, x):
        return self.dropout(self.c_proj(nn.functional.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(WIDTH), attention(), nn.LayerNorm(WIDTH), Mlp()

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Nano(nn.Module):
    def __init__(self, attention=Attention):
        super().__init__()
        self.h = nn.ModuleList(Block(attention) for _ in range(2))
        self.double()

    def forward(self, x):
        for block in self.h:
            x = block(x)
        return x


LAYER = r"h\.\d+"


def planned(*, parts=3, **sections):
    return {
        **plans.merge(
            plans.block(rf"{LAYER}\.(attn|mlp)"),
            plans.column(rf"{LAYER}\.attn\.c_attn", parts=parts),
            plans.column(rf"{LAYER}\.mlp\.c_fc"),
            plans.row(rf"{LAYER}\.(attn|mlp)\.c_proj"),
        ),
        **sections,
    }


def step(model):
    found, x = {}, X.clone().requires_grad_()
    for again in range(2):
        y = model(x)
        y.square().sum().backward()
        found[f"output {again}"] = y.detach()
    return {**found, "x": x.grad}


DIVIDED = {"local_attribute": {rf"{LAYER}\.attn\.(n_head|n_embd)": Divided("tp")}}


@ranks(2, timeout=240)
def test_sizes_that_are_attributes_are_divided(in_all_modes, graphs):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def make():
        return Nano(AttentionByAttributes)

    model = in_all_modes(make, planned(**DIVIDED), mesh, step, modes=MODES)
    assert len(graphs.forward) == 1  # of both layers, although their attributes change
    assert (model.h[0].attn.n_head, model.h[0].attn.n_embd) == (4, WIDTH)  # outside of a call
    # without the attribute
    model = parallelize_module(make(), mesh, planned(), mode="static")
    with pytest.raises(NotLocalFriendlyError) as info:
        model(X)
    for text in (
        "on local tensors module 'h.0.attn' fails, which runs in eager mode: ",
        r'"local_attribute": {r"h\.0\.attn\.NAME": Divided("tp")}',
        r'"eager": [r"h\.0\.attn"] in the plan',
    ):
        assert text in str(info.value), str(info.value)
    # shards that are no strips of all three
    with pytest.raises(ImplicitRedistributionError, match=r"h\.0\.attn"):
        parallelize_module(make(), mesh, planned(parts=1, **DIVIDED))(X)


@ranks(2, timeout=240)
def test_sizes_of_the_input_need_whole_tensors(in_all_modes, graphs):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for mode in MODES[1:]:  # attributes alone do not help
        model = parallelize_module(Nano(), mesh, planned(**DIVIDED), mode=mode)
        with pytest.raises(NotLocalFriendlyError, match=r"module 'h\.0\.attn' fails, .*\"eager\": \[r\"h"):
            model(X)
    assert not graphs.forward
    in_all_modes(Nano, planned(eager=[rf"{LAYER}\.attn"]), mesh, step, modes=MODES)
    assert graphs.forward
