"""What forward hooks store of modules inside of stages is used by code outside, as on one device."""

import pytest
import torch
from torch import nn

from vescale.pipe import PipelineEngine, PipelinePlan, Stub
from vescale_testing import halved, ranks

transformers = pytest.importorskip("transformers")
MIXTRAL = (transformers.MixtralConfig, transformers.MixtralForCausalLM)  # imported once, before the ranks are forked
PLANS = {
    "two stages": PipelinePlan("1f1b", 4),
    "weight gradients apart": PipelinePlan("zb_h1", 4),
    "two stages per rank": PipelinePlan("interleaved_1f1b", 4, stages_per_rank=2),
    "V": PipelinePlan("zb_v", 4),
}


class Gate(nn.Linear):
    """Says how much of each feature passes, and a number that depends on the data."""

    def forward(self, x):
        logits = super().forward(x)
        return logits, int((logits > 0).sum())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.linear, self.norm = Gate(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x, scale=1.0):
        h = self.norm(x)
        return x + self.gate(h)[0].sigmoid() * self.linear(h) * scale


class Net(nn.Module):
    """Stores the logits of gates in the way of ``store``, and adds a loss of theirs."""

    def __init__(self, store, weight=0.1):
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(4, 1)
        self.seen, self.is_hooked, self.weight = [], False, weight
        self.store = store

    def forward(self, x):
        if not self.is_hooked:  # as late as possible, and by their class, as Hugging Face models do
            self.store(self)
            self.is_hooked = True
        self.seen.clear()
        h = self.embed(x)
        for block in self.blocks:
            h = block(h, scale=0.5)
        loss = self.head(h).square().mean()
        logits = self.seen or [block.gate.seen for block in self.blocks]
        return loss + self.weight * torch.stack([each.softmax(-1).square().mean() for each in logits]).prod()


def by_output(net):
    for module in net.modules():
        if isinstance(module, Gate):
            module.register_forward_hook(lambda *call: net.seen.append(call[-1][0]))


def by_input(net):
    for module in net.modules():
        if isinstance(module, Gate):
            module.register_forward_pre_hook(lambda _, args: net.seen.append(args[0]))


def by_keywords(net):
    def hook(module, args, kwargs, output):
        del module, output
        assert kwargs == {"scale": 0.5}
        net.seen.append(args[0])  # a value that may have crossed

    for module in net.modules():
        if isinstance(module, Block):
            module.register_forward_hook(hook, with_kwargs=True)


def by_attribute(net):
    for module in net.modules():
        if isinstance(module, Gate):
            module.register_forward_hook(lambda gate, _, output: setattr(gate, "seen", output[0]))


STORES = {"output": by_output, "input": by_input, "keywords": by_keywords, "attribute": by_attribute}


def build(store, **options):
    torch.manual_seed(0)
    return Net(STORES[store], **options).double()


def batch():
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(model, plan, mesh, *, steps=3):
    engine = PipelineEngine(model, mesh, plan, per_microbatch=True)
    optimizer = sgd(list(model.parameters()))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(engine(batch()))
        losses[-1].backward()
        optimizer.step()
    return engine, losses


@halved
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("store", STORES)
@ranks(2)
def test_a_loss_of_what_hooks_store(store, plan, pipeline_mesh, train_one_process, differences):
    expected = train_one_process(
        build(store), lambda model, x: model(x), {"x": batch()}, 4, steps=3, make_optimizer=sgd
    )
    model = build(store)
    _, losses = train(model, plan, pipeline_mesh())
    found = differences(model, expected)
    if store == "keywords":  # the input of a block has more uses, whose gradients are added stage by stage
        assert all(value < 1e-12 for value in found.values())
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected.losses), rtol=1e-12, atol=0)
    else:
        assert torch.equal(torch.stack(losses), torch.stack(expected.losses))
        assert found == {}
        assert all(torch.equal(p, expected.parameters[name]) for name, p in model.named_parameters())


