"""The finder names the seeded fault, in many kinds of faults, on two layouts, bit for bit and within rounding."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import vescale
from vescale.dmodule import parallelize_module
from vescale.dtensor import DTensor, Replicate, Shard, exact, init_device_mesh
from vescale_testing import run_ranks

SEQ, WIDTH, HEADS, ROWS = 6, 8, 2, 8

MODULE_PLAN = {
    "parameter": {
        r"layers\.\d+\.attention\.(q|k|v)\.(weight|bias)": {"tp": Shard(0)},
        r"layers\.\d+\.attention\.o\.weight": {"tp": Shard(1)},
        r"layers\.\d+\.up\.(weight|bias)": {"tp": Shard(0)},
        r"layers\.\d+\.down\.weight": {"tp": Shard(1)},
    },
    "forward": {
        r"layers\.\d+\.attention\.input": [{"tp": Replicate()}],
        r"layers\.\d+\.attention\.o\.output": [{"tp": Replicate()}],
        r"layers\.\d+\.up\.input": [{"tp": Replicate()}],
        r"layers\.\d+\.down\.output": [{"tp": Replicate()}],
    },
}
ROWS_PLAN = {"forward": {"input": [{"dp": Shard(0)}], "output": [{"dp": Shard(0)}]}}

# the fault, and kind and name of what differs first
ATTENTION = ("input", "layers.1.attention.o")
FAULTS = {
    "doubled scale": ATTENTION,
    "dropped mask": ATTENTION,
    "rotary position off by one": ATTENTION,
    "query and key swapped": ATTENTION,
    "swapped experts": ("output", "layers.1.mixture"),
    "another eps": ("output", "layers.1.norm"),
    "another dropout rate": ("output", "layers.1.dropout"),
    "missing residual": ("input", "layers.1.mixture"),
    "detached": ("output gradient", "layers.1.dropout"),
    "half precision": ("input", "layers.1.down"),
    "doubled gradient": ("output gradient", "layers.1.up"),
    "another activation": ("input", "layers.1.down"),
    "layer called twice": ("input", "layers.1"),
    "other seed": ("initial parameter", "layers.0.attention.q.weight"),
    "other random stream": ("output", "layers.0.dropout"),
    "rows in another order": ("input", ""),
    "doubled loss": ("output gradient", "head"),
    "another learning rate": ("parameter", "layers.0.attention.q.weight"),
    "no weight decay": ("parameter", "layers.0.attention.q.weight"),
    "another beta": ("parameter", "layers.0.attention.q.weight"),
    "stale parameter": ("parameter", "layers.1.norm.weight"),
    "gradient summed twice": ("gradient", "layers.1.norm.weight"),
    "shards on wrong ranks": ("initial parameter", "layers.1.up.weight"),
    "missing reduction": ("output", "layers.1.down"),
    "rows of another rank": ("input", ""),
    "missing reduction of a gradient": ("gradient", "layers.1.norm.weight"),
}
ONLY = {
    "shards on wrong ranks": "tp",
    "missing reduction": "tp",
    "rows of another rank": "dp",
    "missing reduction of a gradient": "dp",
}


class Doubled(torch.autograd.Function):
    """The identity, with twice the gradient."""

    @staticmethod
    def forward(_ctx, x):
        return x.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return 2 * gradient


class Attention(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        angles = torch.arange(SEQ)[:, None] / 10.0 ** torch.arange(WIDTH // HEADS // 2)
        self.register_buffer("angles", angles.double(), persistent=False)

    def rotate(self, x, shift=0):
        cos, sin = (self.angles + shift).cos(), (self.angles + shift).sin()
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.fault == "query and key swapped":
            q, k = k, q
        q, k = self.rotate(q), self.rotate(k, int(self.fault == "rotary position off by one"))
        scores = q @ k.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5
        if self.fault == "doubled scale":
            scores = 2 * scores
        if self.fault != "dropped mask":
            scores = scores + torch.full((SEQ, SEQ), -1e9, dtype=x.dtype).triu(1)
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    """Two experts, each with the weight that a router gives to it."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        outputs = [expert(x) for expert in self.experts]
        if self.fault == "swapped experts":
            outputs.reverse()
        weights = self.router(x).softmax(-1)
        return weights[..., :1] * outputs[0] + weights[..., 1:] * outputs[1]


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.attention, self.mixture = Attention(fault), Mixture(fault)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-4 if fault == "another eps" else 1e-5)
        self.dropout = nn.Dropout(0.2 if fault == "another dropout rate" else 0.1)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        attended = self.dropout(self.attention(self.norm(x)))
        x = attended if self.fault == "missing residual" else x + attended
        x = x + self.mixture(x.detach() if self.fault == "detached" else x)
        up = self.up(x)
        if self.fault == "half precision":
            up = up.bfloat16().to(x.dtype)
        if self.fault == "doubled gradient":
            up = Doubled.apply(up)
        hidden = nn.functional.gelu(up, approximate="tanh" if self.fault == "another activation" else "none")
        return x + self.down(hidden)


