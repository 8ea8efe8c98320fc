"""DDP with ZeRO 0 to 3 inside of `exact` trains with the bits of one process, dropout and clipping included."""

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from vescale.dmodule import parallelize_module
from vescale.dtensor import DTensor, Replicate, Shard, UnsupportedOperator, exact, init_device_mesh
from vescale.optim import DDP, DistributedOptimizer
from vescale_testing import ranks

CLASSES, WIDTH, ROWS = 10, 16, 16
TENSOR_PLAN = {
    "parameter": {r"up\.(weight|bias)": {"tp": Shard(0)}, r"down\.weight": {"tp": Shard(1)}},
    "forward": {r"up\.input": [{"tp": Replicate()}], r"down\.output": [{"tp": Replicate()}]},
}


class Net(nn.Module):
    """Embedding, a residual block with dropout, statistics of the batch, and a loss over the targets that count."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.batch_norm = (
            nn.Embedding(CLASSES, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.BatchNorm1d(6),
        )
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        logits = F.linear(self.batch_norm(x), self.embedding.weight)  # tied
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


def build():
    torch.manual_seed(0)
    return Net()


def batches(steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randint(CLASSES, (ROWS, 7), generator=generator)
        yield batch[:, :-1], batch[:, 1:]


def inside(num_blocks):
    return contextlib.nullcontext() if num_blocks is None else exact(num_blocks=num_blocks)


def train_alone(steps=3, num_blocks=8):
    """Return losses, gradient norms, parameters and the optimizer's state of one process."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    with inside(num_blocks):
        for batch in batches(steps):
            loss = model(*batch)
            loss.backward()
            found += [loss, nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
            optimizer.step()
            optimizer.zero_grad()
    states = [state for entries in optimizer.state_dict()["state"].values() for state in entries.values()]
    return [tensor.detach() for tensor in (*found, *model.state_dict().values(), *states)]


def train(dp, tp=1, *, steps=3, num_blocks=8, is_planned=False, mode="eager", **settings):
    """Return the same with rows over `dp`."""
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    module = build()
    if is_planned or tp > 1:
        parallelize_module(module, mesh["tp"], TENSOR_PLAN if tp > 1 else {}, mode=mode)
    model = DDP(module, mesh["dp"], bucket_bytes=4096, **settings)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=0.5)
    found, rank = [], mesh.get_local_rank("dp")
    with inside(num_blocks):
        for batch in batches(steps):
            loss = model(*(part.chunk(dp)[rank] for part in batch))
            loss.backward()
            optimizer.step()
            found += [loss, optimizer.grad_norm]
            optimizer.zero_grad()
        states = [state for entries in optimizer.full_state_dict()["state"].values() for state in entries.values()]
        with model.unsharded() if settings.get("zero") == 3 else contextlib.nullcontext():
            parameters = [full(tensor).clone() for tensor in model.state_dict().values()]
    return [tensor.detach() for tensor in (*found, *parameters, *states)]


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def num_equal(actual, expected):
    assert len(actual) == len(expected)
    return sum(map(torch.equal, actual, expected))


CASES = [
    {"dp": 2, "zero": 0},
    {"dp": 2, "zero": 1, "is_planned": True},
    {"dp": 2, "zero": 2, "reduction": "ordered"},
    {"dp": 2, "zero": 3, "is_planned": True, "mode": "static"},
    {"dp": 2, "tp": 2, "zero": 1},
]
MORE = [
    {"dp": dp, "zero": zero, "is_planned": is_planned} for dp in (4, 8) for zero in range(4) for is_planned in (0, 1)
]


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param({**case, "steps": 10}, marks=pytest.mark.thorough) for case in MORE)], ids=str
)
def test_bits_are_those_of_one_process(case):
    @ranks(case["dp"] * case.get("tp", 1), timeout=600)
    def on_every_rank():
        expected = train_alone(steps=case.get("steps", 3))
        assert num_equal(train(**case), expected) == len(expected)

    on_every_rank()


@ranks(2)
def test_hybrid_sharding():
    expected = train_alone()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = DDP(build(), mesh, zero=2)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model=model, lr=0.01, clip_grad_norm=0.5)
    with exact():
        for batch in batches(3):
            model(*(part.chunk(2)[mesh.get_local_rank(0)] for part in batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
        actual = [tensor.clone() for tensor in model.state_dict().values()]
    assert num_equal(actual, expected[6 : 6 + len(actual)]) == len(actual)


@ranks(2)
def test_without_the_context_and_with_another_number_of_blocks_bits_differ():
    outside = train_alone(num_blocks=None)
    assert num_equal(train(2, num_blocks=None), outside) < len(outside) / 2
    expected = train_alone()
    assert num_equal(train(2, num_blocks=4), expected) < len(expected) / 2
    assert num_equal(outside, expected) < len(expected) / 2


@ranks(2)
def test_accumulated_gradients_are_those_of_one_process():
    """Two backwards, of which the first does not reduce: each is a program of its own."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    alone, model = build(), DDP(build(), mesh, zero=0)
    with exact():
        for batch, context in zip(batches(2), (model.no_sync(), contextlib.nullcontext()), strict=True):
            state = torch.get_rng_state()
            alone(*batch).backward()
            torch.set_rng_state(state)
            with context:
                model(*(part.chunk(2)[mesh.get_local_rank()] for part in batch)).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


class Rows(nn.Module):
    """Returns rows; the loss is outside."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("is_planned", [False, True])
def test_a_loss_of_this_rank_s_rows_is_refused(is_planned):
    @ranks(2)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        module = parallelize_module(Rows(), mesh["tp"], {}) if is_planned else Rows()
        model = DDP(module, mesh["dp"])
        with exact():
            rows = model(torch.ones(2, 4))
            assert rows.shape == (2, 4)
            with pytest.raises(
                UnsupportedOperator, match=r"a gradient for this rank's rows, of shape .*in the module's"
            ):
                rows.sum().backward()

    on_every_rank()


@ranks(2)
def test_settings_without_exact_form_are_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    ddp = functools.partial(DDP, mesh_axis=mesh)
    for model, text in (
        (ddp(Net(), per_rank=True), "leave per_rank out"),
        (ddp(Net(), reduce_dtype=torch.float64), "leave reduce_dtype out"),
        (ddp(Net(), zero=3, offload=True), "leave offload out"),
    ):
        with (
            exact(),
            pytest.raises(UnsupportedOperator, match=rf"DDP of Net inside of vescale\.dtensor\.exact.*{text}"),
        ):
            model(*next(batches(1)))


@ranks(2)
def test_a_backward_outside_of_the_context_is_refused():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = DDP(Net(), mesh)
    with exact():
        loss = model(*next(batches(1)))
    with pytest.raises(UnsupportedOperator, match="num_blocks=8 in forward and None in backward"):
        loss.backward()
