"""A load reads exactly the overlaps, and a checkpoint that does not fit is reported in one message about all ranks."""

import torch

from vescale.ckpt import Box, Manifest, Piece, StoredTensor, TensorMeta
from vescale.ckpt._load.plan import Request, compare, find_mismatch, plan_load


def stored(shape: tuple[int, ...], *boxes: Box, dtype: str = "float32") -> StoredTensor:
    pieces = tuple(Piece(box, f"data-{i}-0.safetensors", str(box), 0) for i, box in enumerate(boxes))
    return StoredTensor(TensorMeta(dtype, shape), pieces)


def manifest_of(tensors=None, leaves=None) -> Manifest:
    return Manifest(world_size=1, metadata={}, leaves=leaves or {}, files={}, tensors=tensors or {})


def mismatch(requests, manifest, *, allow_dtype_cast=False, **options) -> str | None:
    comparisons = [compare(request, manifest, allow_dtype_cast=allow_dtype_cast) for request in requests]
    return find_mismatch(comparisons, manifest, **options)


def test_reads_fill_each_target_once_from_the_pieces_that_overlap():
    manifest = manifest_of({"w": stored((6, 4), *(Box((2 * i, 0), (2, 4)) for i in range(3)))})
    target = Box((1, 1), (4, 2))
    plan = plan_load({"w": [target], "other": [Box((0,), (1,))]}, manifest)
    counts = torch.zeros(target.sizes, dtype=torch.int64)
    for reads in plan.values():
        for read in reads:
            assert read.piece.box.contains(read.box)
            counts[read.box.slices(inside=target)] += 1
    assert (counts == 1).all()
    assert list(plan) == [f"data-{i}-0.safetensors" for i in range(3)]
    assert not any(read.box == read.piece.box for reads in plan.values() for read in reads)


def test_a_target_apart_from_a_piece_reads_nothing_of_it():
    manifest = manifest_of({"w": stored((4,), Box((0,), (2,)), Box((2,), (2,)))})
    assert list(plan_load({"w": [Box((2,), (2,))]}, manifest)) == ["data-1-0.safetensors"]


MANIFEST = manifest_of({f"model/{n}.weight": stored((4, 4), Box.full((4, 4))) for n in "abc"}, {"step": 3})
META = TensorMeta("float32", (4, 4))


def test_stages_that_together_request_all_names_fit():
    stages = [Request({"model/a.weight": META}, {"step": 0}), Request({f"model/{n}.weight": META for n in "bc"}, {})]
    assert mismatch(stages, MANIFEST) is None
    assert "stored and requested by no rank (1): 'model/c.weight'" in mismatch(
        [stages[0], Request({"model/b.weight": META}, {})], MANIFEST
    )


def test_names_of_another_model_are_reported_with_ranks_and_the_nearest():
    asked = {f"model/{n}.weight": META for n in "ab"} | {"model/cc.weight": META}
    text = mismatch([Request(asked, {"step": 0})] * 2, MANIFEST)
    assert "requested and not stored (1): 'model/cc.weight' (ranks 0-1) (nearest stored: 'model/c.weight')" in text
    assert "stored and requested by no rank (1): 'model/c.weight'" in text


def test_different_shapes_and_dtypes_are_reported():
    asked = {f"model/{n}.weight": META for n in "ab"} | {"model/c.weight": TensorMeta("bfloat16", (4, 8))}
    requests = [Request(asked, {"step": 0})]
    text = mismatch(requests, MANIFEST)
    assert "different global shape (1): 'model/c.weight': expected (4, 8), got (4, 4) in the checkpoint" in text
    assert "different dtype (1): 'model/c.weight': expected bfloat16, got float32 in the checkpoint" in text
    assert "dtype" not in mismatch(requests, MANIFEST, allow_dtype_cast=True)
    assert "global shape" in mismatch(requests, MANIFEST, strict=False)


def test_long_lists_are_cut_and_counted():
    text = mismatch([Request({f"x{i}": META for i in range(1000)}, {})], MANIFEST)
    assert "requested and not stored (1000)" in text
    assert "and 995 more" in text
    assert len(text) < 1500


def test_leftovers_can_be_ignored_by_name_and_by_leading_part():
    manifest = manifest_of(
        {"model/w": stored((4, 4), Box.full((4, 4))), "optimizer/w": stored((4, 4), Box.full((4, 4)))}, {"step": 1}
    )
    asked = [Request({"model/w": META}, {})]
    assert "pass ignore=['optimizer', 'step']" in mismatch(asked, manifest)
    assert mismatch(asked, manifest, ignore=["optimizer", "step"]) is None
    assert mismatch(asked, manifest, ignore=["opt", "step"]) is not None
    assert mismatch(asked, manifest, strict=False) is None


def test_a_value_of_another_kind_is_reported():
    text = mismatch([Request({"step": META}, {"model/a.weight": 1})], MANIFEST, strict=False)
    assert "'step': expected a tensor, got a plain value in the checkpoint" in text
    assert "'model/a.weight': expected a plain value, got a tensor in the checkpoint" in text


def test_another_number_of_parameter_groups_is_reported():
    manifest = manifest_of(leaves={"optimizer/param_groups": [{"lr": 0.1}, {"lr": 0.2}]})
    text = mismatch([Request({}, {"optimizer/param_groups": [{"lr": 0.1}]})], manifest)
    assert "different number of groups (1): 'optimizer/param_groups': expected 1, got 2 in the checkpoint" in text
