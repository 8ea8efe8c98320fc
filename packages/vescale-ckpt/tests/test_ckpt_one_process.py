"""Save and load in one process: every kind of value comes back bit for bit, and the files are plain safetensors."""

from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch
from safetensors import safe_open

from vescale.ckpt import CheckpointError, load, read_manifest, save, verify

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any dtype with random bits (NaN payloads and negative zeros among them)."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8).bool()
    shape_in_bytes = (*shape, dtype.itemsize)
    noise = torch.randint(0, 256, shape_in_bytes, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return noise.view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare shape, dtype and bytes; a NaN equals the same NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4)], ids=str)
def test_every_dtype_keeps_its_bits(tmp_path, name, shape):
    dtype = getattr(torch, name)
    saved = {"x": random_bits(shape, dtype)}
    save(tmp_path / "c", saved)
    loaded = {"x": torch.zeros(shape, dtype=dtype)}
    load(tmp_path / "c", loaded)
    assert same_bits(saved["x"], loaded["x"])
    if saved["x"].numel() > 1:
        assert not same_bits(saved["x"], random_bits(shape, dtype, seed=1))


def test_views_and_transposed_tensors_are_stored_by_value_and_filled_through(tmp_path):
    buffer = torch.arange(24.0)
    save(tmp_path / "c", {"a": buffer[3:9], "b": buffer[9:21].view(3, 4).T, "c": buffer[::5]})
    target = torch.zeros(24)
    load(tmp_path / "c", {"a": target[3:9], "b": target[9:21].view(3, 4).T, "c": torch.zeros(5)})
    assert torch.equal(target[3:21], buffer[3:21])
    assert not target[:3].any()
    assert not target[21:].any()


def test_one_element_of_a_strided_tensor_is_filled(tmp_path):
    """Torch calls it contiguous, whatever its strides are."""
    save(tmp_path / "c", {"row": torch.tensor([[5.0]]), "item": torch.tensor([7.0])})
    target = torch.zeros(4, 6)
    load(tmp_path / "c", {"row": target[:1, 2:3].T, "item": target[3, ::6]})
    assert target[0, 2] == 5
    assert target[3, 0] == 7
    assert target.count_nonzero() == 2


def test_nested_values_come_back_with_their_types(tmp_path):
    def state(filled: bool):
        return {
            "step": 3 if filled else 0,
            "best": float("nan") if filled else 0.0,
            "name": "größe" if filled else "",
            "done": filled,
            "nothing": None if filled else 1,
            "history": [1.5, float("inf")] if filled else [],
            "betas": (0.9, 0.95) if filled else (0.0, 0.0),
            "milestones": Counter({30: 1, 80: 2}) if filled else Counter({1: 1}),
            "nested": {"deep": {"er": [1, {"x": (2,)}]}} if filled else {"deep": {"er": [0, {"x": ()}]}},
            "mixed": [torch.full((2,), float(filled)), {"k": 5 if filled else 0}],
        }

    save(tmp_path / "c", state(True))
    target = state(False)
    load(tmp_path / "c", target)
    assert repr(target) == repr(state(True))


def test_arrays_of_numpy_are_filled_and_bytes_come_back(tmp_path):
    """The state of numpy's generator, of a data loader, and numbers of numpy."""

    def state(filled: bool):
        array = np.arange(6.0).reshape(2, 3)
        return {
            "array": array.T if filled else np.zeros((3, 2)),
            "generator": np.random.RandomState(3 if filled else 0).get_state(),
            "loader": bytes(range(256)) if filled else b"",
            "nested": [(b"a", {"b": b"c" if filled else b""})],
            "count": np.int64(2**40 if filled else 0),
            "best": np.float32(0.1 if filled else 0),
            "done": np.bool_(filled),
        }

    save(tmp_path / "c", state(True))
    target = state(False)
    array = target["array"]
    load(tmp_path / "c", target)
    assert target["array"] is array
    assert repr(target) == repr(state(True))
    assert repr(target) != repr(state(False))
    with safe_open(next((tmp_path / "c").glob("*/*")), framework="np") as file:
        assert np.array_equal(file.get_tensor("array"), array)


def test_views_that_torch_conjugates_or_negates_when_they_are_read(tmp_path):
    x = torch.complex(torch.arange(5.0), torch.arange(5.0) + 1)
    saved = {"conjugate": x.conj(), "negated": x.conj().imag, "part": x.real}
    assert saved["conjugate"].is_conj()
    assert saved["negated"].is_neg()
    save(tmp_path / "c", saved)
    loaded = {name: torch.zeros_like(value.resolve_conj().resolve_neg()) for name, value in saved.items()}
    load(tmp_path / "c", loaded)
    for name, value in saved.items():
        assert torch.equal(loaded[name], value)
    y = torch.zeros(5, dtype=torch.complex64)
    load(tmp_path / "c", {"conjugate": y.conj(), "negated": torch.zeros(5), "part": torch.zeros(5)})
    assert torch.equal(y.conj(), x.conj())


def test_an_ordered_dict_with_attributes_is_given_back_as_such(tmp_path):
    class Recorder:
        def __init__(self, value):
            self.value = value

        def state_dict(self):
            state = OrderedDict(x=torch.tensor([self.value]), y=self.value)
            state._metadata = {"version": 2}
            return state

        def load_state_dict(self, state):
            assert isinstance(state, OrderedDict)
            assert state._metadata == {"version": 2}
            self.value, self.tensor = state["y"], state["x"]

    save(tmp_path / "c", {"r": Recorder(7)})
    target = Recorder(1)
    load(tmp_path / "c", {"r": target})
    assert (target.value, target.tensor.item()) == (7, 7)


