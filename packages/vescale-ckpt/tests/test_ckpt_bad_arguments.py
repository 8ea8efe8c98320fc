"""A wrong argument is named where it was given: expected, got."""

import re

import pytest

from vescale.ckpt import load, read_manifest, save, verify

ROWS = {
    "save, path": (lambda _: save(None, {}), "save: expected str or PathLike for path, got None"),
    "save, state": (lambda path: save(path / "a", None), "expected a dict of names to models"),
    "save, metadata": (
        lambda path: save(path / "a", {}, metadata=[1]),
        "expected Mapping or None for metadata, got",
    ),
    "save, metadata keys": (lambda path: save(path / "a", {}, metadata={"a": {1}}), "expected metadata to be a JSON"),
    "load, path": (lambda _: load(3, {}), "load: expected str or PathLike for path, got 3"),
    "load, state": (lambda path: load(path / "step", None), "expected a dict of names to models"),
    "load, ignore": (lambda path: load(path / "step", {}, ignore=3), "expected Collection for ignore, got 3"),
    "load, ignore, text": (lambda path: load(path / "step", {}, ignore="a"), "expected Collection for ignore, got 'a'"),
    "read_manifest": (lambda _: read_manifest(None), "read_manifest: expected str or PathLike for path, got None"),
    "read_manifest, NUL": (
        lambda _: read_manifest("a\0b"),
        "expected a checkpoint, got embedded null byte",
    ),
    "verify": (lambda _: verify(3), "verify: expected str or PathLike for path, got 3"),
}


@pytest.mark.parametrize("row", ROWS)
def test_refused(tmp_path, row):
    save(tmp_path / "step", {"a": 1})
    call, message = ROWS[row]
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        call(tmp_path)
