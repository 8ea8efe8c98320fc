"""State dicts are those of one process in every layout, and weights load from plain ones and from a hub's folder."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import vescale
from vescale import Plan
from vescale_testing import ranks

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("fields_training")
sys.path.pop(0)
build, parallelize, train = training.build, training.parallelize, training.train

LAYOUTS = [
    {"dp": 2, "zero": 3},
    {"tp": 2},
    {"pp": 2, "num_microbatches": 2, "schedule": "zb_v"},
    {"dp": 2, "zero": 3, "offload": True},
    {"dp": 2, "zero": 1, "param_dtype": "bfloat16"},
]


def words(fields):
    return " ".join(f"{name}={value}" for name, value in fields.items())


@pytest.mark.parametrize("fields", LAYOUTS, ids=words)
def test_there_and_back(fields):
    @ranks(2)
    def on_every_rank():
        model, optimizer = parallelize(Plan(**fields), build())
        dtype = torch.bfloat16 if "param_dtype" in fields else torch.float64
        expected = build().to(dtype).state_dict()
        state = model.state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(value, expected[name]) and type(value) is torch.Tensor for name, value in state.items())
        train(model, optimizer, steps=1)
        assert not torch.equal(model.state_dict()["head.weight"], expected["head.weight"])
        other = build(seed=1).to(dtype).state_dict()
        model.load_state_dict(other)
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
        model.load_state_dict(model.sharded_state_dict())
        assert all(torch.equal(value, other[name]) for name, value in model.state_dict(prefix="").items())
        assert next(iter(model.state_dict(prefix="net."))) == "net.embed.weight"

    on_every_rank()


@pytest.mark.parametrize("fields", [{"dp": 2, "zero": 3}, {"pp": 2, "num_microbatches": 2}], ids=words)
def test_one_value_at_a_time_and_no_pickle(fields, monkeypatch):
    """The device never has the full model, and no rank runs what another one sends."""

    def refused(*_args, **_options):
        raise AssertionError("all parameters at once, or a pickle")

    @ranks(2)
    def on_every_rank():
        model, _ = parallelize(Plan(**fields), build())
        monkeypatch.setattr(vescale.optim.DDP, "unsharded", refused)
        for name in ("all_gather_object", "broadcast_object_list"):
            monkeypatch.setattr(torch.distributed, name, refused)
        expected = build().state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

    on_every_rank()


class WithState(torch.nn.Module):
    """A module with a value of its own in the state dict."""

    def __init__(self, value):
        super().__init__()
        self.value = value
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


def test_values_of_stages_are_json():
    @ranks(2)
    def on_every_rank():
        plan = Plan(pp=2, num_microbatches=2)
        model, _ = vescale.parallelize(plan, WithState({"steps": [1, 2.5, None]}), torch.optim.SGD)
        assert model.state_dict()["_extra_state"] == {"steps": [1, 2.5, None]}
        model, _ = vescale.parallelize(plan, WithState({"steps": (1, 2)}), torch.optim.SGD)
        with pytest.raises(TypeError, match=r"expected a tensor or a JSON value for '_extra_state', .*, got dict;"):
            model.state_dict()

    on_every_rank()


@pytest.mark.parametrize("fields", [{"dp": 2}, {"pp": 2, "num_microbatches": 2}, {"dp": 2, "zero": 3}], ids=words)
def test_other_names_are_refused(fields):
    @ranks(2)
    def on_every_rank():
        model, _ = parallelize(Plan(**fields), build())
        state = build(seed=1).state_dict()
        with pytest.raises(RuntimeError, match=r"names of Net in the state dict, got others: .* unexpected \['tail'\]"):
            model.load_state_dict({**state, "tail": torch.zeros(1)})
        found = model.load_state_dict({**state, "tail": torch.zeros(1)}, strict=False)
        assert found.unexpected_keys == ["tail"]
        with pytest.raises(ValueError, match="expected assign=False, since parameters lie in flat buffers, got True"):
            model.load_state_dict(state, assign=True)
        with pytest.raises(ValueError, match="expected keep_vars=False, since values are brought together"):
            model.state_dict(keep_vars=True)

    on_every_rank()


@pytest.mark.parametrize("fields", [{"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2, "num_microbatches": 2}], ids=words)
def test_training_goes_on_from_a_folder_of_a_hub(fields, tmp_path):
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    one = LlamaForCausalLM(config)
    one.save_pretrained(tmp_path)
    tokens = torch.randint(32, (4, 6), generator=torch.Generator().manual_seed(0))
    expected = one(input_ids=tokens, labels=tokens).loss.item()

    @ranks(2)
    def on_every_rank():
        torch.manual_seed(1)
        model, _ = vescale.parallelize(Plan(**fields), vescale.deferred_init(LlamaForCausalLM, config), torch.optim.SGD)
        before = model.global_loss(model(**model.local_batch({"input_ids": tokens, "labels": tokens})).loss).item()
        assert before != pytest.approx(expected, rel=1e-4)
        vescale.checkpoint.load_hf(tmp_path, model)
        after = model.global_loss(model(**model.local_batch({"input_ids": tokens, "labels": tokens})).loss).item()
        assert after == pytest.approx(expected, rel=1e-5)
        assert all(torch.equal(value, one.state_dict()[name]) for name, value in model.state_dict().items())

    on_every_rank()
