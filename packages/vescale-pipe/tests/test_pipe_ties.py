"""A weight that several stages use trains as in one process, and one rank owns it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan, split_units
from vescale.pipe._run.ties import TiedWeights
from vescale_testing import halved, ranks

WORDS, WIDTH, LENGTH, ROWS = 11, 6, 5, 8
MICROBATCHES = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class Tied(nn.Module):
    """A language model whose head has the embedding's weight."""

    def __init__(self, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


class Everywhere(Tied):
    """Every block has one linear layer's weight, too, and a bias that only two blocks share."""

    def __init__(self, blocks=4):
        super().__init__(blocks)
        for block in self.blocks[1:]:
            block.linear.weight = self.blocks[0].linear.weight
        self.blocks[-1].linear.bias = self.blocks[0].linear.bias


class Frozen(Tied):
    """The tied weight gets no gradient."""

    def __init__(self, blocks=4):
        super().__init__(blocks)
        self.embed.weight.requires_grad_(False)


class Unused(Tied):
    """The owner's stage does not use the weight."""

    def forward(self, tokens):
        x = nn.functional.one_hot(tokens, WIDTH + WORDS)[..., :WIDTH].double()
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


KINDS = [Tied, Everywhere, Frozen, Unused]


def build(kind, **options):
    torch.manual_seed(1)
    model = kind(**options).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    return model


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def train(step, optimizer, steps=3):
    losses = []
    for number in range(steps):
        torch.manual_seed(100 + number)
        losses.append(step(torch.randint(0, WORDS, (ROWS, LENGTH))))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses)


def in_one_process(model):
    def step(tokens):
        parts = []
        for rows in tokens.chunk(MICROBATCHES):
            loss = model(rows) / MICROBATCHES
            loss.backward()
            parts.append(loss.detach())
        return sum(parts)

    return step


def in_a_pipeline(engine):
    def step(tokens):
        loss = engine(tokens)
        loss.backward()
        return loss.detach()

    return step


def engine_for(model, mesh, schedule="1f1b", **options):
    return PipelineEngine(model, mesh, PipelinePlan(schedule, MICROBATCHES, **options))


def difference(model, one):
    """Return the largest difference of this rank's trained parameters."""
    expected = dict(one.named_parameters(remove_duplicate=False))
    return max(float((p - expected[name]).abs().max()) for name, p in model.named_parameters() if p.requires_grad)


@halved
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule, stages", [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_v", 2), ("zb_h1", 1)])
@ranks(2)
def test_training_is_that_of_one_process(kind, schedule, stages, pipeline_mesh):
    one, model = build(kind), build(kind)
    expected = train(in_one_process(one), optimizer_of(one))
    engine = engine_for(model, pipeline_mesh(), schedule, stages_per_rank=stages)
    losses = train(in_a_pipeline(engine), optimizer_of(model))
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    assert difference(model, one) < 1e-10


@ranks(3)
def test_three_ranks_share_a_weight(pipeline_mesh):
    one, model = build(Everywhere, blocks=6), build(Everywhere, blocks=6)
    expected = train(in_one_process(one), optimizer_of(one))
    losses = train(in_a_pipeline(engine_for(model, pipeline_mesh())), optimizer_of(model))
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    assert difference(model, one) < 1e-10


@ranks(1)
def test_stages_of_one_rank_share_a_weight(pipeline_mesh):
    one, model = build(Everywhere), build(Everywhere)
    expected = train(in_one_process(one), optimizer_of(one))
    engine = engine_for(model, pipeline_mesh(), "interleaved_1f1b", stages_per_rank=2)
    assert engine.num_stages == 2
    losses = train(in_a_pipeline(engine), optimizer_of(model))
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    assert difference(model, one) < 1e-10


@ranks(2)
def test_gradients_may_have_another_dtype(pipeline_mesh):
    """The owner asks for gradients of more bits than the weight has."""
    model = build(Tied).bfloat16()
    engine = engine_for(model, pipeline_mesh())
    is_owner = dist.get_rank() == 0
    if is_owner:
        model.embed.weight.grad_dtype = torch.float32
    engine(torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS).backward()
    one = build(Tied).bfloat16()
    in_one_process(one)(torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS)
    if is_owner:
        assert model.embed.weight.grad.dtype == torch.float32
        torch.testing.assert_close(model.embed.weight.grad, one.embed.weight.grad.float(), rtol=0.1, atol=1e-3)


@ranks(2)
def test_a_copy_that_no_step_brings_up_to_date_is_another_model(pipeline_mesh, monkeypatch):
    monkeypatch.setattr(TiedWeights, "lend", lambda *_: None)
    one, model = build(Tied), build(Tied)
    expected = train(in_one_process(one), optimizer_of(one))
    losses = train(in_a_pipeline(engine_for(model, pipeline_mesh())), optimizer_of(model))
    assert (losses - expected).abs().max() > 1e-6


@ranks(2)
def test_one_rank_owns_the_weight(pipeline_mesh):
    """The other's copy is no matter for optimizers, and gets the owner's values before it is used."""
    model = build(Tied)
    engine = engine_for(model, pipeline_mesh())
    assert "tied: embed.weight (stage 0) = head.weight (stage 1)" in str(engine.split)
    is_owner = dist.get_rank() == 0
    weight = model.embed.weight if is_owner else model.head.weight
    assert weight.requires_grad is is_owner
    with torch.no_grad():
        weight.fill_(0.25 if is_owner else torch.nan)
    engine(torch.zeros(ROWS, LENGTH, dtype=torch.int64)).backward()
    assert torch.equal(weight, torch.full_like(weight, 0.25))
    assert (weight.grad is not None) is is_owner
    assert weight.requires_grad is is_owner


