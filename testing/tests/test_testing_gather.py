"""Whole tensors from shards, boxes, replicas and pipeline stages; gaps and drifted replicas are errors."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh

from vescale_testing import gather_full, gather_named, gather_state, ranks

WHOLE = torch.arange(35.0).reshape(5, 7)


@dataclass
class Boxed:
    """A value that offers its parts by the box protocol."""

    shape: tuple[int, ...]
    boxes: list[tuple[tuple[int, ...], torch.Tensor]]

    @property
    def __global_shape__(self):
        return self.shape

    def __boxes__(self):
        return self.boxes


def flat_part(start: int, stop: int) -> Boxed:
    """Return the elements start..stop of the flattened WHOLE as boxes that do not cross a row."""
    boxes = []
    for row in range(5):
        first, last = max(start - 7 * row, 0), min(stop - 7 * row, 7)
        if first < last:
            boxes.append(((row, first), WHOLE[row : row + 1, first:last]))
    return Boxed((5, 7), boxes)


def test_in_one_process_a_tensor_is_copied_and_detached():
    parameter = torch.nn.Parameter(torch.ones(2))
    full = gather_full(parameter)
    full.zero_()
    assert parameter.tolist() == [1, 1]
    assert not full.requires_grad
    assert gather_named({"a": parameter, "b": torch.tensor(3)})["b"].item() == 3
    assert torch.equal(gather_full(flat_part(0, 35)), WHOLE)


@ranks(4)
@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]])
def test_a_dtensor_is_whole_again(placements):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sharded = distribute_tensor(WHOLE, mesh, placements)
    assert torch.equal(gather_full(sharded), WHOLE)
    assert torch.equal(gather_named({"w": sharded})["w"], WHOLE)


@ranks(2)
def test_a_partial_dtensor_is_summed():
    partial = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
    assert gather_full(partial).tolist() == [2, 2, 2]


@ranks(3)
def test_boxes_of_all_ranks_make_the_whole():
    cuts = [0, 9, 9, 35]  # the second rank holds nothing
    part = flat_part(cuts[dist.get_rank()], cuts[dist.get_rank() + 1])
    assert torch.equal(gather_full(part), WHOLE)
    state = gather_state({"layer.weight": {"exp_avg": part, "step": torch.tensor(4)}})
    assert torch.equal(state["layer.weight"]["exp_avg"], WHOLE)
    assert state["layer.weight"]["step"].item() == 4


@ranks(4)
def test_pipeline_stages_add_their_names_and_groups_limit_who_takes_part():
    rank = dist.get_rank()
    named = {f"layers.{rank // 2}.weight": torch.full((2,), float(rank // 2))}
    everything = gather_named(named)
    assert {name: tensor.tolist() for name, tensor in everything.items()} == {
        "layers.0.weight": [0, 0],
        "layers.1.weight": [1, 1],
    }
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    assert list(gather_named(named, group=groups[rank // 2])) == list(named)


@ranks(2)
def test_a_rank_may_hold_nothing():
    assert gather_named({"w": WHOLE} if dist.get_rank() else {}).keys() == {"w"}


@ranks(2)
def test_replicas_that_have_drifted_apart_are_an_error():
    value = torch.zeros(2, 3)
    value[1, 2] = dist.get_rank() * 1e-7
    text = r"w: replicas differ in 1 elements, first at \(1, 2\): rank 0 has 0.0, rank 1 has 1.0000000\d*e-07"
    with pytest.raises(AssertionError, match=text):
        gather_named({"w": value})
    assert gather_named({"w": value * 0})["w"].sum() == 0
    with pytest.raises(AssertionError, match=r"step: replicas differ in 1 elements, first at \(\): rank 0 has 0, "):
        gather_named({"step": torch.tensor(dist.get_rank())})
    sign = 1 - 2 * dist.get_rank()  # zeros of either sign, and two kinds of nan, are no drift
    assert gather_named({"zero": torch.zeros(2) * sign, "nan": torch.full((2,), torch.nan) * sign})["zero"].sum() == 0


@ranks(2)
def test_every_dtype_and_layout_travels():
    values = {
        "bfloat16": WHOLE.bfloat16(),
        "bool": WHOLE > 3,
        "complex": torch.complex(WHOLE, WHOLE).conj(),
        "transposed": WHOLE.T,
        "one of many": WHOLE[:, 3],
        "nothing": torch.empty(0, 3),
        "number": torch.tensor(7, dtype=torch.int8),
    }
    for name, whole in gather_named(values).items():
        assert torch.equal(whole, values[name]), name
        assert (whole.dtype, whole.shape) == (values[name].dtype, values[name].shape), name
    same = gather_named({"w": WHOLE})["w"]
    same.zero_()  # a copy
    assert WHOLE.sum() > 0


@ranks(2)
def test_overlapping_boxes_that_disagree_are_named_by_their_global_index():
    part = Boxed((4,), [((dist.get_rank(),), torch.full((3,), float(dist.get_rank())))])
    text = r"replicas differ in 2 elements, first at \(1,\): rank 0 has 0.0, rank 1 has 1.0"
    with pytest.raises(AssertionError, match=text):
        gather_full(part)


@ranks(2)
def test_gaps_are_an_error():
    with pytest.raises(AssertionError, match=r"w: no rank holds 5 of 35 elements, such as \(1, 1\)"):
        gather_named({"w": flat_part(0, 8) if dist.get_rank() else flat_part(13, 35)})


@ranks(2)
def test_ranks_that_disagree_on_shape_or_dtype_are_an_error():
    rank = dist.get_rank()
    with pytest.raises(AssertionError, match=r"w: rank 1 has shape \(3,\), rank 0 has \(2,\)"):
        gather_named({"w": torch.zeros(2 + rank)})
    with pytest.raises(
        AssertionError, match=r"w: expected boxes of one dtype, got \['torch.float32', 'torch.float64'\]"
    ):
        gather_named({"w": torch.zeros(2, dtype=[torch.float32, torch.float64][rank])})


def test_a_box_outside_of_the_tensor_is_an_error():
    with pytest.raises(AssertionError, match=r"rank 0's box of \(3,\) at \(2,\) leaves the tensor"):
        gather_full(Boxed((4,), [((2,), torch.zeros(3))]))
