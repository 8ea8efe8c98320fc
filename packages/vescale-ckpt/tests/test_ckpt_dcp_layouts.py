"""What torch.distributed.checkpoint saves loads here bit for bit, and the other way, under any pair of layouts."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from vescale.ckpt import CheckpointError, load_dcp, save_dcp
from vescale_testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

# name -> shape of the mesh, and the placements of tensors of two dims; those of one dim use dim 0
LAYOUTS = {
    "one process": ((1,), [Replicate()]),
    "replicas": ((2,), [Replicate()]),
    "rows": ((2,), [Shard(0)]),
    "uneven rows": ((3,), [Shard(0)]),
    "columns": ((4,), [Shard(1)]),
    "replicas of columns": ((2, 2), [Replicate(), Shard(1)]),
    "blocks": ((2, 2), [Shard(0), Shard(1)]),
    "rows of rows": ((2, 2), [Shard(0), Shard(0)]),
}
TENSORS = {
    "wide": ((7, 6), torch.float32),
    "half": ((5, 9), torch.bfloat16),
    "few": ((2, 3), torch.float64),  # empty shards on more than two ranks
    "eighth": ((8, 4), torch.float8_e4m3fn),
    "counts": ((6,), torch.int64),
    "mask": ((2, 8), torch.bool),
    "scale": ((), torch.float32),
    "none": ((0, 4), torch.float32),
    "waves": ((3, 4), torch.complex64),
}


def value_of(name: str) -> torch.Tensor:
    shape, dtype = TENSORS[name]
    seed = list(TENSORS).index(name)
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 100).to(dtype)


def build_state(layout: str, *, filled: bool) -> dict:
    """Return this rank's part of the state: values, or zeros to load into."""
    shape, placements = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape) if dist.is_initialized() and shape != (1,) else None
    state = {}
    for name in TENSORS:
        value = value_of(name) if filled else torch.zeros_like(value_of(name))
        if mesh is not None:
            own = [Shard(p.dim) if p.is_shard() and p.dim < value.ndim else Replicate() for p in placements]
            # as bytes: not every collective knows every dtype
            value = distribute_tensor(value, mesh, own, src_data_rank=None)
        state[name] = value
    return {"model": state, "step": 7 if filled else 0}


def count_differences(state: dict, layout: str) -> int:
    """Count the local tensors that differ from the values, bit for bit."""
    expected, count = build_state(layout, filled=True), state["step"] != 7
    for name, value in state["model"].items():
        mine, other = (getattr(each, "_local_tensor", each) for each in (value, expected["model"][name]))
        bits = [each.reshape(-1).contiguous().view(torch.uint8) for each in (mine, other)]
        count += not torch.equal(*bits)
    return count


def save_both(root, layout: str) -> None:
    state = build_state(layout, filled=True)
    dcp.save(state, checkpoint_id=root / f"torch {layout}")
    save_dcp(root / f"ours {layout}", state)


def load_all(root, layout: str) -> list[str]:
    """Return the sources whose values came out changed, by reader."""
    found = []
    for source in LAYOUTS:
        state = build_state(layout, filled=False)
        assert count_differences(state, layout) > 4, "the comparison finds nothing"
        load_dcp(root / f"torch {source}", state, allow_pickle=True)
        found += [f"load_dcp of torch {source}"] * bool(count_differences(state, layout))
        state = build_state(layout, filled=False)
        load_dcp(root / f"ours {source}", state, allow_pickle=True)
        found += [f"load_dcp of ours {source}"] * bool(count_differences(state, layout))
        state = build_state(layout, filled=False)
        dcp.load(state, checkpoint_id=root / f"ours {source}")
        found += [f"dcp.load of ours {source}"] * bool(count_differences(state, layout))
    return found


def world_of(layout: str) -> int:
    return torch.Size(LAYOUTS[layout][0]).numel()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("dcp")
    for layout in LAYOUTS:
        run_ranks(save_both, world_of(layout), root, layout)
    return root


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_folder_loads_under_every_layout(folders, layout):
    for found in run_ranks(load_all, world_of(layout), folders, layout):
        assert found == []


def test_a_changed_value_is_found(tmp_path):
    state = build_state("one process", filled=True)
    state["model"]["half"][3, 4] += 64
    save_dcp(tmp_path / "ours", state)
    dcp.save(state, checkpoint_id=tmp_path / "torch")
    for path in (tmp_path / "ours", tmp_path / "torch"):
        loaded = build_state("one process", filled=False)
        load_dcp(path, loaded, allow_pickle=True)
        assert count_differences(loaded, "one process") == 1


def test_another_shape_or_dtype_is_refused_on_all_ranks(folders):
    def refuse():
        state = build_state("rows", filled=False)
        state["model"]["wide"] = torch.zeros(6, 7)
        state["model"]["half"] = torch.zeros(5, 9)
        try:
            load_dcp(folders / "torch blocks", state, allow_pickle=True)
        except CheckpointError as error:
            return str(error), count_differences(state, "rows") > 6
        return "", False

    texts = run_ranks(refuse, 2)
    assert texts[0] == texts[1]
    assert "'model/wide': expected (6, 7), got (7, 6) in the checkpoint" in texts[0][0]
    assert "'model/half': expected float32, got bfloat16 in the checkpoint" in texts[0][0]
    assert texts[0][1], "the state was changed"


def test_each_rank_reads_its_rows_alone(tmp_path, monkeypatch):
    big = torch.arange(2_000_000.0).view(2000, 1000)
    dcp.save({"big": big}, checkpoint_id=tmp_path / "c")
    read = []
    from vescale.ckpt._exchange import dcp_blobs

    original = dcp_blobs._read
    monkeypatch.setattr(
        dcp_blobs,
        "_read",
        lambda file, path, start, memory: (read.append(len(memory)), original(file, path, start, memory)),
    )

    class Rows:
        __global_shape__ = (2000, 1000)
        dtype = torch.float32
        view = torch.zeros(3, 1000)

        def __boxes__(self):
            return [((500, 0), self.view)]

    load_dcp(tmp_path / "c", {"big": Rows()}, allow_pickle=True)
    assert torch.equal(Rows.view, big[500:503])
    assert sum(read) < 20_000
    assert max(read) == 3 * 1000 * 4


@pytest.mark.parametrize(
    "change",
    [lambda t: t.t(), lambda t: t[::2], lambda t: t[:, 3:], lambda t: t[2:4, :1].expand(2, 5), lambda t: t.conj()],
    ids=["transposed", "strided", "columns", "expanded", "conjugate"],
)
def test_tensors_in_another_order_load(tmp_path, change):
    value = change(torch.randn(8, 6, dtype=torch.complex64))
    dcp.save({"w": value}, checkpoint_id=tmp_path / "c")
    state = {"w": torch.zeros(value.shape, dtype=value.dtype)}
    load_dcp(tmp_path / "c", state, allow_pickle=True)
    assert torch.equal(state["w"], value)
    save_dcp(tmp_path / "d", {"w": value})
    loaded = {"w": torch.zeros(value.shape, dtype=value.dtype)}
    dcp.load(loaded, checkpoint_id=tmp_path / "d", no_dist=True)
    assert torch.equal(loaded["w"], value)
