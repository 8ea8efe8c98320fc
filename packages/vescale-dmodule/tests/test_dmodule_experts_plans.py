"""What a plan can say of experts, and what is refused before anything is communicated."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from vescale.dmodule import (
    AllToAll,
    Experts,
    ImplicitRedistributionError,
    LoadBalancingAllocator,
    PlanError,
    describe,
    parallelize_module,
)
from vescale.dtensor import InterleavedShard, debug, deferred_init, distribute_tensor, init_device_mesh
from vescale_testing import keep_float64, ranks

S0, S1, R = Shard(0), Shard(1), Replicate()
HIDDEN, NUM_EXPERTS = 8, 4


class Model(nn.Module):
    """Hugging Face's mixture of experts with something before and after it."""

    def __init__(self):
        super().__init__()
        config = MixtralConfig(hidden_size=HIDDEN, intermediate_size=12, num_local_experts=NUM_EXPERTS)
        config._experts_implementation = "eager"
        self.before = nn.Linear(HIDDEN, HIDDEN)
        self.mlp = MixtralSparseMoeBlock(config)
        self.recompute = False
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x):
        x = torch.tanh(self.before(x))
        y = checkpoint(self.mlp, x, use_reentrant=False) if self.recompute else self.mlp(x)
        return x + y


def made():
    torch.manual_seed(0)
    return Model().double()


MERGED = {"gate_up_proj": {"tp": InterleavedShard(1, 2)}, "down_proj": {"tp": Shard(2)}}
# the experts' entry, the layout of the (batch, seq, hidden) activations, and whether tokens are exchanged
LAYOUTS = {
    "experts over tp, tokens over dp": ({"tp": S0}, {"dp": S0}, False),
    "experts over dp, tokens over dp": ({"dp": S0}, {"dp": S0}, True),
    "experts folded over dp and tp": ({"dp": S0, "tp": S0}, {"dp": S0}, True),
    "the same with sequence parallelism": ({"dp": S0, "tp": S0}, {"dp": S0, "tp": S1}, True),
    "experts over dp, inner dims over tp": (Experts({"dp": S0}, parameters=MERGED), {"dp": S0}, True),
    "the same with sequences over tp": (Experts({"dp": S0}, parameters=MERGED), {"dp": S0, "tp": S1}, True),
}


def planned(model, mesh, entry, layout, **forward):
    forward = {"before.input": [layout], "output": [{"dp": R, "tp": R}], **forward}
    return parallelize_module(model, mesh, {"expert": {r"mlp\.experts": entry}, "forward": forward})