@ranks(2)
def test_a_weight_may_be_frozen_between_steps(pipeline_mesh):
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    model = build(Tied)
    engine = engine_for(model, pipeline_mesh())
    engine(tokens).backward()
    if dist.get_rank() == 0:
        model.embed.weight.grad = None
        model.embed.weight.requires_grad_(False)
    engine(tokens).backward()
    weight = model.embed.weight if dist.get_rank() == 0 else model.head.weight
    assert weight.grad is None
    with torch.no_grad():
        assert not engine(tokens).requires_grad


@ranks(2)
def test_state_dicts_have_every_name_once(pipeline_mesh):
    """Those of all ranks are together that of one process; each loads into its own rank, and the whole one as well."""
    one, model = build(Tied), build(Tied)
    engine = engine_for(model, pipeline_mesh())
    train(in_a_pipeline(engine), optimizer_of(model))
    mine = {name: value.clone() for name, value in model.state_dict().items()}
    gathered = [None, None]
    dist.all_gather_object(gathered, mine)
    assert sorted([*gathered[0], *gathered[1]]) == sorted(one.state_dict())
    one.load_state_dict(gathered[0] | gathered[1])
    assert torch.equal(one.head.weight, gathered[0]["embed.weight"])

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(mine)
    tokens = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS
    torch.testing.assert_close(engine(tokens).detach(), one(tokens).detach(), rtol=0, atol=1e-12)
    found = nn.ModuleDict({"inner": model}).load_state_dict({f"inner.{name}": v for name, v in mine.items()})
    assert not found.missing_keys


@ranks(2)
def test_a_weight_may_be_sharded(pipeline_mesh):
    """Over a mesh axis of size one, as a tensor-parallel plan of degree one would."""
    one, model = build(Tied), build(Tied)
    mesh = pipeline_mesh()
    engine = PipelineEngine(model, mesh, PipelinePlan("1f1b", MICROBATCHES), per_microbatch=True)
    tp = dist.device_mesh.DeviceMesh("cpu", [dist.get_rank()], mesh_dim_names=("tp",))
    assert tp.size() == 1
    module = model.embed if dist.get_rank() == 0 else model.head
    frozen = not module.weight.requires_grad
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), tp, [Replicate()]), not frozen)
    module.register_forward_pre_hook(lambda _, args: (DTensor.from_local(args[0], tp, [Replicate()]),))
    module.register_forward_hook(lambda _, __, output: output.to_local())
    expected = train(in_one_process(one), optimizer_of(one))
    losses = train(in_a_pipeline(engine), optimizer_of(model))
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)


def hook_on_the_weight(model):
    if dist.get_rank() == 0:
        model.embed.weight.register_hook(lambda gradient: gradient)


def other_dtype(model):
    if dist.get_rank() == 1:
        model.head.weight = nn.Parameter(model.head.weight.float(), requires_grad=False)


def other_placement(model):
    if dist.get_rank() == 1:
        tp = dist.device_mesh.DeviceMesh("cpu", [1], mesh_dim_names=("tp",))
        weight = distribute_tensor(model.head.weight.detach(), tp, [Shard(0)])
        model.head.weight = nn.Parameter(weight, requires_grad=False)


@pytest.mark.parametrize(
    "change, text",
    [
        (hook_on_the_weight, r"stage 0: expected a weight to share, got hooks on the tensor"),
        (other_dtype, r"that are alike, got float64\[11, 6\] on stage 0 and float32\[11, 6\] on stage 1"),
        (other_placement, r"got float64\[11, 6\] on stage 0 and float64\[11, 6\] \(S\(0\) over tp\) on stage 1"),
    ],
)
@ranks(2)
def test_what_cannot_be_shared_is_refused_on_every_rank(change, text, pipeline_mesh):
    model = build(Tied)
    engine = engine_for(model, pipeline_mesh())
    change(model)
    with pytest.raises(PipelineError, match=r"embed.weight \(stage 0\) = head.weight \(stage 1\): .*" + text):
        engine(torch.zeros(ROWS, LENGTH, dtype=torch.int64))


class Sometimes(Tied):
    """The head is used for one kind of rows alone."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Last(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return (x @ self.weight.t()).square().mean() if x.sum() > 0 else x.square().mean()


@ranks(2)
def test_the_use_of_a_weight_depends_on_the_data(pipeline_mesh):
    model = build(Sometimes)
    model.last = Last(model.embed.weight)
    del model.head
    with torch.no_grad():
        model.embed.weight[0], model.embed.weight[1] = -1.0, 1.0
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", MICROBATCHES), per_microbatch=True)
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    tokens[ROWS // 2 :] = 1
    text = r"last.weight \(stage 1\): expected gradients from stages \[0\], .* got them from stages \[1\] of stage 1"
    with pytest.raises(RuntimeError, match=text):
        engine(tokens)


def test_a_split_lists_tied_weights():
    split = split_units(Everywhere(), PipelinePlan(), 2)
    assert [tie.home for tie in split.ties] == [0, 0, 0]
    assert list(map(str, split.ties)) == [
        "embed.weight (stage 0) = head.weight (stage 1)",
        "blocks.0.linear.weight (stage 0) = blocks.2.linear.weight (stage 1)",
        "blocks.0.linear.bias (stage 0) = blocks.3.linear.bias (stage 1)",
    ]
