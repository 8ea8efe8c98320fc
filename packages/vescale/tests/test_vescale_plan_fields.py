"""Field by field: `parallelize` carries out what a plan says, or refuses it with the reason.

A new field of `Plan` needs a row here, and so it is on the page docs/plan_fields.md, which is made of these rows.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import vescale
from vescale.dtensor import InterleavedShard, Replicate, Shard
from vescale.dtensor.extension import exact_num_blocks
from vescale.plan import Plan
from vescale_testing import ranks

MODULE_PLAN = {
    "parameter": {r"layers\.\d+\.(weight|bias)": {"tp": Shard(0)}},
    "forward": {r"layers\.\d+\.input": [{"tp": Replicate()}], r"layers\.\d+\.output": [{"tp": Replicate()}]},
}
SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


SEEN = []  # types of what a model computed with


class Net(nn.Module):
    """Four layers and a head."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        SEEN.append(type(x))
        return self.head(x)


@dataclass
class Run:
    """A model that has been parallelized, its optimizer, and what a step gave."""

    model: Any
    optimizer: Any
    dtypes: list[torch.dtype] = field(default_factory=list)

    def step(self) -> None:
        """Run forward and backward, and update."""
        self.forward().backward()
        self.optimizer.step()

    def forward(self) -> torch.Tensor:
        """Return the loss."""
        x = torch.arange(32.0).view(4, 8) / 32
        loss: torch.Tensor = self.model(**self.model.local_batch({"x": x, "target": x})).loss
        return loss


@dataclass(frozen=True)
class Row:
    """A field of `Plan`.

    Attributes:
        how: who carries it out, for the page.
        plan: fields with another value than the default.
        shows: returns whether it has been carried out; None for a value that is refused.
        ranks: processes.
        refused: the error of a value that is refused, and what of it matches; on the page, too.
        build: makes the model.
    """

    how: str
    plan: dict[str, Any]
    shows: Callable[[Run], Any] | None
    ranks: int = 1
    refused: tuple[type[Exception], str] | None = None
    build: Callable[[], nn.Module] = Net


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral():
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def axes(run):
    return dict(zip(run.model.mesh.mesh_dim_names, run.model.mesh.shape, strict=True))


def slots(run):
    return run.model.ddp.slots()


def parameter(run, name):
    return dict(run.model.named_parameters())[name]


def num_buckets(run):
    return len({id(slot.bucket) for slot in slots(run).values()})


def has_values(run, name):
    try:
        parameter(run, name).clone()
    except RuntimeError:
        return False
    return True


def state_of(run, name):
    run.step()
    entries = run.optimizer.state_dict()["state"]["head.weight"]
    return entries[name].tensor.dtype if name in entries else None


def forward_keeps(run):
    run.forward()
    return has_values(run, "layers.0.weight")


def results(run):
    run.forward()
    return set(run.dtypes)


TENSOR = "`vescale.dmodule.parallelize_module`"
DATA = "`vescale.optim.DDP`"
PIPELINE = "`vescale.pipe.PipelineEngine`"
OPTIMIZER = "`vescale.optim.DistributedOptimizer`"
TWO_STAGES = {"pp": 2, "num_microbatches": 2}

