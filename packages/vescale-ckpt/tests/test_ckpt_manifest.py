"""The manifest's text reads back to the same manifest, and a changed text is refused."""

import json

import pytest

from vescale.ckpt import Box, CheckpointError, Manifest, Piece, StoredTensor, TensorMeta
from vescale.ckpt._format.manifest import manifest_from_text, manifest_to_text


def tensor(*boxes: Box) -> StoredTensor:
    pieces = tuple(Piece(box, "data-0-0.safetensors", f"w{box}", 0xDEADBEEF) for box in boxes)
    return StoredTensor(TensorMeta("bfloat16", (4, 2)), pieces)


def manifest(stored: StoredTensor) -> Manifest:
    return Manifest(
        world_size=2,
        metadata={"note": "größer"},
        leaves={"lr": 0.1, "best": float("inf"), "betas": [0.9, 0.999]},
        files={"data-0-0.safetensors": 123},
        tensors={"w": stored},
    )


WHOLE = manifest(tensor(Box((0, 0), (2, 2)), Box((2, 0), (2, 2))))


def test_text_reads_back():
    assert manifest_from_text(manifest_to_text(WHOLE), where="here") == WHOLE


def test_every_tensor_and_value_has_a_line_of_its_own():
    lines = manifest_to_text(WHOLE).splitlines()
    assert '"lr": 0.1,' in lines
    assert sum(line.startswith('"w":') for line in lines) == 1


@pytest.mark.parametrize(("old", "new"), [("0.999", "0.99"), ('"offsets": [2, 0]', '"offsets": [0, 0]')])
def test_a_changed_number_is_noticed(old, new):
    text = manifest_to_text(WHOLE)
    assert old in text
    with pytest.raises(CheckpointError, match=r"expected checksum .* of manifest\.json, got .*; it was changed"):
        manifest_from_text(text.replace(old, new), where="here")


def test_pieces_that_do_not_tile_their_tensor_are_refused_even_with_a_right_checksum():
    shifted = manifest(tensor(Box((0, 0), (2, 2)), Box((1, 0), (2, 2))))
    with pytest.raises(CheckpointError, match=r"tile tensor 'w', global shape \(4, 2\), got boxes .* overlap"):
        manifest_from_text(manifest_to_text(shifted), where="here")


REFUSED = {
    "cut": (lambda text: text[: len(text) // 2], "expected JSON in manifest"),
    "foreign": (
        lambda _: json.dumps({"weights": []}),
        "expected format 'vescale-checkpoint' .*, got None",
    ),
    "future": (
        lambda text: text.replace('"version": 1', '"version": 99'),
        "expected .* version 1, got 99",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_texts_are_refused_with_the_path(case):
    change, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=f"^/runs/step-1: .*{message}"):
        manifest_from_text(change(manifest_to_text(WHOLE)), where="/runs/step-1")