@ranks(2)
def test_without_that_loss_gradients_differ(pipeline_mesh, train_one_process, differences):
    expected = train_one_process(build("output", weight=0.0), lambda model, x: model(x), {"x": batch()}, 4)
    model = build("output")
    train(model, PLANS["two stages"], pipeline_mesh(), steps=1)
    assert any("gate" in name for name in differences(model, expected))


@ranks(3)
def test_hooks_from_before_the_engine(pipeline_mesh, train_one_process, differences):
    """Also where an earlier stage has none."""
    one, model = build("output"), build("output")
    for each in (one, model):
        each(batch())
        assert each.is_hooked
    expected = train_one_process(one, lambda model, x: model(x), {"x": batch()}, 4)
    train(model, PLANS["two stages"], pipeline_mesh(), steps=1)
    assert differences(model, expected) == {}


@ranks(2)
def test_stored_tensors_cross_where_they_are_used(pipeline_mesh):
    engine, _ = train(build("output"), PLANS["two stages"], pipeline_mesh(), steps=1)
    values = [transfer.value for transfer in engine.transfers]
    assert sum(value.startswith("a tensor that a hook stores inside of `blocks.") for value in values) == 0
    assert values[0] == "output 0 of `blocks.1` (stage 0)"
    assert len(values) == 3  # the hidden states, and two means of logits that the first stage computes


@ranks(2)
def test_modules_of_other_stages_are_found_in_a_forward_alone(pipeline_mesh):
    found = {}

    class Looks(Net):
        def forward(self, x):
            found["gates"] = [name for name, module in self.named_modules() if isinstance(module, Gate)]
            found["blocks"] = [isinstance(block, Block) for block in self.blocks]
            found["stubs"] = sum(isinstance(block, Stub) for block in self.blocks)
            return super().forward(x)

    torch.manual_seed(0)
    model = Looks(by_output).double()
    train(model, PLANS["two stages"], pipeline_mesh(), steps=2)
    assert found == {"gates": [f"blocks.{i}.gate" for i in range(4)], "blocks": [True] * 4, "stubs": 2}
    assert sum(isinstance(module, Gate) for module in model.modules()) == 2
    assert sum(isinstance(module, Block) for module in model.modules()) == 2
    assert len(list(model.parameters())) == len(list(model.state_dict())) < 4 * 6 + 2


@ranks(2)
def test_a_hook_that_computes_runs_on_its_own_stage(pipeline_mesh, train_one_process, differences):
    norms = []

    def build_watched():
        model = build("output", weight=0.0)
        for block in model.blocks:
            block.linear.register_forward_hook(lambda *call: norms.append(call[-1].norm().item()))
        return model

    expected = train_one_process(build_watched(), lambda model, x: model(x), {"x": batch()}, 4)
    every = list(norms)
    norms.clear()
    model = build_watched()
    train(model, PLANS["two stages"], pipeline_mesh(), steps=1)
    assert differences(model, expected) == {}
    assert set(norms) <= set(every)
    assert 0 < len(set(norms)) < len(set(every))


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@ranks(2)
def test_attributes_that_change_in_every_forward(stages_per_rank, pipeline_mesh):
    """A rank of two stages runs code outside of them twice, so it counts otherwise than one process."""

    class Counts(Net):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x)

    torch.manual_seed(0)
    model = Counts(by_output).double()
    plan = PipelinePlan("interleaved_1f1b", 4, stages_per_rank=stages_per_rank)
    if stages_per_rank == 1:
        train(model, plan, pipeline_mesh(), steps=1)
        assert model.count == 4
    else:
        with pytest.raises(RuntimeError, match="or sets them once, since it runs once for each stage of a rank"):
            train(model, plan, pipeline_mesh(), steps=1)


