"""A batch in micro-batches, on stages and on data-parallel ranks, is that of one device, or it is refused."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import vescale
from vescale.dmodule import parallelize_module
from vescale.dtensor import Replicate, Shard, distribute_tensor, init_device_mesh
from vescale.optim import DDP
from vescale.pipe import PipelineEngine, PipelineError, PipelinePlan
from vescale_testing import ranks

ROWS, WIDTH, LEARNED = 24, 4, 2


class Stack(nn.Module):
    """Two layers and a loss of both their values."""

    def __init__(self, loss):
        super().__init__()
        self.layers, self.loss = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LEARNED)), loss

    def forward(self, x, target=None):
        for layer in self.layers:
            x = layer(x).tanh()
        return self.loss(x, target)


EQUAL = {
    "mean": lambda x, _: x.square().mean(),
    "sum": lambda x, _: x.square().sum(),
    "cross entropy": lambda x, target: F.cross_entropy(x, target),
    "sum over a given number": lambda x, target: F.cross_entropy(x, target, reduction="sum") / ROWS,
    "sum over the number of rows": lambda x, target: F.cross_entropy(x, target, reduction="sum") / len(x),
}
REFUSED = {
    "contrast": (lambda x, _: F.cross_entropy(x @ x.t(), torch.arange(len(x))), "matmul in the root module"),
    "statistics": (lambda x, _: (x - x.mean(0)).square().mean(), "sub in the root module"),
    "router": (lambda x, _: (x.softmax(-1).mean(0) * x.sigmoid().mean(0)).sum(), "mul in the root module"),
    "masked mean": (lambda x, t: (x.sum(-1) * (t > 0)).sum() / (t > 0).sum(), "div in the root module"),
    "mean times rows": (lambda x, _: x.square().mean() * len(x), "neither a mean nor a sum"),
}
UNEVEN = [(1, 1, 5), (1, 2, 7), (2, 2, 5)]  # micro-batches of two sizes
LAYOUTS = [(1, 2, 2), (1, 1, 4), (2, 2, 1), (2, 2, 3), (4, 1, 2)]  # dp, pp, micro-batches


def build(loss):
    torch.manual_seed(0)
    model = Stack(loss).double()
    return model, copy.deepcopy(model), torch.randn(ROWS, WIDTH).double(), torch.randint(0, WIDTH, (ROWS,))


def engine_of(model, dp, pp, num_microbatches, **options):
    mesh = init_device_mesh("cpu", (dp, pp), mesh_dim_names=("dp", "pp"))
    engine = PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=num_microbatches), **options)
    if dp > 1:
        DDP(model, mesh["dp"], per_rank=options.get("per_microbatch", False))
    rows = ROWS // dp
    return engine, slice(mesh["dp"].get_local_rank() * rows, (mesh["dp"].get_local_rank() + 1) * rows), mesh["dp"]


def check_equal(name, dp, pp, num_microbatches):
    reference, model, x, target = build(EQUAL[name])
    engine, rows, axis = engine_of(model, dp, pp, num_microbatches)
    expected = reference(x, target)
    expected.backward()
    for _ in range(2):  # the first step is rehearsed
        model.zero_grad()
        loss = engine(x[rows], target[rows])
        loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=axis.get_group())
    torch.testing.assert_close(total / dp, expected.detach(), rtol=1e-12, atol=1e-12)
    gradients = {n: p.grad for n, p in reference.named_parameters()}
    for n, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[n], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", [*LAYOUTS, *UNEVEN], ids=str)
def test_means_and_sums_are_those_of_one_device(layout):
    @ranks(layout[0] * layout[1])
    def check():
        for name in EQUAL:
            check_equal(name, *layout)

    check()


def check_refused(name, *layout):
    loss, text = REFUSED[name]
    reference, model, x, target = build(loss)
    engine, rows, _ = engine_of(model, *layout)
    with pytest.raises(PipelineError, match=r"treats every row alone, since .* are parts of one batch") as refused:
        engine(x[rows], target[rows])
    assert text in str(refused.value)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    # allowed by name, it is another loss
    reference, model, x, target = build(loss)
    engine, rows, _ = engine_of(model, *layout, per_microbatch=True)
    assert not torch.allclose(engine(x[rows], target[rows]), reference(x, target), rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_mixes_rows_is_refused_on_every_rank(layout):
    @ranks(layout[0] * layout[1])
    def check():
        for name in REFUSED:
            check_refused(name, *layout)

    check()


@ranks(4)
def test_targets_are_counted_in_every_step():
    _, model, x, target = build(EQUAL["cross entropy"])
    engine, rows, axis = engine_of(model, 2, 2, 2)
    engine(x[rows], target[rows])
    target[[1, 7, 13, 19]] = -100  # one in every micro-batch
    reference, _, _, _ = build(EQUAL["cross entropy"])
    loss = engine(x[rows], target[rows]).detach()
    dist.all_reduce(loss, group=axis.get_group())
    torch.testing.assert_close(loss / 2, reference(x, target).detach())
    target[:1] = -100
    with pytest.raises(PipelineError, match="expected equally many counted targets per row in all micro-batches"):
        engine(x[rows], target[rows])


@ranks(2)
def test_a_loss_that_depends_on_the_number_of_rows_is_refused():
    _, model, x, target = build(lambda x, _: x.square().mean() if len(x) % 5 == 0 else x.square().sum())
    engine, _, _ = engine_of(model, 1, 2, 2)
    text = "got a mean over rows in the first one and a sum over rows in one with fewer rows; use a multiple"
    with pytest.raises(PipelineError, match=text):
        engine(x[:9], target[:9])
    engine(x[:10], target[:10])


@ranks(2)
def test_a_loss_function_mixes_rows():
    _, model, x, _ = build(lambda x, _: x)
    engine, _, _ = engine_of(model, 1, 2, 2, loss_fn=lambda x: F.cross_entropy(x @ x.t(), torch.arange(len(x))))
    with pytest.raises(PipelineError, match="got matmul in the root module"):
        engine(x)


@ranks(4)
def test_a_plan_and_stages():
    for loss, refused in ((EQUAL["mean"], False), (EQUAL["cross entropy"], False), (REFUSED["statistics"][0], True)):
        reference, model, x, target = build(loss)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        engine = PipelineEngine(model, mesh["pp"], PipelinePlan(num_microbatches=2), meshes=[mesh["tp"]])
        plan = {"parameter": {r"layers\.\d\.weight": [Shard(0)]}, "forward": {r"layers\.\d\.output": [Replicate()]}}
        parallelize_module(model, mesh["tp"], plan)
        if refused:
            with pytest.raises(PipelineError, match="got sub in the root module"):
                engine(x, target)
        else:
            torch.testing.assert_close(engine(x, target), reference(x, target), rtol=1e-12, atol=1e-12)


@ranks(1)
def test_the_loss_of_a_router_in_micro_batches():
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    batch = {"input_ids": torch.randint(0, 32, (4, 6))}
    batch["labels"] = batch["input_ids"]
    losses = []
    for plan, uses_router in ((vescale.Plan(), False), (vescale.Plan(num_microbatches=2), False), (None, True)):
        torch.manual_seed(0)
        config.output_router_logits = uses_router
        plan = plan or vescale.Plan(num_microbatches=2)
        model, _ = vescale.parallelize(plan, MixtralForCausalLM(config), torch.optim.SGD)
        if uses_router:
            with pytest.raises(PipelineError, match="got mul in the root module"):
                model(**batch)
        else:
            losses.append(model(**batch).loss.item())  # whose experts select rows, and are known
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@ranks(1)
def test_modules_that_do_not_exist_are_refused():
    with pytest.raises(
        ValueError, match=r"row_wise: expected names of modules of Stack, .* got 'expert', which matches no"
    ):
        engine_of(build(EQUAL["mean"])[1], 1, 1, 2, row_wise=["expert"])


@ranks(4)
def test_dtensors_without_a_plan_are_refused():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    for num_microbatches in (1, 2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for layer in model:
            for name, param in layer.named_parameters():
                setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [Replicate()])))
        plan = PipelinePlan(num_microbatches=num_microbatches)
        engine = PipelineEngine(model, mesh["pp"], plan, loss_fn=lambda out: out.mean(), meshes=(mesh["tp"],))
        x = distribute_tensor(torch.ones(8, 4), mesh["tp"], [Replicate()])
        if num_microbatches == 1:
            engine(x)
        else:
            with pytest.raises(PipelineError, match=r"whose 2 micro-batches can be.*got Sequential, which has"):
                engine(x)
