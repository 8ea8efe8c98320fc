"""Change the manifest of a checkpoint on disk, with or without a new checksum."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None], *, sign: bool = True) -> None:
    """Apply ``change`` to the manifest of the checkpoint at ``path``, and sign it by the rule of the format."""
    file = path / "manifest.json"
    body = json.loads(file.read_text())
    change(body)
    if sign:
        del body["crc32"]
        body["crc32"] = f"{zlib.crc32(json.dumps(body, sort_keys=True, separators=(',', ':')).encode()):08x}"
    file.unlink()  # it may be a link
    file.write_text(json.dumps(body))


@pytest.fixture
def rewrite_manifest():
    return _rewrite
