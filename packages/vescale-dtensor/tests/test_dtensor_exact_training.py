"""Training inside of `exact`: losses, parameters and AdamW state have the bits of one process on every layout."""

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from vescale.dtensor import Replicate, Shard, distribute_tensor, exact, init_device_mesh
from vescale_testing import ranks

CHANNELS, HEADS, CLASSES, ROWS, TOKENS = 32, 8, 24, 8, 6
COLUMNS = ("qkv.weight", "qkv.bias", "up.weight", "up.bias", "head.weight")


class Block(nn.Module):
    """A transformer of one layer, with dropout."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, CHANNELS)
        self.norm1, self.norm2 = nn.LayerNorm(CHANNELS), nn.RMSNorm(CHANNELS)
        self.qkv, self.out = nn.Linear(CHANNELS, 3 * CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.up, self.down = nn.Linear(CHANNELS, 4 * CHANNELS), nn.Linear(4 * CHANNELS, CHANNELS)
        self.head = nn.Linear(CHANNELS, CLASSES, bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        heads = self.qkv(self.norm1(x)).unflatten(-1, (HEADS, 3, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*heads.unbind(3), is_causal=True, dropout_p=0.1)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train(mesh=None, num_blocks=8, steps=3):
    """Return losses, parameters and the optimizer's state; the batch lies over `dp`, columns and rows over `tp`."""
    torch.manual_seed(0)
    model = Block()
    place = identity if mesh is None else placed(mesh)
    for module_name, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(place(f"{module_name}.{name}", parameter.detach())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    with contextlib.nullcontext() if num_blocks is None else exact(num_blocks=num_blocks):
        for _ in range(steps):
            batch = torch.randint(CLASSES, (ROWS, TOKENS + 1), generator=generator)
            loss = model(place("batch", batch[:, :-1]), place("batch", batch[:, 1:]))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses += [loss, norm]
    states = [state for of_parameter in optimizer.state.values() for state in of_parameter.values()]
    return [full(tensor.detach()) for tensor in (*losses, *model.parameters(), *states)]


def identity(_name, tensor):
    return tensor


def placed(mesh):
    def place(name, tensor):
        placements = {axis: Replicate() for axis in mesh.mesh_dim_names}
        if name == "batch" and "dp" in placements:
            placements["dp"] = Shard(0)
        elif "tp" in placements and name in (*COLUMNS, "embedding.weight"):
            placements["tp"] = Shard(0)
        elif "tp" in placements and name in ("out.weight", "down.weight"):
            placements["tp"] = Shard(1)
        return distribute_tensor(tensor.clone(), mesh, list(placements.values()))

    return place


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def num_equal(actual, expected):
    return sum(map(torch.equal, actual, expected))


LAYOUTS = {"dp": (2,), "dp tp": (2, 2)}
MORE = {"dp": (4,), "tp": (8,), "dp tp": (4, 2)}


@pytest.mark.parametrize(
    ("axes", "shape", "steps"),
    [(axes, shape, 2) for axes, shape in LAYOUTS.items()]
    + [pytest.param(axes, shape, 10, marks=pytest.mark.thorough) for axes, shape in MORE.items()],
)
def test_bits_are_those_of_one_process(axes, shape, steps):
    @ranks(torch.Size(shape).numel(), timeout=600)
    def on_every_rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=tuple(axes.split()))
        expected = train(steps=steps)
        assert num_equal(train(mesh, steps=steps), expected) == len(expected)

    on_every_rank()


@ranks(2)
def test_without_the_context_parameters_differ():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    expected = train(num_blocks=None)
    assert num_equal(train(mesh, num_blocks=None), expected) < len(expected) / 2


def test_another_number_of_blocks_gives_other_bits():
    expected = train()
    assert num_equal(train(), expected) == len(expected)
    assert num_equal(train(num_blocks=4), expected) < len(expected) / 2
