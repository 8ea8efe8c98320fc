"""Any manifest with a right checksum either reads as what it says, or is refused with a CheckpointError."""

import dataclasses
import json
import zlib

import pytest
import torch

from vescale.ckpt import CheckpointError, load, read_manifest, save
from vescale_testing.json_mutations import check_reader


def sign(tree):
    """Renew the checksum of a manifest, if it still has one."""
    if not isinstance(tree, dict) or not isinstance(tree.get("crc32"), str) or len(tree["crc32"]) != 8:
        return tree
    body = {key: value for key, value in tree.items() if key != "crc32"}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {**tree, "crc32": f"{zlib.crc32(canonical.encode()):08x}"}


def write(manifest, crc32):
    """Return the text of a manifest, from its public attributes."""
    layouts = list({id(tensor.layout): tensor.layout for tensor in manifest.tensors.values()}.values())
    tensors = {
        name: {"dtype": tensor.meta.dtype, "layout": next(i for i, own in enumerate(layouts) if own is tensor.layout)}
        for name, tensor in manifest.tensors.items()
    }
    files = [
        {"name": name, "bytes": file.num_bytes, "header_crc32": f"{file.header_crc32:08x}"}
        for name, file in manifest.files.items()
    ]
    names = ("world_size", "saved_at", "metadata", "leaves", "folder", "optimizers")
    tree = {name: getattr(manifest, name) for name in names}
    head = {"format": "vescale-checkpoint", "version": 3, "crc32": crc32}
    body = {**head, **tree, "files": files, "layouts": list(map(dataclasses.asdict, layouts)), "tensors": tensors}
    return json.dumps(body)


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "step-1", {"w": torch.ones(2, 3), "lr": 0.1, "groups": [{"betas": (0.9, 0.99)}]}, metadata={"n": 1})
    return tmp_path / "step-1"


@pytest.mark.parametrize("max_examples", [1000, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_every_mutation(path, max_examples):
    file = path / "manifest.json"

    def read(text):
        file.write_text(text)
        return read_manifest(path), json.loads(text)["crc32"]

    tried = check_reader(
        file.read_text(), read, lambda found: write(*found), error=CheckpointError, sign=sign, max_examples=max_examples
    )
    assert tried > 1000 + max_examples


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body["layouts"][0].update(shape=[2, 3.0]), r"an integer at layouts\[0\]\.shape\[1\], got 3\.0"),
        (lambda body: body["layouts"][0].update(shape=[2, -3]), r"an integer from 0 to .* at layouts\[0\]\.shape\[1\]"),
        (lambda body: body["layouts"][0]["runs"][0].update(sizes=[2, 4]), r"boxes inside of the global shape \(2, 3\)"),
        (lambda body: body["layouts"][0]["runs"][0].update(sizes=[2]), r"boxes inside of the global shape \(2, 3\)"),
        (lambda body: body["layouts"][0]["runs"][0].update(sizes=[0, 3]), r"an integer from 1 to .*sizes\[0\], got 0"),
        (lambda body: body["layouts"].append({"shape": [], "runs": []}), r"tensors of each of 2 layouts, got \[0\]"),
        (lambda body: body["tensors"]["w"].update(layout=1), r"tensors of each of 1 layouts, got \[1\]"),
        (lambda body: body["tensors"]["w"].update(dtype="int3"), r"a dtype of .*, got 'int3' at tensors\.w"),
        (lambda body: body["files"][0].update(name="../x"), r"files .*, got '\.\./x' at files"),
        (lambda body: body["files"].append(body["files"][0]), "expected distinct names of files, got one twice"),
        (lambda body: body.update(folder="../save-00000000"), "name of a folder .*, got '../save-00000000'"),
        (lambda body: body.update(version=True), "expected 3 at version, got True; load it with the vescale-ckpt"),
        (lambda body: body.update(world_size=2**63), "an integer from 1 to .* at world_size, got 9223372036854775808"),
    ],
)
def test_the_error_says_where(path, rewrite_manifest, change, message):
    rewrite_manifest(path, change)
    for reader in (read_manifest, lambda path: load(path, {})):
        with pytest.raises(CheckpointError, match=f"^{path}: manifest.json: .*{message}"):
            reader(path)