ROWS = {
    "dp": Row(f"the mesh, {DATA}", {"dp": 2}, lambda run: run.model.ddp.data_axes.all.size == 2, 2),
    "tp": Row(
        f"the mesh, {TENSOR}", {"tp": 2}, lambda run: parameter(run, "layers.0.weight").to_local().shape == (4, 8), 2
    ),
    "pp": Row(f"the mesh, {PIPELINE}", TWO_STAGES, lambda run: run.model.engine.num_stages == 2, 2),
    "ep": Row(
        f"the mesh, {TENSOR}: models with experts, and plans that name the axis `ep`",
        {"dp": 2, "ep": 2},
        lambda run: parameter(run, "model.layers.0.mlp.experts.down_proj").to_local().shape[0] == 2,
        2,
        build=mixtral,
    ),
    "etp": Row(
        f"{TENSOR}: models of a ready plan with experts",
        {"tp": 2, "etp": 2},
        lambda run: parameter(run, "model.layers.0.mlp.experts.gate_up_proj").placements == (InterleavedShard(1, 2),),
        2,
        build=mixtral,
    ),
    "cp": Row(
        "refused unless 1: context parallelism does not exist yet",
        {"cp": 2},
        None,
        refused=(ValueError, "expected cp=1, since context parallelism does not exist yet"),
    ),
    "zero": Row(DATA, {"dp": 2, "zero": 3}, lambda run: not has_values(run, "layers.0.weight"), 2),
    "dp_replicate": Row(
        f"the mesh, {DATA}",
        {"dp": 2, "dp_replicate": 2, "zero": 1},
        lambda run: (
            axes(run) == {"pp": 1, "dp_replicate": 2, "dp_shard": 1, "tp": 1}
            and run.model.ddp.data_axes.replicate.size == 2
        ),
        2,
    ),
    "sequence_parallel": Row(
        f"{TENSOR}: the ready or the derived plan of the model; a plan of your own says it itself",
        {"tp": 2, "sequence_parallel": True},
        lambda run: (
            vescale._module_plan._resolve_module_plan(run.model.plan, llama(), None, None)["forward"][
                r"model\.layers\.0\.input"
            ]
            == [{"tp": Shard(1)}]
        ),
        2,
        build=llama,
    ),
    "schedule": Row(
        PIPELINE, {**TWO_STAGES, "schedule": "gpipe"}, lambda run: "gpipe" in str(run.model.engine.plan), 2
    ),
    "num_microbatches": Row(
        f"{PIPELINE}, with one stage, too",
        {"num_microbatches": 2},
        lambda run: (
            run.forward() is not None and run.model.engine is not None and run.model.engine.losses.shape == (2,)
        ),
    ),
    "stages_per_rank": Row(
        PIPELINE,
        {**TWO_STAGES, "schedule": "looped_bfs", "stages_per_rank": 1},
        lambda run: run.model.engine.num_stages == 2,
        2,
    ),
    "split": Row(
        PIPELINE,
        {**TWO_STAGES, "split": ["layers.3"]},
        lambda run: run.model.engine.split.stages[1][0] == "layers.3",
        2,
    ),
    "module_plan": Row(
        f"{TENSOR}: a ready plan by its name",
        {"module_plan": "llama"},
        lambda run: vescale._module_plan._resolve_module_plan(run.model.plan, llama(), None, None) != {},
        build=llama,
    ),
    "mode": Row(
        TENSOR,
        {"tp": 2, "mode": "static"},
        lambda run: run.forward() is not None and run.forward() is not None and SEEN[-1] is torch.Tensor,
        2,
    ),
    "recompute": Row(
        "`torch.utils.checkpoint` around calls of modules",
        {"recompute": 2},
        lambda run: run.model.recomputed == ("layers.1", "layers.3"),
    ),
    "reduction": Row(DATA, {"dp": 2, "reduction": "ordered"}, lambda run: run.model.ddp.reduction == "ordered", 2),
    "param_dtype": Row(
        DATA, {"param_dtype": "bfloat16"}, lambda run: {p.dtype for p in run.model.parameters()} == {torch.bfloat16}
    ),
    "grad_dtype": Row(
        DATA,
        {"grad_dtype": "float64"},
        lambda run: run.forward().backward() is None and parameter(run, "head.weight").grad.dtype == torch.float64,
    ),
    "reduce_dtype": Row(
        DATA,
        {"dp": 2, "reduce_dtype": "float64"},
        lambda run: slots(run)["head.weight"].bucket.wire_dtype == torch.float64,
        2,
    ),
    "master_dtype": Row(
        OPTIMIZER, {"master_dtype": "float64"}, lambda run: state_of(run, "master_weight") == torch.float64
    ),
    "state_dtype": Row(OPTIMIZER, {"state_dtype": "bfloat16"}, lambda run: state_of(run, "exp_avg") == torch.bfloat16),
    "autocast": Row(
        f"`torch.autocast` around forward, in stages and in recomputations, too; {PIPELINE}",
        {"autocast": "bfloat16"},
        lambda run: results(run) == {torch.bfloat16},
    ),
    "clip_grad_norm": Row(OPTIMIZER, {"clip_grad_norm": 0.5}, lambda run: run.optimizer.clip_grad_norm == 0.5),
    "bucket_bytes": Row(DATA, {"bucket_bytes": 1}, lambda run: num_buckets(run) == 10),
    "units": Row(
        DATA,
        {"zero": 3, "units": ["head"]},
        lambda run: num_buckets(run) == 2,
    ),
    "granularity": Row(
        DATA,
        {"dp": 2, "zero": 1, "granularity": {r".*": "tensor"}},
        lambda run: (
            {
                slot.part in ((0, 0), (0, slot.param.numel())) or slot.part[0] == slot.part[1]
                for slot in slots(run).values()
            }
            == {True}
        ),
        2,
    ),
    "reshard_after_forward": Row(DATA, {"dp": 2, "zero": 3, "reshard_after_forward": False}, forward_keeps, 2),
    "offload": Row(DATA, {"zero": 3, "offload": True}, lambda run: not has_values(run, "layers.0.weight")),
    "random_stream": Row(
        "`vescale.dtensor.random`, for the process, from the return of `parallelize` on",
        {"random_stream": "philox"},
        lambda _run: vescale.dtensor.random.current_stream() == "philox",
    ),
    "exact": Row(
        "`vescale.dtensor.set_exact`, for the process, from the return of `parallelize` on; refused with `offload`, "
        "`reduce_dtype`, Muon, and with `dp` for a `loss_fn` or `per_rank`",
        {"exact": 8},
        lambda _run: exact_num_blocks() == 8,
    ),
    "device": Row(
        "model, mesh and process group; `cuda` is refused without a GPU",
        {"device": "cuda"},
        None,
        refused=(RuntimeError, r"expected a GPU for device 'cuda'"),
    ),
    "axis_order": Row(
        "the mesh",
        {"dp": 2, "axis_order": ("dp", "tp", "pp")},
        lambda run: list(axes(run)) == ["dp", "tp", "pp"],
        2,
    ),
}
#: Fields that describe a plan of `generate_plan`: nothing is there to carry out.
DESCRIPTIONS = {
    "memory": "estimates of `generate_plan`, printed with the plan",
    "limit_bytes": "the memory limit of `generate_plan`, printed with the plan",
    "table": "the layouts that `generate_plan` compared, printed by `explain`",
}


