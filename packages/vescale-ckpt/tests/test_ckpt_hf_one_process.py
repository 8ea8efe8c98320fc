"""A module saved as a folder of Hugging Face is read by safetensors, and loads again bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vescale.ckpt import CheckpointError, load_hf, save_hf

INDEX = "model.safetensors.index.json"


class Net(torch.nn.Module):
    """Several dtypes, a tied weight, a buffer that is saved and one that is not."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.nn.Embedding(7, 6)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 5), torch.nn.Linear(5, 6).bfloat16()])
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        with torch.no_grad():
            for value in (*self.parameters(), self.count):
                value.copy_(torch.randn(value.shape, generator=generator) * 10)


def read(folder):
    """Return what safetensors reads of all files."""
    return {key: value for path in sorted(folder.glob("*.safetensors")) for key, value in load_file(path).items()}


def assert_equal(module, other):
    ours, theirs = module.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.dtype == theirs[name].dtype
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("max_shard_bytes", [10**6, 130, 1])
def test_a_module_loads_again_bit_for_bit(tmp_path, max_shard_bytes):
    save_hf(tmp_path / "hf", Net(1), max_shard_bytes=max_shard_bytes)
    loaded = Net(2)
    with pytest.raises(AssertionError):
        assert_equal(loaded, Net(1))
    load_hf(tmp_path / "hf", loaded)
    assert_equal(loaded, Net(1))


@pytest.mark.parametrize("max_shard_bytes", [10**6, 130])
def test_safetensors_reads_every_tensor_and_ties_once(tmp_path, max_shard_bytes):
    save_hf(tmp_path / "hf", Net(1), max_shard_bytes=max_shard_bytes)
    found, state = read(tmp_path / "hf"), Net(1).state_dict()
    assert state.keys() - found.keys() == {"head.weight"}
    for name, value in found.items():
        assert torch.equal(value, state[name])


def test_one_file_needs_no_index_and_several_have_one(tmp_path):
    save_hf(tmp_path / "one", Net())
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    save_hf(tmp_path / "some", Net(), max_shard_bytes=300)
    names = sorted(path.name for path in (tmp_path / "some").iterdir())
    assert names == [f"model-{number:05}-of-00002.safetensors" for number in (1, 2)] + [INDEX]
    index = json.loads((tmp_path / "some" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in read(tmp_path / "some").values())
    for key, name in index["weight_map"].items():
        assert key in load_file(tmp_path / "some" / name)


def test_files_of_safetensors_load(tmp_path):
    state = {name: value.contiguous() for name, value in Net(1).state_dict().items() if name != "head.weight"}
    (tmp_path / "hf").mkdir()
    save_file(state, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    loaded = Net(2)
    load_hf(tmp_path / "hf", loaded)
    assert_equal(loaded, Net(1))


def test_a_name_without_a_tie_is_missing(tmp_path):
    save_hf(tmp_path / "hf", Net(1))
    untied = Net(2)
    untied.head.weight = torch.nn.Parameter(torch.zeros(7, 6))
    with pytest.raises(CheckpointError, match=r"requested and not stored \(1\): 'head\.weight'"):
        load_hf(tmp_path / "hf", untied)
    load_hf(tmp_path / "hf", untied, strict=False)
    assert torch.equal(untied.embed.weight, Net(1).embed.weight)
    assert not untied.head.weight.any()


def test_another_module_is_refused_and_unmodified(tmp_path):
    save_hf(tmp_path / "hf", Net(1))
    other = Net(2)
    other.layers[0] = torch.nn.Linear(6, 4)
    other.extra = torch.nn.Linear(1, 1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load_hf(tmp_path / "hf", other)
    for part in (
        f"{tmp_path / 'hf'}: expected a folder that fits the module, got",
        "requested and not stored (2): 'extra.bias' (rank 0)",
        "'layers.0.weight': expected (4, 6), got (5, 6) in the files",
    ):
        assert part in str(caught.value)
    for name, value in other.state_dict().items():
        assert torch.equal(value, before[name])


def test_left_over_names_are_refused_or_ignored(tmp_path):
    save_hf(tmp_path / "hf", Net(1))
    part = torch.nn.ModuleDict({"embed": torch.nn.Embedding(7, 6)})
    with pytest.raises(CheckpointError, match=r"stored and requested by no rank \(6\): 'count', 'layers"):
        load_hf(tmp_path / "hf", part)
    names = ["count", "scale", *(f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias"))]
    load_hf(tmp_path / "hf", part, ignore=names)
    assert torch.equal(part["embed"].weight, Net(1).embed.weight)


def test_rename_loads_under_other_names(tmp_path):
    save_hf(tmp_path / "hf", torch.nn.ModuleDict({"model": Net(1)}))
    loaded = Net(2)
    load_hf(tmp_path / "hf", loaded, rename={"model.": ""})
    assert_equal(loaded, Net(1))
    with pytest.raises(CheckpointError, match=r"beginnings of stored names in rename, got 'backbone\.'"):
        load_hf(tmp_path / "hf", loaded, rename={"backbone.": ""})


def test_another_dtype_is_refused_or_cast(tmp_path):
    save_hf(tmp_path / "hf", torch.nn.Linear(3, 2).bfloat16())
    wide = torch.nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"'bias': expected float32, got bfloat16 in the files.*=True converts"):
        load_hf(tmp_path / "hf", wide)
    load_hf(tmp_path / "hf", wide, allow_dtype_cast=True)
    assert torch.equal(wide.weight.bfloat16(), load_file(tmp_path / "hf" / "model.safetensors")["weight"])


def test_complex_numbers_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tensor 'bias': expected a dtype of .*, got complex64"):
        save_hf(tmp_path / "hf", torch.nn.Linear(2, 2, dtype=torch.complex64))
    assert not (tmp_path / "hf").exists()


def test_a_module_without_tensors(tmp_path):
    save_hf(tmp_path / "hf", torch.nn.Identity())
    load_hf(tmp_path / "hf", torch.nn.Identity())
    assert read(tmp_path / "hf") == {}


def test_values_of_several_blocks_that_are_not_in_order_in_memory(tmp_path):
    value = torch.arange(3 * 1000 * 701, dtype=torch.float32).view(701, 1000, 3).permute(2, 1, 0)
    module = torch.nn.Module()
    module.register_buffer("value", value)
    save_hf(tmp_path / "hf", module)
    assert torch.equal(read(tmp_path / "hf")["value"], value)
    module.value = torch.zeros(701, 1000, 3).permute(2, 1, 0)
    load_hf(tmp_path / "hf", module)
    assert torch.equal(module.value, value)


def test_empty_tensors(tmp_path):
    module = torch.nn.Module()
    module.register_buffer("none", torch.zeros(0, 3))
    module.register_buffer("one", torch.ones(1))
    save_hf(tmp_path / "hf", module)
    assert read(tmp_path / "hf")["none"].shape == (0, 3)
    load_hf(tmp_path / "hf", module)