def test_model_optimizer_and_scheduler_continue_as_if_never_stopped(tmp_path):
    def build(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]),
            "rng": torch.get_rng_state(),
        }

    def train(state, steps):
        torch.set_rng_state(state["rng"])
        for _ in range(steps):
            state["model"](torch.randn(6, 4)).square().sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            state["schedule"].step()
        state["rng"] = torch.get_rng_state()
        return state

    stopped = train(build(0), 2)
    save(tmp_path / "c", stopped)
    resumed = build(1)
    load(tmp_path / "c", resumed)
    expected, found, fresh = train(stopped, 3), train(resumed, 3), train(build(1), 3)
    for name, value in expected["model"].state_dict().items():
        assert torch.equal(value, found["model"].state_dict()[name]), name
    assert expected["schedule"].state_dict() == found["schedule"].state_dict()
    assert not torch.equal(expected["model"][0].weight, fresh["model"][0].weight)


def test_data_files_open_with_safetensors_and_hold_the_values(tmp_path):
    saved = {"model": {"w": torch.randn(3, 4), "b": torch.randn(4, dtype=torch.bfloat16)}, "n": torch.tensor(3)}
    save(tmp_path / "c", saved, metadata={"note": "x"})
    (data,) = (tmp_path / "c").glob("*/*")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["manifest.json", data.parent.name]
    assert data.name == "data-0-0.safetensors"
    with safe_open(data, framework="pt") as file:
        assert sorted(file.keys()) == ["model/b", "model/w", "n"]
        assert torch.equal(file.get_tensor("model/w"), saved["model"]["w"])
        assert torch.equal(file.get_tensor("model/b"), saved["model"]["b"])
    manifest = verify(tmp_path / "c")
    assert manifest == read_manifest(tmp_path / "c")
    assert (manifest.world_size, manifest.metadata) == (1, {"note": "x"})


def test_no_pickle_is_read_or_written(tmp_path, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refuse)
    save(tmp_path / "c", {"x": torch.ones(3), "n": [1]})
    load(tmp_path / "c", {"x": torch.zeros(3), "n": []})
    assert read_manifest(tmp_path / "c").leaves == {"n": [1]}


def test_a_large_state_is_spread_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr("vescale.ckpt._format.data_files.pack_files.__kwdefaults__", {"max_bytes": 100})
    saved = {f"t{i}": torch.randn(10) for i in range(6)}  # 40 bytes each, two to a file
    save(tmp_path / "c", saved)
    assert len(list((tmp_path / "c").glob("*/data-0-*.safetensors"))) == 3
    loaded = {f"t{i}": torch.zeros(10) for i in range(6)}
    load(tmp_path / "c", loaded)
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)


def test_a_dtype_is_converted_only_when_asked(tmp_path):
    save(tmp_path / "c", {"x": torch.tensor([1.5, 2.25])})
    target = {"x": torch.zeros(2, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match=r"'x': expected bfloat16, got float32 .*; allow_dtype_cast=True"):
        load(tmp_path / "c", target)
    load(tmp_path / "c", target, allow_dtype_cast=True)
    assert target["x"].tolist() == [1.5, 2.25]


def test_not_strict_keeps_what_is_not_stored_and_says_so(tmp_path, caplog):
    save(tmp_path / "c", {"x": torch.ones(2), "old": 1})
    target = {"x": torch.zeros(2), "new": torch.full((2,), 5.0), "other": "kept"}
    load(tmp_path / "c", target, strict=False)
    assert target["x"].tolist() == [1, 1]
    assert target["new"].tolist() == [5, 5]
    assert target["other"] == "kept"
    assert "2 names not stored, left unchanged: new, other" in caplog.text
    assert "1 names stored, not loaded: old" in caplog.text


class Unsupported:
    pass


REFUSED = {
    "object": ({"a": {"b": Unsupported()}}, r"'a/b': expected a tensor, .*, got <class '.*Unsupported'>"),
    "other dtype": (
        {"a": torch.zeros(2, dtype=torch.float8_e4m3fnuz)},
        r"'a': expected a dtype .*, got torch.float8_e4m3fnuz",
    ),
    "array of objects": (
        {"a": np.array([None])},
        "array 'a': expected an array that a tensor can share, got dtype obj",
    ),
    "fixed array": ({"a": np.broadcast_to(np.ones(1), 3)}, "array 'a': expected .* one that may not be written; pass"),
    "complex value": ({"a": np.complex64(1)}, "'a': expected a tensor, .*, got <class 'numpy.complex64'>"),
    "tag of bytes": ({"a": {1: {"__bytes__": "AAEC"}}}, "another key than '__bytes__', which marks a type; rename it"),
    "meta": ({"a": torch.zeros(2, device="meta")}, "'a': expected values, got the meta device; materialize it first"),
    "sparse": (
        {"a": torch.eye(2).to_sparse()},
        r"'a': expected a plain strided tensor, .*, got Tensor with layout torch.sparse_coo",
    ),
    "same name": ({"a/b": 1, "a": {"b": 2}}, "expected distinct names, got 'a/b' twice"),
    "int keys": ({"a": {0: torch.ones(1)}}, "'a': expected str keys, got 0"),
    "not a dict": ([1], "expected a dict of names"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_checkpoint_cannot_hold_is_named(tmp_path, case):
    state, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "c", state)
    assert list(tmp_path.iterdir()) == []


def test_metadata_must_be_json(tmp_path):
    with pytest.raises(CheckpointError, match="expected metadata to be a JSON object"):
        save(tmp_path / "c", {"a": 1}, metadata={"t": torch.ones(1)})
    assert list(tmp_path.iterdir()) == []
