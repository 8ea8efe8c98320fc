"""Checksums are those of zlib, with and without zlib-ng."""

import importlib
import sys
import zlib

import pytest

from vescale.ckpt._format import crc32


@pytest.mark.parametrize("content", [b"", b"a", bytes(range(256)) * 100])
def test_the_result_is_that_of_zlib(content):
    assert crc32.crc32(memoryview(content)) == zlib.crc32(content)


def test_without_zlib_ng(monkeypatch):
    monkeypatch.setitem(sys.modules, "zlib_ng", None)
    assert importlib.reload(crc32).crc32 is zlib.crc32


def test_with_zlib_ng(monkeypatch):
    def fast(content):
        return zlib.crc32(content)

    module = type(sys)("zlib_ng")
    module.zlib_ng = type("zlib_ng", (), {"crc32": staticmethod(fast)})
    monkeypatch.setitem(sys.modules, "zlib_ng", module)
    assert importlib.reload(crc32).crc32 is fast


@pytest.fixture(autouse=True)
def _as_before():
    yield
    importlib.reload(crc32)