def assert_trains_alike(model, reference):
    x = torch.randn(2, 6, HIDDEN, generator=torch.Generator().manual_seed(1)).double()
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    with keep_float64():  # the router computes in float32
        outputs = [module(value) for module, value in zip((model, reference), inputs, strict=True)]
        torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-12)
        for module, output in zip((model, reference), outputs, strict=True):
            module.zero_grad()
            output.square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad, rtol=1e-10, atol=1e-12)
    for name, parameter in reference.named_parameters():
        gradient = model.get_parameter(name).grad
        if parameter.grad is None:
            assert gradient is None, name
            continue
        assert gradient.placements == model.get_parameter(name).placements
        torch.testing.assert_close(gradient.full_tensor(), parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


@ranks(4)
def test_every_layout_of_a_plan():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference = made()
    for name, (entry, layout, is_exchanged) in LAYOUTS.items():
        model = planned(made(), mesh, entry, layout)
        try:
            with debug.comm_log(model) as log:
                assert_trains_alike(model, reference)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        assert bool(log.only(operator="all_to_all")) == is_exchanged, name


@ranks(2)
def test_recomputation_and_no_grad():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    reference = made()
    for layout in ({"tp": S1}, {"tp": R}):
        model = planned(made(), mesh, {"tp": S0}, layout)
        model.recompute = True
        assert_trains_alike(model, reference)
        with torch.no_grad(), keep_float64():
            x = torch.ones(2, 6, HIDDEN, dtype=torch.float64)
            torch.testing.assert_close(model(x), reference(x), rtol=1e-10, atol=1e-12)


@ranks(4)
def test_an_output_that_the_next_boundary_sums():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    entry = Experts({"dp": S0, "tp": S0}, partial_output=True)
    between = {"mlp.input": [{"dp": S0}], "mlp.output": [{"dp": S0, "tp": S1}]}
    model = planned(made(), mesh, entry, {"dp": S0, "tp": S1}, **between)
    assert_trains_alike(model, made())
    with debug.comm_log(model) as log, torch.no_grad():
        model(torch.ones(2, 6, HIDDEN, dtype=torch.float64))
    summed = [record for record in log if record.module.startswith("mlp") and record.operator != "all_to_all"]
    assert [(record.operator, record.axis) for record in summed] == [("all_gather", "tp"), ("reduce_scatter", "tp")]
    model = planned(made(), mesh, entry, {"dp": S0})
    assert_trains_alike(model, made())  # summed at the root, after the residual
    model.mlp.experts.register_forward_hook(lambda _module, _args, output: torch.tanh(output))
    with pytest.raises(ImplicitRedistributionError, match="tanh"):
        model(torch.ones(2, 6, HIDDEN, dtype=torch.float64))


class Loop(nn.Module):
    """Experts in a plain list, called one by one, those that have tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_EXPERTS))
        self.unwanted = None
        self.seen = None

    def forward(self, x):
        hidden = x.reshape(-1, HIDDEN)
        self.seen = type(hidden)
        logits = self.router(hidden)
        if self.unwanted is not None:
            logits = logits - 90 * nn.functional.one_hot(torch.tensor(self.unwanted), NUM_EXPERTS)
        weights, index = torch.topk(torch.softmax(logits, dim=-1), 2)
        out = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            token, choice = torch.where(index == number)
            if len(token):
                out.index_add_(0, token, expert(hidden[token]) * weights[token, choice, None])
        return out.reshape(x.shape)


class Looping(nn.Module):
    """A model around it."""

    def __init__(self):
        super().__init__()
        self.moe = Loop()

    def forward(self, x):
        return x + self.moe(torch.tanh(x))


@ranks(4)
def test_a_plain_list_in_a_plan():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    start = Looping().double()
    plan = {"expert": {r"moe\.experts": {"tp": S0}}, "forward": {"input": [{"tp": R}], "output": [{"tp": R}]}}
    for mode, kind in (("eager", DTensor), ("static", torch.Tensor)):
        reference = copy.deepcopy(start)
        model = parallelize_module(copy.deepcopy(start), mesh, plan, mode=mode)
        for unwanted in (3, None, 0):  # an expert of another rank, of none
            for module in (model, reference):
                module.moe.unwanted = unwanted
            assert_trains_alike(model, reference)
            assert model.moe.seen is kind
            for module in (model, reference):
                optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()

    torch.manual_seed(0)
    model = parallelize_module(deferred_init(Looping), mesh, plan)
    torch.manual_seed(0)
    for name, parameter in Looping().named_parameters():
        assert torch.equal(model.get_parameter(name).full_tensor(), parameter)


class Logged(AllToAll):
    """A dispatcher of the user."""

    sent = 0

    def dispatch(self, rows, exchange):
        Logged.sent += exchange.num_sent
        return super().dispatch(rows, exchange)


class Lost(AllToAll):
    """A dispatcher that loses what it should bring back."""

    def combine(self, rows, exchange):
        return super().combine(rows * 0, exchange)


@ranks(2)
def test_another_dispatcher():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layout = {"dp": R, "tp": S1}
    model = planned(made(), mesh, Experts({"tp": S0}, dispatcher=Logged()), layout)
    assert_trains_alike(model, made())
    assert Logged.sent == 2 * (2 * 6 // 2) * 2  # hidden states and weights of half the tokens, each for two experts
    with pytest.raises(AssertionError):
        assert_trains_alike(planned(made(), mesh, Experts({"tp": S0}, dispatcher=Lost()), layout), made())


@ranks(2)
def test_operands_that_do_not_fit():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    experts = planned(made(), mesh, {"tp": S0}, {"tp": R}).mlp.experts
    hidden, index, weights = torch.ones(3, HIDDEN).double(), torch.zeros(3, 2).long(), torch.ones(3, 2).double()
    for operands, text in (
        ((hidden, index[:2], weights), r"shapes \(tokens, hidden\), .* got \(\(3, 8\), \(2, 2\), \(3, 2\)\)"),
        ((hidden, index, weights[:, :1]), r"got \(\(3, 8\), \(3, 2\), \(3, 1\)\)"),
        ((hidden, weights, weights), "expected integer indices, got torch.float64"),
    ):
        with pytest.raises(PlanError, match=text):
            experts(*operands)
    for tokens in ([R, R], [R, S0]):
        operands = (distribute_tensor(value, mesh, tokens) for value in (hidden, index - 1, weights))
        with pytest.raises((IndexError, RuntimeError), match="index out of range"):  # as on one device
            experts(*operands)
    assert experts.num_experts == NUM_EXPERTS
    assert experts(hidden, index, weights).shape == (3, HIDDEN)


def listed(*, buffer=False, loose=False, scalar=False):
    experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
    if buffer:
        experts[1].register_buffer("count", torch.zeros(2))
    if loose:
        experts.register_parameter("scale", nn.Parameter(torch.ones(2)))
    if scalar:
        experts[1].register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    return experts


REFUSED = [
    (
        lambda: made().mlp.experts,
        Experts({"ep": S0}, parameters={"down_proj": {"etp": Shard(2)}}),
        "parameter 'gate_up_proj' is not cut on the axis that cuts inner dims of others, so its part of the output "
        "would be added several times; shard it in `parameters` or name it in `once`",
    ),
    (
        lambda: made().mlp.experts,
        Experts({"ep": S0}, parameters={"down": {"etp": Shard(2)}}),
        "key 'down' matches no parameter; they are ['down_proj', 'gate_up_proj']",
    ),
    (
        lambda: made().mlp.experts,
        Experts({"ep": S0}, parameters={"down_proj": {"ep": Shard(2)}}),
        "parameter 'down_proj' has Shard(dim=2) on axis 'ep', which holds Shard(dim=0); an inner dim is sharded, on an "
        "axis that does not hold experts",
    ),
    (
        lambda: made().mlp.experts,
        Experts({"ep": S0}, parameters={"down_proj": {"etp": Shard(0)}}),
        "parameter 'down_proj' has Shard(dim=0) on axis 'etp', which holds Replicate()",
    ),
    (
        lambda: made().mlp.experts,
        Experts({"ep": S0}, parameters={"down_proj": {"etp": Shard(3)}}),
        "Shard(dim=3) on a tensor of shape (4, 8, 12), which has 3 dims",
    ),
    (
        lambda: made().mlp.experts,
        Experts({"ep": S0}, arguments=("tokens", "index", "weights")),
        "forward takes ['hidden_states', 'top_k_index', 'top_k_weights'], expected ['tokens', 'index', 'weights']",
    ),
    (listed, {"ep": S0, "etp": S0}, "experts that are submodules go over one axis; Shard(0) is on 2 axes"),
    (
        listed,
        Experts({"ep": S0}, allocator=LoadBalancingAllocator()),
        "LoadBalancingAllocator moves stacked experts; submodules stay where they are",
    ),
    (
        listed,
        Experts({"ep": S0}, parameters={"weight": {"etp": S0}}),
        "expert tensor parallelism needs a forward over ['hidden_states', 'top_k_index', 'top_k_weights'], not a plain",
    ),
    (
        lambda: listed(buffer=True),
        {"ep": S0},
        "buffer '1.count' is in an expert, which is not supported for experts that are submodules",
    ),
    (
        lambda: listed(loose=True),
        {"ep": S0},
        "parameter 'scale' belongs to no expert; make all experts submodules",
    ),
    (
        lambda: listed(scalar=True),
        {"ep": S0},
        "parameter '1.scale' has no dim; expected 1 dim or more",
    ),
    (lambda: listed()[:3], {"ep": S0}, "3 experts do not divide over 2 ranks of the axis; use a degree that divides 3"),
]


@ranks(2)
def test_ranks_compare_the_entries_of_experts():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank()
    for threshold, differs in ((0.1, False), (0.1 + rank, True)):
        entry = Experts({"tp": S0}, allocator=LoadBalancingAllocator(threshold), dispatcher=Logged())
        with pytest.raises(PlanError, match=r"LoadBalancingAllocator\(") if differs else contextlib.nullcontext():
            parallelize_module(made(), mesh, {"expert": {r"mlp\.experts": entry}})
    entry = Experts({"tp": S0}, dispatcher=Logged() if rank else AllToAll())
    with pytest.raises(PlanError, match="Logged"):
        parallelize_module(made(), mesh, {"expert": {r"mlp\.experts": entry}})


@pytest.mark.parametrize(("make", "entry", "text"), REFUSED, ids=range(len(REFUSED)))
def test_what_a_plan_cannot_say(make, entry, text):
    with pytest.raises(PlanError) as error:
        describe(nn.ModuleDict({"moe": make()}), {"ep": 2, "etp": 2}, {"expert": {"moe": entry}})
    assert str(error.value).startswith("expert 'moe'")
    assert text in str(error.value)