def make(row, fields):
    torch.manual_seed(0)
    dtypes: list[torch.dtype] = []

    def loss_fn(output, target):
        dtypes.append(output.dtype)
        return nn.functional.mse_loss(output.float(), target)

    plan = Plan(**fields)
    options = {"loss_fn": loss_fn, "module_plan": MODULE_PLAN if plan.tp > 1 else {}} if row.build is Net else {}
    model, optimizer = vescale.parallelize(plan, row.build(), functools.partial(torch.optim.AdamW, lr=0.1), **options)
    return Run(model, optimizer, dtypes)


def test_every_field_has_a_row():
    assert {*ROWS, *DESCRIPTIONS} == {each.name for each in dataclasses.fields(Plan)}, "a new field needs a row"
    assert all(name in row.plan for name, row in ROWS.items())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.shows])
def test_carried_out(name):
    row = ROWS[name]

    @ranks(row.ranks)
    def on_every_rank():
        try:
            assert row.shows(make(row, row.plan)), f"Plan({row.plan}) shows no effect"
        finally:
            vescale.dtensor.random.set_stream("torch")
            vescale.dtensor.set_exact(None)
        others = {key: value for key, value in row.plan.items() if key != name}
        with contextlib.suppress(ValueError):  # it needs this field
            without = Plan(**others)
            if without.world_size == row.ranks and row.build is Net:
                assert not row.shows(make(row, others)), f"Plan({others}) has the effect, too: the check cannot fail"

    on_every_rank()


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.refused])
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_refused_with_the_reason(name):
    error, text = ROWS[name].refused
    with pytest.raises(error, match=text):
        make(ROWS[name], ROWS[name].plan)
