"""Models of transformers: what it saves loads into a model sharded in any way, and it loads what that one saves."""

import copy
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "families"))

import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, build
from safetensors.torch import load_file
from transformers import conversion_mapping
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Chunk, MergeModulelist, Transpose, WeightConverter

from vescale.ckpt import CheckpointError, WeightRule, diff, load_hf, read_manifest, save, save_hf
from vescale.ckpt.__main__ import main
from vescale.dmodule import parallelize_module, plans
from vescale.dtensor import Replicate, Shard, init_device_mesh
from vescale.optim import DDP
from vescale_testing import gather_full, ranks

#: What was a family of its own when it was found: many names, experts in a stack, ties.
SHARDED = ("gpt2", "mixtral", "qwen3_moe", "gemma2")


def changed(model):
    """Return a copy of a model whose parameters have other values; ties stay."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    return other


def read(folder):
    return {key: value for path in Path(folder).glob("*.safetensors") for key, value in load_file(path).items()}


def assert_equal(state, expected):
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(gather_full(state[name]), value), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_goes_there_and_back(tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path / "theirs")
    loaded = changed(model)
    with pytest.raises(AssertionError):
        assert_equal(loaded.state_dict(), model.state_dict())
    load_hf(tmp_path / "theirs", loaded)
    assert_equal(loaded.state_dict(), model.state_dict())

    save_hf(tmp_path / "ours", loaded, max_shard_bytes=20_000)
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "theirs"))
    back = type(model).from_pretrained(tmp_path / "ours")
    assert back.dtype == model.dtype
    assert_equal(back.state_dict(), model.state_dict())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt2"])
def test_a_folder_with_the_names_of_the_model_loads(tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path / "hf", save_original_format=False)
    loaded = changed(model)
    load_hf(tmp_path / "hf", loaded)
    assert_equal(loaded.state_dict(), model.state_dict())


def parallel(model, axes):
    """Shard a model over tensor parallelism, with experts in parts if it has any."""
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    sharded = copy.deepcopy(model)
    parallelize_module(sharded, mesh, plans.plan_for(sharded, degree=axes["tp"]), mode="eager")
    return sharded


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_parallel_models(tmp_path, axes):
    models = {family: build(family) for family in SHARDED}
    for family, model in models.items():
        model.save_pretrained(tmp_path / family)

    @ranks(4 if "dp" in axes else 2, timeout=180)
    def on_every_rank():
        for family, model in models.items():
            sharded = parallel(changed(model), axes)
            load_hf(tmp_path / family, sharded)
            assert_equal(sharded.state_dict(), model.state_dict())
            save_hf(tmp_path / f"{family}-ours", sharded, max_shard_bytes=30_000)

    on_every_rank()
    for family, model in models.items():
        assert_equal(read(tmp_path / f"{family}-ours"), read(tmp_path / family))
        back = type(model).from_pretrained(tmp_path / f"{family}-ours")
        assert_equal(back.state_dict(), model.state_dict())


def test_sharded_parameters(tmp_path):
    """Of ZeRO 3, in ranges of rows; the module is a wrapper of the model."""
    model = build("mixtral").float()
    model.save_pretrained(tmp_path / "hf")

    @ranks(2, timeout=120)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        sharded = DDP(changed(model), mesh, zero=3)
        load_hf(tmp_path / "hf", sharded)
        with sharded.unsharded():
            assert_equal(sharded.state_dict(), model.state_dict())
        save_hf(tmp_path / "ours", sharded)

    on_every_rank()
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "hf"))
    assert_equal(type(model).from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())


def test_experts_over_an_axis_of_their_own(tmp_path):
    model = build("mixtral")
    model.save_pretrained(tmp_path / "hf")

    @ranks(4, timeout=120)
    def on_every_rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        sharded = changed(model)
        plan = plans.plan_for(sharded, degree=2, expert_axis="ep")
        values = {"input": {"input_ids": {"ep": Shard(0), "tp": Replicate()}}}
        parallelize_module(sharded, mesh, {**plan, "forward": {**plan["forward"], **values}}, mode="eager")
        load_hf(tmp_path / "hf", sharded)
        assert_equal(sharded.state_dict(), model.state_dict())
        save_hf(tmp_path / "ours", sharded)
        assert dist.get_world_size() == 4

    on_every_rank()
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "hf"))


def test_a_tie_between_stages(tmp_path):
    """The embedding is on one rank, the head on another, so they share no memory."""
    model = build("gpt2")
    model.save_pretrained(tmp_path / "hf")
    expected = model.state_dict()

    @ranks(2)
    def on_every_rank():
        stage = changed(model)
        if dist.get_rank() == 0:
            del stage.lm_head
        else:
            stage = torch.nn.ModuleDict({"lm_head": stage.lm_head})
        load_hf(tmp_path / "hf", stage)
        for name, value in stage.state_dict().items():
            assert torch.equal(value, expected[name]), name
        save_hf(tmp_path / "ours", stage)

    on_every_rank()
    assert_equal(type(model).from_pretrained(tmp_path / "ours").state_dict(), expected)


def test_bfloat16_is_cast_on_request(tmp_path):
    model = build("mixtral").bfloat16()
    model.save_pretrained(tmp_path / "hf")
    wide = changed(model).float()
    with pytest.raises(CheckpointError, match="expected float32, got bfloat16 in the files"):
        load_hf(tmp_path / "hf", wide)
    load_hf(tmp_path / "hf", wide, allow_dtype_cast=True)
    assert_equal(wide.bfloat16().state_dict(), model.state_dict())


def test_the_base_model_loads_the_files_of_a_whole_one(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path / "hf")
    base = changed(model).model
    with pytest.raises(CheckpointError, match=r"stored and requested by no rank \(1\): 'lm_head\.weight'"):
        load_hf(tmp_path / "hf", base)
    load_hf(tmp_path / "hf", base, ignore=["lm_head.weight"])
    assert_equal(base.state_dict(), model.model.state_dict())


@pytest.fixture
def declare():
    """`declare(conversion)` for Llama, as a library of models would."""
    yield lambda conversion: register_checkpoint_conversion_mapping("LlamaForCausalLM", [conversion], overwrite=True)
    conversion_mapping._checkpoint_conversion_mapping_cache.pop("LlamaForCausalLM", None)


def test_fused_tensors_of_files_are_split(tmp_path, declare):
    """By a declared `Chunk`, in both directions."""
    model = build("llama")
    targets = ["mlp.gate_proj.weight", "mlp.up_proj.weight"]
    declare(WeightConverter("mlp.gate_up.weight", targets, operations=[Chunk(dim=0)]))
    model.save_pretrained(tmp_path / "theirs")
    assert "model.layers.0.mlp.gate_up.weight" in read(tmp_path / "theirs")
    loaded = changed(model)
    load_hf(tmp_path / "theirs", loaded)
    assert_equal(loaded.state_dict(), model.state_dict())
    save_hf(tmp_path / "ours", loaded)
    assert_equal(read(tmp_path / "ours"), read(tmp_path / "theirs"))


@pytest.mark.parametrize(
    ("target", "operation", "message"),
    [
        (
            "mlp.up_proj",
            Transpose(0, 1),
            "conversions of the model that stack, .*, got Transpose; convert the",
        ),
        ("mlp.up_proj", Chunk(0, "num_heads"), r"that stack, concatenate or split, got Chunk\(dim=0\); convert the"),
        ("mlp.up_proj", MergeModulelist(0), "expected a number for the '[*]' of 'mlp.up_proj', got none"),
        (
            ["(mlp).up", "(mlp).down"],
            Chunk(0),
            r"up_proj\.weight': expected .* to plain names, got",
        ),
    ],
)
def test_conversions_that_are_not_boxes_are_refused_by_name(tmp_path, declare, target, operation, message):
    model = build("llama")
    model.save_pretrained(tmp_path / "hf")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    source = "(mlp).up_proj" if isinstance(target, list) else "mlp.up_proj"
    declare(WeightConverter(source, target, operations=[operation]))
    with pytest.raises(CheckpointError, match=message):
        load_hf(tmp_path / "hf", model)
    assert_equal(model.state_dict(), before)


def test_a_save_refuses_them_too(tmp_path, declare):
    declare(WeightConverter("mlp.up_proj", "mlp.up_proj", operations=[Transpose(0, 1)]))
    with pytest.raises(CheckpointError, match=r"up_proj\.weight': expected conversions .*, got Transpose"):
        save_hf(tmp_path / "ours", build("llama"))
    assert not (tmp_path / "ours").exists()


def test_given_rules_replace_the_declared_ones(tmp_path):
    model = build("mixtral")
    save_hf(tmp_path / "hf", model, rules=[WeightRule("all.{rest}", "{rest}")])
    assert all(key.startswith("all.") for key in read(tmp_path / "hf"))
    loaded = changed(model)
    load_hf(tmp_path / "hf", loaded, rules=[WeightRule("all.{rest}", "{rest}")])
    assert_equal(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "deepseek_v3"])
def test_the_command_takes_names_merges_and_ties_from_the_config(tmp_path, family):
    model = build(family)
    model.save_pretrained(tmp_path / "hf")
    save(tmp_path / "saved", {"model": model})
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "imported")]) == 0
    assert diff(tmp_path / "imported", tmp_path / "saved") == []

    command = ["export-hf", str(tmp_path / "saved"), str(tmp_path / "exported"), "--config", str(tmp_path / "hf")]
    assert main(command) == 0
    assert_equal(read(tmp_path / "exported"), read(tmp_path / "hf"))
    assert_equal(type(model).from_pretrained(tmp_path / "exported").state_dict(), model.state_dict())


def test_the_command_without_a_known_model_keeps_the_names(tmp_path, caplog):
    model = build("mixtral")
    model.save_pretrained(tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    config.write_text(config.read_text().replace('"MixtralForCausalLM"', '"Other"'))
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "imported")]) == 0
    assert "the names of the files are taken as those of the model" in caplog.text
    assert "model/model.layers.0.block_sparse_moe.gate.weight" in read_manifest(tmp_path / "imported").tensors
    config.write_text("{")
    assert main(["import-hf", str(tmp_path / "hf"), str(tmp_path / "other")]) == 2
