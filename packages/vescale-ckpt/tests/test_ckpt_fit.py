"""A load reads exactly the overlaps, and a checkpoint that does not fit is refused in one text about all ranks."""

import pytest
import torch
import torch.distributed as dist

from vescale.ckpt import CheckpointError, load, save
from vescale_testing import RankFailure, ranks, run_ranks


class Boxes:
    """Boxes of a global tensor, held by this rank."""

    def __init__(self, shape, *boxes):
        self.__global_shape__, self.boxes = shape, list(boxes)

    def __boxes__(self):
        return self.boxes


VALUE = torch.arange(24.0).view(6, 4)


@pytest.fixture
def rows(tmp_path):
    """A checkpoint of three files, with two rows of ``VALUE`` in each."""

    def body():
        first = 2 * dist.get_rank()
        save(tmp_path / "c", {"w": Boxes((6, 4), ((first, 0), VALUE[first : first + 2]))})

    run_ranks(body, 3)
    return tmp_path / "c"


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [((0, 0), (1, 1)), ((0, 0), (2, 4)), ((1, 1), (4, 2)), ((2, 0), (2, 4)), ((3, 2), (2, 1)), ((0, 3), (6, 1))],
)
def test_a_box_is_filled_from_the_pieces_that_it_overlaps_and_from_no_other(rows, offsets, sizes):
    end = [start + size for start, size in zip(offsets, sizes, strict=True)]
    overlapped = {row // 2 for row in range(offsets[0], end[0])}
    for rank in {0, 1, 2} - overlapped:
        (file,) = rows.glob(f"*/data-{rank}-0.safetensors")
        file.write_bytes(bytes(file.stat().st_size))
    target = torch.full(sizes, -1.0)
    load(rows, {"w": Boxes((6, 4), (offsets, target))})
    assert torch.equal(target, VALUE[offsets[0] : end[0], offsets[1] : end[1]])
    (file,) = rows.glob(f"*/data-{min(overlapped)}-0.safetensors")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=rf"{file.name}: expected checksum .* of the header, got .*; restore it"):
        load(rows, {"w": Boxes((6, 4), (offsets, target))})


def matrix(dtype=torch.float32, columns=4):
    return torch.zeros(4, columns, dtype=dtype)


@pytest.fixture
def checkpoint(tmp_path):
    save(tmp_path / "c", {"model": {f"{name}.weight": matrix() for name in "abc"}, "step": 3})
    return tmp_path / "c"


def mismatch(path, *states, **options):
    """Return the text with which a load into one state for each rank is refused."""

    def body():
        load(path, states[dist.get_rank()], **options)

    with pytest.raises(RankFailure) as failure:
        run_ranks(body, len(states))
    texts = {str(error) for error in failure.value.exceptions.values()}
    (text,) = texts
    return text


def test_stages_that_together_request_all_names_fit(checkpoint):
    first = {"model": {"a.weight": matrix()}, "step": 0}
    second = {"model": {"b.weight": matrix(), "c.weight": matrix()}}
    run_ranks(lambda: load(checkpoint, (first, second)[dist.get_rank()]) and None, 2)
    text = mismatch(checkpoint, first, {"model": {"b.weight": matrix()}})
    assert "stored and requested by no rank (1): 'model/c.weight'" in text


def test_names_of_another_model_are_reported_with_ranks_and_the_nearest(checkpoint):
    state = {"model": {f"{name}.weight": matrix() for name in ("a", "b", "cc")}, "step": 0}
    text = mismatch(checkpoint, state, state)
    assert "requested and not stored (1): 'model/cc.weight' (ranks 0-1) (nearest stored: 'model/c.weight')" in text
    assert "stored and requested by no rank (1): 'model/c.weight'" in text


def test_different_shapes_and_dtypes_are_reported(checkpoint):
    state = {"model": {"a.weight": matrix(), "b.weight": matrix()}, "step": 0}
    state["model"]["c.weight"] = matrix(torch.bfloat16, columns=8)
    text = mismatch(checkpoint, state)
    assert "different global shape (1): 'model/c.weight': expected (4, 8), got (4, 4) in the checkpoint" in text
    assert "different dtype (1): 'model/c.weight': expected bfloat16, got float32 in the checkpoint" in text
    assert "dtype" not in mismatch(checkpoint, state, allow_dtype_cast=True)
    assert "global shape" in mismatch(checkpoint, state, strict=False)


def test_long_lists_are_cut_and_counted(checkpoint):
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, {f"x{index}": 0 for index in range(1000)})
    text = str(error.value)
    assert "requested and not stored (1000)" in text
    assert "and 995 more" in text
    assert len(text) < 1500


def test_leftovers_can_be_ignored_by_name_and_by_leading_part(tmp_path):
    save(tmp_path / "c", {"model": {"w": matrix()}, "optimizer": {"w": matrix()}, "step": 1})
    state = {"model": {"w": matrix()}}
    with pytest.raises(CheckpointError, match=r"pass ignore=\['optimizer', 'step'\]"):
        load(tmp_path / "c", state)
    load(tmp_path / "c", state, ignore=["optimizer", "step"])
    with pytest.raises(CheckpointError, match="stored and requested by no rank"):
        load(tmp_path / "c", state, ignore=["opt", "step"])
    load(tmp_path / "c", state, strict=False)


def test_a_value_of_another_kind_is_reported(checkpoint):
    with pytest.raises(CheckpointError) as error:
        load(checkpoint, {"step": matrix(), "model": {"a.weight": 1}}, strict=False)
    assert "'step': expected a tensor, got a plain value in the checkpoint" in str(error.value)
    assert "'model/a.weight': expected a plain value, got a tensor in the checkpoint" in str(error.value)


@ranks(2)
def test_a_tensor_on_one_rank_and_a_plain_value_on_another_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="a tensor on some ranks and a plain value on others: 'w'; rename one"):
        save(tmp_path / "c", {"w": matrix() if dist.get_rank() else 1})
