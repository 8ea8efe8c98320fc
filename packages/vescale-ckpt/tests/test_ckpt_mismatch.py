"""A checkpoint of another model is refused with one text on all ranks, and the state is not modified."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale.ckpt import CheckpointError, load, save
from vescale_testing import ranks


def build(width: int = 4, *, extra: bool = False) -> torch.nn.ModuleDict:
    layers = {"up": torch.nn.Linear(4, width), "down": torch.nn.Linear(width, 4)}
    if extra:
        layers["gate"] = torch.nn.Linear(4, 4)
    return torch.nn.ModuleDict(layers)


def load_refused(path, state) -> str:
    """Return the message, after a check that it is the same on all ranks and no value changed."""
    before = {name: value.clone() for name, value in state["model"].state_dict().items()}
    with pytest.raises(CheckpointError) as caught:
        load(path, state)
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, str(caught.value))
    assert set(texts) == {texts[0]}
    for name, value in state["model"].state_dict().items():
        assert torch.equal(value, before[name])
    return texts[0]


@ranks(2)
def test_another_model_is_reported_in_one_message_on_all_ranks(tmp_path):
    save(tmp_path / "c", {"model": build(), "step": 1})
    text = load_refused(tmp_path / "c", {"model": build(8, extra=True), "step": 0})
    assert "c: expected a checkpoint that fits the state, got" in text
    assert "requested and not stored (2): 'model/gate.bias' (ranks 0-1)" in text
    assert "shape (3): 'model/up.weight': expected (8, 4), got (4, 4) in the checkpoint (ranks 0-1)" in text


@ranks(3)
def test_one_rank_with_another_model_stops_all(tmp_path):
    save(tmp_path / "c", {"model": build()})
    text = load_refused(tmp_path / "c", {"model": build(extra=dist.get_rank() == 1)})
    assert "requested and not stored (2): 'model/gate.bias' (rank 1)" in text
    state = {"model": build()}
    load(tmp_path / "c", state)


@ranks(2)
def test_a_stage_that_no_rank_requests_is_reported(tmp_path):
    model = build()
    save(tmp_path / "c", {"model": model})
    text = load_refused(tmp_path / "c", {"model": torch.nn.ModuleDict({"up": model["up"]})})
    assert "stored and requested by no rank (2): 'model/down.bias', 'model/down.weight'" in text


@ranks(2)
def test_an_unreadable_state_on_one_rank_stops_all(tmp_path):
    save(tmp_path / "c", {"model": build(), "w": torch.ones(4)})
    own = torch.ones(4, device="meta" if dist.get_rank() == 1 else "cpu")
    text = load_refused(tmp_path / "c", {"model": build(), "w": own})
    assert text.startswith("rank 1: tensor 'w': expected values, got the meta device")


@ranks(2)
def test_an_object_that_refuses_its_state_is_named_on_all_ranks(tmp_path):
    class Picky(torch.nn.Linear):
        def load_state_dict(self, *_args, **_kwargs):
            if dist.get_rank() == 1:
                raise RuntimeError("not today")

    save(tmp_path / "c", {"model": torch.nn.Linear(2, 2)})
    match = r"'model': expected Picky\.load_state_dict to accept the loaded state, got not today"
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path / "c", {"model": Picky(2, 2)})


@ranks(2)
def test_tied_weights_stay_tied(tmp_path):
    def build_tied(seed):
        torch.manual_seed(seed)
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)})
        mesh = init_device_mesh("cpu", (2,))
        model["embed"].weight = torch.nn.Parameter(distribute_tensor(model["embed"].weight.detach(), mesh, [Shard(0)]))
        model["head"].weight = model["embed"].weight
        return model

    saved, loaded = build_tied(0), build_tied(1)
    save(tmp_path / "c", {"model": saved})
    load(tmp_path / "c", {"model": loaded})
    assert loaded["head"].weight is loaded["embed"].weight
    assert torch.equal(loaded["head"].weight.to_local(), saved["embed"].weight.to_local())
