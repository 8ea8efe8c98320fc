"""The manifest on disk is plain JSON that says everything about a checkpoint, and a changed one is refused."""

import json
import zlib

import pytest
import torch

from vescale.ckpt import (
    Box,
    CheckpointError,
    Layout,
    Loop,
    Manifest,
    Run,
    StoredFile,
    StoredTensor,
    TensorMeta,
    load,
    read_manifest,
    save,
)


class TwoBoxes:
    """The upper and the lower half of a tensor, held by one rank."""

    def __init__(self, value: torch.Tensor) -> None:
        self.__global_shape__, self.dtype, self.value = tuple(value.shape), value.dtype, value

    def __boxes__(self):
        return [((0, 0), self.value[:2]), ((2, 0), self.value[2:])]


HALVES = Layout((4, 2), (Run(0, (0, 0), (2, 2), (Loop(2, 0, (2, 0)),)),))
LEAVES = {"lr": 0.1, "best": float("inf"), "betas": [0.9, 0.999]}


@pytest.fixture
def path(tmp_path):
    w = TwoBoxes(torch.arange(8.0).view(4, 2).bfloat16())
    save(tmp_path / "step-1", {"w": w, **LEAVES}, metadata={"note": "größer"})
    return tmp_path / "step-1"


def header_crc32(file) -> int:
    data = file.read_bytes()
    return zlib.crc32(data[: 8 + int.from_bytes(data[:8], "little")])


def test_manifest_says_what_was_saved(path):
    manifest = read_manifest(path)
    pieces = list(manifest.pieces("w"))
    assert [piece.box for piece in pieces] == [Box((0, 0), (2, 2)), Box((2, 0), (2, 2))]
    assert [piece.key for piece in pieces] == ["w[0:2, 0:2]", "w[2:4, 0:2]"]
    (file,) = path.glob("*/*.safetensors")
    assert manifest == Manifest(
        world_size=1,
        saved_at=manifest.saved_at,
        metadata={"note": "größer"},
        leaves=LEAVES,
        folder=file.parent.name,
        files={file.name: StoredFile(file.stat().st_size, header_crc32(file))},
        tensors={"w": StoredTensor(TensorMeta("bfloat16", (4, 2)), HALVES)},
    )


def test_every_tensor_and_value_has_a_line_of_its_own(path):
    lines = (path / "manifest.json").read_text().splitlines()
    assert '"best": Infinity,' in lines
    assert sum(line.startswith('"w":') for line in lines) == 1


@pytest.mark.parametrize(("old", "new"), [("0.999", "0.99"), ('"offsets": [2, 0]', '"offsets": [1, 0]')])
def test_a_changed_number_is_noticed(path, old, new):
    file = path / "manifest.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    for read in (read_manifest, lambda path: load(path, {})):
        with pytest.raises(CheckpointError, match=r"expected checksum .* of manifest\.json, got .*; it was changed"):
            read(path)


def test_pieces_that_do_not_tile_their_tensor_are_refused_even_with_a_right_checksum(path, rewrite_manifest):
    def shift(body):
        body["layouts"][0]["runs"][0]["loops"][0]["offsets"] = [1, 0]

    rewrite_manifest(path, lambda _: None)
    read_manifest(path)
    rewrite_manifest(path, shift)
    with pytest.raises(
        CheckpointError, match=r"tile tensor 'w', global shape \(4, 2\), got boxes .* overlap; use another"
    ):
        read_manifest(path)


def test_a_piece_in_an_unlisted_file_is_refused(path, rewrite_manifest):
    for change in ({"file": 1}, {"loops": [{"count": 2, "file": 1, "offsets": [2, 0]}]}):
        rewrite_manifest(path, lambda body, change=change: body["layouts"][0]["runs"][0].update(change))
        with pytest.raises(CheckpointError, match=r"expected boxes in the list of 1 files, got others"):
            read_manifest(path)


def test_a_missing_key_is_refused(path, rewrite_manifest):
    rewrite_manifest(path, lambda body: body.pop("leaves"))
    with pytest.raises(CheckpointError, match=r"manifest.json: expected the key 'leaves', got no such key; add it"):
        read_manifest(path)


REFUSED = {
    "cut": (
        lambda text: text[: len(text) // 2],
        "manifest.json: expected JSON, got other text .*, so use another checkpoint",
    ),
    "foreign": (
        lambda _: json.dumps({"weights": []}),
        "expected 'vescale-checkpoint' at format, got None; pass a directory of",
    ),
    "future": (
        lambda text: text.replace('"version": 3', '"version": 99'),
        "expected 3 at version, got 99; load it with",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_texts_are_refused_with_the_path(path, case):
    change, message = REFUSED[case]
    file = path / "manifest.json"
    file.write_text(change(file.read_text()))
    with pytest.raises(CheckpointError, match=f"^{path}: .*{message}"):
        read_manifest(path)
