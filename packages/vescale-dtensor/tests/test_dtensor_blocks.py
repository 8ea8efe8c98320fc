"""Views that merge dims with uneven shards keep them, and so do operators on these views."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional

from vescale.dtensor import Replicate, Shard, debug, distribute_tensor, init_device_mesh, strict
from vescale.dtensor._operators.blocks import view_of_blocks
from vescale.dtensor._placements.types import BlockShard
from vescale_testing import gather_full, ranks

B = BlockShard(0, 12)


def values(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("old", "new", "placement", "expected"),
    [
        ((5, 12, 8), (60, 8), Shard(0), B),
        ((5, 12, 8), (480,), Shard(0), BlockShard(0, 96)),
        ((60, 8), (5, 12, 8), B, Shard(0)),
        ((60, 8), (10, 6, 8), B, Shard(0)),  # 4 + 4 + 2
        ((60, 8), (20, 3, 8), B, BlockShard(0, 4)),
        ((60, 8), (60, 2, 4), B, B),
        ((60, 8), (1, 60, 8), B, BlockShard(1, 12)),
        ((60, 8), (3, 20, 8), B, None),  # 20 rows are no whole blocks
        ((4, 5, 8), (4, 40), Shard(1), BlockShard(1, 8)),
        ((4, 5, 8), (20, 8), Shard(1), None),
        ((6, 12, 8), (72, 8), Shard(0), Shard(0)),
        ((1, 12, 8), (1, 12, 8), Shard(0), Shard(0)),
        ((1, 12, 8), (12, 8), Shard(0), B),
        ((2, 3, 8), (6, 8), Shard(0), BlockShard(0, 3)),
    ],
)
def test_a_view_has_the_rows_of_its_tensor(old, new, placement, expected):
    found = view_of_blocks(old, new, placement, 3)
    assert found == expected
    if found is not None:
        assert view_of_blocks(new, old, found, 3) == placement


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
        self.up, self.down, self.out = nn.Linear(8, 12), nn.Linear(12, 8, bias=False), nn.Linear(8, 16)
        self.double()

    def forward(self, tokens, targets):
        h = self.norm(self.embed(tokens))
        h = h + self.down(functional.dropout(functional.gelu(self.up(h)), 0.3))
        flat = h.view(-1, 8)
        flat = flat.softmax(-1) * flat.norm(dim=-1, keepdim=True) + torch.cat([flat, flat], 1)[:, 4:12]
        logits = self.out(flat.view_as(h))
        return functional.cross_entropy(logits.view(-1, 16), targets.view(-1))


def train(net, tokens, targets):
    torch.manual_seed(1)
    loss = net(tokens, targets)
    loss.backward()
    gradients = {name: gather_full(p.grad) for name, p in net.named_parameters()}
    return {"loss": gather_full(loss.detach()), "state": torch.get_rng_state().double(), **gradients}


def batch(rows):
    tokens = torch.randint(0, 16, (rows, 6), generator=torch.Generator().manual_seed(rows))
    return tokens, torch.where(tokens % 5 == 0, -100, (tokens * 7 + 1) % 16)


def distributed(net, mesh):
    for module in net.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            shards = [Replicate()] * mesh.ndim
            module.register_parameter(name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, shards)))
    return net


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 3)])
@ranks(3)
def test_a_network_with_uneven_rows(shape):
    mesh = init_device_mesh("cpu", shape)
    for rows in (5, 4, 2, 1, 6):
        shards = [Shard(0) if size > 1 else Replicate() for size in shape]
        tensors = [distribute_tensor(each, mesh, shards) for each in batch(rows)]
        found = train(distributed(Net(), mesh), *tensors)
        for name, value in train(Net(), *batch(rows)).items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-12, msg=lambda t, n=f"{rows} {name}": f"{n}: {t}"
            )


@ranks(3)
def test_nothing_is_gathered():
    mesh = init_device_mesh("cpu", (3,))
    net = distributed(Net(), mesh)
    tokens, targets = (distribute_tensor(each, mesh, [Shard(0)]) for each in batch(5))
    with strict():
        loss = net(tokens, targets)
    assert loss.placements[0].is_partial()
    with pytest.raises(RuntimeError, match="implicitly"), strict():
        net.embed(tokens).view(-1, 8).flip(0)


@ranks(4)
def test_two_axes():
    mesh = init_device_mesh("cpu", (2, 2))
    x, w = values(3, 4, 6), values(6, 8, seed=1)
    for placements in ([Shard(0), Shard(2)], [Shard(0), Replicate()], [Shard(0), Shard(1)], [Shard(0), Shard(0)]):
        dx, dw = distribute_tensor(x, mesh, placements), distribute_tensor(w, mesh, [Replicate(), Shard(0)])
        for shape in ((12, 6), (72,), (3, 24), (3, 2, 2, 6)):
            torch.testing.assert_close(gather_full(dx.view(shape)), x.view(shape), rtol=0, atol=0)
        torch.testing.assert_close(gather_full(dx.view(12, 6) @ dw), x.view(12, 6) @ w)


FUNCTIONS = {
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0).values,
    "index": lambda x: x[torch.tensor([3, 1, 59])],
    "select": lambda x: x[17] * 2,
    "slice": lambda x: x[5:50, 1:],
    "strided slice": lambda x: x[::7],
    "chunk": lambda x: torch.cat(x.chunk(4)[::-1]),
    "transpose": lambda x: x.t() @ x,
    "outer": lambda x: x @ x.t(),
    "sum": lambda x: x.sum(0) + x.mean() + x.amax(0),
    "softmax over rows": lambda x: x.softmax(0),
    "broadcast": lambda x: x[:, None, :] * x.sum(-1)[:, None, None].expand(-1, 3, -1),
    "cat": lambda x: torch.cat([x, x * 2]),
    "where": lambda x: torch.where(x > 0, x, 0),
    "nonzero": lambda x: (x > 0.5).nonzero(),
    "topk": lambda x: x.topk(3, dim=-1).values,
    "one_hot": lambda x: functional.one_hot(x.argmax(-1), 8).to(x.dtype) + x,
    "index_add": lambda x: torch.zeros_like(x).index_add(0, torch.arange(60) % 7, x),
    "scatter": lambda x: torch.zeros_like(x).scatter(1, x.topk(2).indices, 1.0) * x,
    "gather": lambda x: x.gather(1, x.argsort(1)),
    "masked": lambda x: x.masked_fill(x < 0, 0.0),
    "in place": lambda x: x.clone().mul_(2).add_(x),
    "written rows": lambda x: torch.index_put(x, (torch.tensor([2, 30]),), torch.zeros((), dtype=x.dtype)),
    "written slice": lambda x: _write(x),
    "view": lambda x: x.view(3, 20, 8) * 1,
    "views back": lambda x: x.view(5, 2, 6, 8).sum(2),
    "unfold": lambda x: x.unfold(0, 3, 2),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "new": lambda x: x.new_zeros(x.shape) + torch.ones_like(x) + x.new_ones(60, 1),
    "batch norm": lambda x: functional.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: functional.layer_norm(x, (8,)),
    "glu": lambda x: functional.glu(x),
    "mse": lambda x: functional.mse_loss(x, x * 2),
    "conv": lambda x: functional.conv1d(x[:, None], torch.ones(1, 1, 3, dtype=x.dtype)),
    "attention": lambda x: functional.scaled_dot_product_attention(
        x[:, None, None], x[:, None, None], x[:, None, None]
    ),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1) + x.unsqueeze(0).squeeze(),
    "permuted": lambda x: x.view(5, 12, 8).transpose(1, 2).reshape(40, 12),
    "std": lambda x: x.std(0) + x.var(),
    "norm": lambda x: x.norm() + x.norm(dim=0),
    "any": lambda x: (x > 2).any(1).sum() + x.count_nonzero(),
    "item": lambda x: x * x.sum().item(),
    "bernoulli": lambda x: x * torch.bernoulli(x.sigmoid()),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 2),
    "dropout": lambda x: functional.dropout(x, 0.4),
    "rand": lambda x: x + torch.rand_like(x),
    "normal": lambda x: x.clone().normal_() + x,
    "flip of view": lambda x: x.flip(1).view(-1),
    "double": lambda x: x.double().float().double(),
    "foreach": lambda x: torch._foreach_mul([x, x * 2], 3.0)[1],
    "stack": lambda x: torch.stack([x, x * 2]).sum(0),
    "split": lambda x: torch.cat(x.split([3, 5], 1)[::-1], 1),
    "unbind": lambda x: x.unbind(1)[3] * x[:, 0],
    "pad": lambda x: functional.pad(x, (1, 1)),
    "roll": lambda x: x.roll(1, 0),
    "tril": lambda x: x.tril(),
    "cdist": lambda x: torch.cdist(x, x * 2),
    "addmm": lambda x: torch.addmm(x.sum(0), x, x.t() @ x),
}


def _write(x):
    y = x * 1
    y[3:20] = 0
    y[40] += 1
    return y


@pytest.mark.parametrize("part", range(4))
@ranks(3, timeout=240)
def test_every_operator_is_that_of_one_device(part):
    mesh = init_device_mesh("cpu", (3,))
    for name, function in list(FUNCTIONS.items())[part::4]:
        for rows in (5, 2):
            whole = values(rows, 60 // rows, 8).requires_grad_()
            cut = distribute_tensor(whole.detach(), mesh, [Shard(0)]).requires_grad_()
            results = []
            for x in (whole, cut):
                torch.manual_seed(2)
                with implicit_replication():
                    y = function(x.view(60, 8))
                    if y.requires_grad:
                        y.square().sum().backward()
                results.append((gather_full(y.detach()), x.grad, torch.get_rng_state()))
            (y, grad, state), (actual, actual_grad, actual_state) = results
            text = f"{name}, {rows} rows"
            torch.testing.assert_close(actual, y, rtol=1e-12, atol=1e-12, msg=lambda t, n=text: f"{n}: {t}")
            assert torch.equal(state, actual_state), text
            assert (grad is None) == (actual_grad is None), text
            if grad is not None:
                actual_grad = gather_full(actual_grad)
                torch.testing.assert_close(actual_grad, grad, rtol=1e-12, atol=1e-12, msg=lambda t, n=text: f"{n}: {t}")


@ranks(3)
def test_a_view_is_a_view():
    mesh = init_device_mesh("cpu", (3,))
    x = distribute_tensor(values(5, 12, 8), mesh, [Shard(0)])
    x.view(60, 8)[:, 3].zero_()
    x.view(60, 8).mul_(2)
    expected = values(5, 12, 8) * 2
    expected[..., 3] = 0
    assert torch.equal(gather_full(x), expected)


@ranks(3)
def test_layouts():
    mesh = init_device_mesh("cpu", (3,))
    whole = values(60, 8)
    x = distribute_tensor(whole.view(5, 12, 8), mesh, [Shard(0)]).view(60, 8)
    assert x.placements == (B,)
    assert x.to_local().shape == ((24, 24, 12)[dist.get_rank()], 8)
    assert "BlockShard(dim=0, block=12)" in repr(x)
    with debug.comm_log() as log:
        for placements in ([Replicate()], [Shard(0)], [Shard(1)], [B]):
            assert torch.equal(x.redistribute(placements=placements).full_tensor(), whole)
            back = distribute_tensor(whole, mesh, placements).redistribute(placements=[B])
            assert torch.equal(back.to_local(), x.to_local())
    assert len(log)
    with pytest.raises(ValueError, match="BlockShard expects"):
        BlockShard(-1, 2)
    with pytest.raises(ValueError, match="whole blocks"):
        distribute_tensor(whole, mesh, [BlockShard(0, 7)])