@pytest.mark.parametrize("stages_per_rank", [1, 2])
@ranks(2)
def test_hooks_that_count(stages_per_rank, pipeline_mesh):
    count = [0]

    def hook(*_call):
        count[0] += 1

    model = build("output")
    for block in model.blocks:
        block.gate.register_forward_hook(hook)
    plan = PipelinePlan("interleaved_1f1b", 4, stages_per_rank=stages_per_rank)
    if stages_per_rank == 1:
        train(model, plan, pipeline_mesh(), steps=1)
        assert count[0] >= 2 * 4  # those of this stage, and perhaps those of the other one
    else:
        with pytest.raises(RuntimeError, match="a forward hook of Gate: expected one that keeps tensors, since a rank"):
            train(model, plan, pipeline_mesh(), steps=1)


@ranks(2)
def test_attributes_that_keep_values_are_those_of_the_last_micro_batch(pipeline_mesh):
    """A tape would leave them as they were."""

    class Keeps(Net):
        def forward(self, x):
            self.last = self.embed(x)
            return super().forward(x)

    torch.manual_seed(0)
    model = Keeps(by_output).double()
    engine, _ = train(model, PLANS["two stages"], pipeline_mesh(), steps=3)
    if engine.stage == 0:
        before = [parameter.clone() for parameter in model.parameters()]
        engine(batch())
        assert torch.equal(model.last, model.embed(batch()[6:]))
        assert all(map(torch.equal, before, model.parameters()))
    else:
        engine(batch())


@ranks(2)
def test_calls_that_depend_on_the_data(pipeline_mesh):
    class Sometimes(Block):
        def forward(self, x, scale=1.0):
            return super().forward(x, scale) if x[0, 0] > 0 else x + self.gate(super().forward(x, scale))[0]

    torch.manual_seed(0)
    model = Net(by_output).double()
    model.blocks[3] = Sometimes().double()
    engine = PipelineEngine(model, pipeline_mesh(), PLANS["two stages"], per_microbatch=True)
    rows = batch()
    engine(rows[:1].expand(8, 4).contiguous())
    match = "modules with hooks inside of `blocks.3`: expected the same calls in every micro-batch"
    with pytest.raises(RuntimeError, match=match):
        engine(rows)


# --- Hugging Face ---


def mixtral(layers):
    config, make = MIXTRAL
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    config = config(
        hidden_size=16, intermediate_size=24, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, vocab_size=40, bos_token_id=None, eos_token_id=None, router_aux_loss_coef=0.5,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return make(config)


class Probed(nn.Module):
    """Adds a loss of all hidden states to that of the model."""

    def __init__(self):
        super().__init__()
        self.model = mixtral(2)

    def forward(self, **tokens):
        output = self.model(output_hidden_states=True, **tokens)
        return output.loss + torch.stack([h.square().mean() for h in output.hidden_states]).prod()


def tokens():
    ids = torch.randint(40, (4, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@ranks(2)
def test_the_router_loss_of_mixtral(plan, pipeline_mesh, train_one_process, differences):
    one, model = mixtral(4), mixtral(4)
    loss_of = lambda model, **rows: model(output_router_logits=True, **rows).loss  # noqa: E731
    expected = train_one_process(one, loss_of, tokens(), 4)
    engine = PipelineEngine(model, pipeline_mesh(), plan, per_microbatch=True)
    loss = engine(output_router_logits=True, **tokens())
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    assert differences(model, expected) == {}


@ranks(3)
def test_hidden_states_of_mixtral(pipeline_mesh, train_one_process, differences):
    one, model = Probed(), Probed()
    expected = train_one_process(one, lambda model, **rows: model(**rows), tokens(), 2)
    split = ["model.model.layers.0", "model.model.layers.1"]
    engine = PipelineEngine(model, pipeline_mesh(), PipelinePlan("1f1b", 2, split), per_microbatch=True)
    loss = engine(**tokens())
    loss.backward()
    assert torch.equal(loss, expected.losses[0])
    # a hidden state is used by the next layer and by the loss, and gradients of its uses are added stage by stage
    assert all(value < 1e-12 for value in differences(model, expected).values())