class Net(nn.Module):
    """Two blocks, of which the second has the fault, and a head."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.layers = nn.ModuleList([Block(""), Block(fault)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.layers[1](x) if self.fault == "layer called twice" else x)


def build(fault=""):
    torch.manual_seed(1 if fault == "other seed" else 0)
    model = Net(fault).double()
    torch.manual_seed(6 if fault == "other random stream" else 5)
    return model


LATE = {"", "another learning rate", "another beta", "stale parameter", "gradient summed twice"}
LATE |= {"missing reduction of a gradient"}


def batches(fault):
    generator = torch.Generator().manual_seed(1)
    for _ in range(2 if fault in LATE else 1):
        x = torch.randn(ROWS, SEQ, WIDTH, generator=generator, dtype=torch.float64)
        yield {"x": x.flip(0) if fault == "rows in another order" else x, "target": x[..., :2].sin()}


def optimizer_of(fault):
    beta = 0.98 if fault == "another beta" else 0.999
    decay = 0.0 if fault == "no weight decay" else 0.1
    return functools.partial(torch.optim.AdamW, lr=0.02, betas=(0.9, beta), weight_decay=decay)


def seed_state(model, fault):
    """Seed faults in what ranks hold of the model."""
    up = model.get_parameter("layers.1.up.weight")
    if fault == "shards on wrong ranks":
        shards = up.detach().full_tensor().chunk(2)
        up.to_local().data.copy_(shards[1 - up.device_mesh.get_local_rank()])
    if fault == "missing reduction":
        down = model.get_submodule("layers.1.down")

        def forward(x):
            local = x.to_local() @ down.weight.to_local().T  # a part of the sum
            return DTensor.from_local(local, x.device_mesh, [Replicate()], run_check=False) + down.bias

        down.forward = forward


def seed_gradient(model, fault):
    gradient = model.get_parameter("layers.1.norm.weight").grad
    if fault == "gradient summed twice":
        gradient.mul_(2)
    if fault == "missing reduction of a gradient":
        gradient.mul_(1 + dist.get_rank())


def train(model, optimizer, forward, fault, record):
    """Train two steps, or one if the fault is in it."""
    scale = model.get_parameter("layers.1.norm.weight")
    kept = []
    if fault == "stale parameter":
        optimizer.register_step_pre_hook(lambda *_: kept.append(scale.detach().clone()))
        optimizer.register_step_post_hook(lambda *_: scale.data.copy_(kept[-1]) if len(kept) > 1 else None)
    with record(model, optimizer):
        for step, batch in enumerate(batches(fault)):
            loss = forward(batch)
            (2 * loss if fault == "doubled loss" else loss).backward()
            if step:
                seed_gradient(model, fault)
            if fault == "another learning rate" and step:
                optimizer.param_groups[0]["lr"] *= 1.01
            optimizer.step()
            optimizer.zero_grad()


def plain(record, fault=""):
    model = build(fault)
    optimizer = optimizer_of(fault)(model.parameters())
    train(model, optimizer, lambda batch: nn.functional.mse_loss(model(batch["x"]), batch["target"]), fault, record)


def by_plan(record, layout, fault=""):
    model, optimizer = vescale.parallelize(
        vescale.Plan(**layout),
        build(fault),
        optimizer_of(fault),
        loss_fn=nn.functional.mse_loss,
        module_plan=MODULE_PLAN if layout.get("tp") else {},
    )
    seed_state(model.module, fault)

    def rows_of(batch):
        wrong = fault == "rows of another rank"
        return {name: value.roll(ROWS // 2, 0) if wrong and name == "x" else value for name, value in batch.items()}

    train(model, optimizer, lambda batch: model(**model.local_batch(rows_of(batch))).loss, fault, record)


def exactly(record, axis, fault=""):
    """Run in exact mode: in one process, or over an axis of DTensors."""
    model = build(fault)
    if axis is not None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
        parallelize_module(model, mesh, MODULE_PLAN if axis == "tp" else ROWS_PLAN, mode="eager")
        seed_state(model, fault)
    with exact(num_blocks=4):
        optimizer = optimizer_of(fault)(model.parameters())

        def forward(batch):
            wrong = fault == "rows of another rank"
            output = model(batch["x"].roll(ROWS // 2, 0) if wrong else batch["x"])
            return nn.functional.mse_loss(output, _like(batch["target"], output))

        train(model, optimizer, forward, fault, record)


def _like(target, output):
    if not isinstance(output, DTensor):
        return target
    return DTensor.from_local(target, output.device_mesh, [Replicate()], run_check=False).redistribute(
        placements=output.placements
    )


def find_all(first, second, faults, folder):
    """Return what is found without a fault and for each fault, beside a record of the first run."""
    first(functools.partial(vescale.record, folder))
    results = {}
    for fault in ["", *faults]:
        comparison = vescale.compare(folder, functools.partial(second, fault=fault))
        results[fault] = comparison.first, comparison.bits, comparison.compared, str(comparison)
    return results


def check(results):
    difference, _, compared, text = results.pop("")
    assert difference is None, text
    assert compared > 200
    for fault, (difference, _, _, text) in results.items():
        assert difference is not None, fault
        assert (difference.kind, difference.fqn) == FAULTS[fault], text
        assert "differs first" in text


def possible(axis, faults=FAULTS):
    return [fault for fault in faults if ONLY.get(fault, axis) == axis]


AXES = ("dp", "tp")
FEW = (
    "dropped mask",
    "swapped experts",
    "doubled gradient",
    "stale parameter",
    "rows of another rank",
    "missing reduction",
)


@pytest.mark.parametrize("axis", ["tp", pytest.param("dp", marks=pytest.mark.thorough)])
def test_faults_are_found_within_rounding(axis, tmp_path):
    second = functools.partial(by_plan, layout={axis: 2})
    results = run_ranks(functools.partial(find_all, plain, second, possible(axis), tmp_path), 2, timeout=200)[0]
    assert len(results) > 20
    check(results)


def check_bits(axis, faults, folder):
    first, second = functools.partial(exactly, axis=None), functools.partial(exactly, axis=axis)
    results = run_ranks(functools.partial(find_all, first, second, possible(axis, faults), folder), 2, timeout=300)[0]
    assert all(bits for _, bits, _, _ in results.values())
    check(results)


@pytest.mark.parametrize("axis", ["dp", pytest.param("tp", marks=pytest.mark.thorough)])
def test_faults_are_found_bit_for_bit(axis, tmp_path):
    check_bits(axis, FEW, tmp_path)


@pytest.mark.thorough
@pytest.mark.parametrize("axis", AXES)
def test_all_faults_are_found_bit_for_bit(axis, tmp_path):
    in_ddp = ("missing reduction of a gradient",)  # sums of gradients are operators of DTensors here
    check_bits(axis, [fault for fault in FAULTS if fault not in in_ddp], tmp_path)
