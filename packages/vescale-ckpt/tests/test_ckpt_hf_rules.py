"""Rules say how tensors of files make up those of a module, and both directions follow from one rule."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from vescale.ckpt import CheckpointError, WeightRule, load_hf, save_hf

RULES = [
    WeightRule(
        ["{layer}.experts.{number}.w1.weight", "{layer}.experts.{number}.w3.weight"],
        "{layer}.experts.gate_up_proj",
        stack=0,
        concatenate=1,
    ),
    WeightRule("{layer}.experts.{number}.w2.weight", "{layer}.experts.down_proj", stack=0),
    WeightRule("{layer}.qkv.{kind}", ["{layer}.q.{kind}", "{layer}.k.{kind}", "{layer}.v.{kind}"], concatenate=0),
    WeightRule("embed_out.{rest}", "head.{rest}"),
]
EXPERTS, INNER, WIDTH = 3, 4, 6


def build(seed):
    torch.manual_seed(seed)
    layer = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTH, WIDTH) for name in "qkv"})
    layer["experts"] = torch.nn.ParameterDict(
        {"gate_up_proj": torch.randn(EXPERTS, 2 * INNER, WIDTH), "down_proj": torch.randn(EXPERTS, WIDTH, INNER)}
    )
    return torch.nn.ModuleDict({"layer": layer, "head": torch.nn.Linear(WIDTH, 2)})


def in_files(module):
    """Return a module's tensors by the names of files, by hand."""
    state = module.state_dict()
    found = {f"embed_out.{kind}": state[f"head.{kind}"] for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        found[f"layer.qkv.{kind}"] = torch.cat([state[f"layer.{name}.{kind}"] for name in "qkv"])
    for number in range(EXPERTS):
        gate, up = state["layer.experts.gate_up_proj"][number].chunk(2)
        key = f"layer.experts.{number}"
        found |= {f"{key}.w1.weight": gate, f"{key}.w3.weight": up}
        found[f"{key}.w2.weight"] = state["layer.experts.down_proj"][number]
    return {name: value.contiguous() for name, value in found.items()}


def assert_equal(module, other):
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def test_merged_tensors_load(folder):
    save_file(in_files(build(1)), folder / "model.safetensors")
    loaded = build(2)
    load_hf(folder, loaded, rules=RULES)
    assert_equal(loaded, build(1))


def test_without_rules_the_names_are_missing(folder):
    save_file(in_files(build(1)), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"requested and not stored \(10\): 'head\.bias'"):
        load_hf(folder, build(2))


@pytest.mark.parametrize("max_shard_bytes", [10**6, 100])
def test_a_save_splits_them_again(folder, max_shard_bytes):
    save_hf(folder, build(1), rules=RULES, max_shard_bytes=max_shard_bytes)
    found = {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}
    expected = in_files(build(1))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert torch.equal(value, expected[key]), key


def test_files_with_the_names_of_the_module_load_with_the_same_rules(folder):
    save_hf(folder, build(1))
    assert "layer.experts.down_proj" in load_file(folder / "model.safetensors")
    loaded = build(2)
    load_hf(folder, loaded, rules=RULES)
    assert_equal(loaded, build(1))


def test_a_stack_along_another_dim(folder):
    module = torch.nn.ParameterDict({"w": torch.arange(24.0).view(2, 3, 4)})
    rules = [WeightRule("part.{n}", "w", stack=2)]
    save_hf(folder, module, rules=rules)
    assert torch.equal(load_file(folder / "model.safetensors")["part.3"], module["w"][:, :, 3])
    loaded = torch.nn.ParameterDict({"w": torch.zeros(2, 3, 4)})
    load_hf(folder, loaded, rules=rules)
    assert torch.equal(loaded["w"], module["w"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda files: files.pop("layer.experts.1.w3.weight"),
            r"gate_up_proj': expected 3 x 2 tensors in the files to merge, got none for number 1, "
            r"part 1, beside 'layer\.experts\.1\.w1\.weight'; download the folder again",
        ),
        (
            lambda files: files.update({"layer.experts.900000000.w2.weight": torch.zeros(6, 4)}),
            r"'layer\.experts\.down_proj': expected 900000001 x 1 tensors in the files to merge, got none for number 3",
        ),
        (
            lambda files: files.update({"layer.experts.1.w2.weight": torch.zeros(6, 5)}),
            r"expected tensors of one shape and dtype in the files to stack, got float32 \(6, 5\) of 'layer\.exp",
        ),
        (
            lambda files: files.update({"layer.experts.1.w2.weight": torch.zeros(6, 4).half()}),
            r"got float16 \(6, 4\) of 'layer\.experts\.1\.w2",
        ),
        (
            lambda files: files.update(
                {f"layer.experts.{number}.w1.weight": torch.zeros(4, 7) for number in range(EXPERTS)}
            ),
            r"gate_up_proj': expected shapes that are equal but in dim 1, got \(1, 4, 7\), \(1, 4, 6\)",
        ),
        (
            lambda files: files.update({"layer.experts.down_proj": torch.zeros(3, 6, 4)}),
            r"tensor 'layer\.experts\.down_proj': expected it once in the files, got 'layer\.experts\.",
        ),
        (
            lambda files: files.update({"layer.qkv.bias": torch.zeros(())}),
            r"expected a dim 0 to concatenate, got shape",
        ),
        (
            lambda files: files.update({"layer.qkv.bias": torch.zeros(9)}),
            r"'layer\.q\.bias': expected \(6,\), got \(3,\)",
        ),
        (lambda files: files.update({"head.bias": torch.zeros(2)}), r"'head\.bias': expected it once in the files"),
    ],
)
def test_files_that_do_not_fit_are_refused(folder, change, message):
    files = in_files(build(1))
    change(files)
    save_file(files, folder / "model.safetensors")
    loaded = build(2)
    with pytest.raises(CheckpointError, match=message):
        load_hf(folder, loaded, rules=RULES)
    assert_equal(loaded, build(2))


@pytest.mark.parametrize(
    ("module", "rules", "message"),
    [
        (
            {"a": torch.zeros(3, 2)},
            [WeightRule(["x", "y"], "a", concatenate=0)],
            r"'a': expected a size of dim 0 that 2 parts divide, got shape \(3, 2\)",
        ),
        (
            {"a": torch.zeros(3), "b": torch.zeros(3)},
            [WeightRule("x", "a"), WeightRule("x", "b")],
            "expected distinct names in the files, got 'x' for 'a' and 'b'",
        ),
        (
            {"a": torch.zeros(3), "b": torch.zeros(2)},
            [WeightRule("x", ["a", "b"], concatenate=0)],
            r"'x' of the files: expected equal shapes of parts, as a load splits it so, got \(3,\), \(2,\)",
        ),
        (
            {"a": torch.zeros(3), "c": torch.zeros(3)},
            [WeightRule("x", ["a", "b"], concatenate=0)],
            "'x' of the files: expected 2 tensors of one dtype of the module, got 'a'",
        ),
        (
            {"a": torch.zeros(3)},
            [WeightRule("__metadata__", "a")],
            "expected another name than '__metadata__', which the format uses",
        ),
    ],
)
def test_a_module_that_does_not_fit_is_refused(folder, module, rules, message):
    with pytest.raises(CheckpointError, match=message):
        save_hf(folder, torch.nn.ParameterDict(module), rules=rules)
    assert list(folder.iterdir()) == []
