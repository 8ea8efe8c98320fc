"""What it costs one core to look at every byte of a checkpoint: checksums of blocks, and hashes of replicas.

CRC-32 is that of zlib, and of zlib-ng where it is installed (`pip install vescale-ckpt[fast]`). The multilinear hash is
that of replicas on a GPU, here on the CPU. A copy is beside them, as saves and loads copy what they look at.
"""

from __future__ import annotations

import functools
import statistics
import zlib
from collections.abc import Callable

import torch
from measure import time_in_turns
from targets import Targets

from vescale.ckpt._format.crc32 import crc32
from vescale.ckpt._format.data_files import BLOCK_BYTES, bytes_of
from vescale.ckpt._save.fingerprints import fingerprint

NUM_BYTES = 2**28
BASELINE = "CRC-32, zlib"


def run(num_rounds: int) -> Targets:
    """Measure in this process."""
    values = torch.randn(NUM_BYTES // 4)
    copy = torch.zeros_like(values)
    cases: dict[str, Callable[[], object]] = {BASELINE: functools.partial(_blocks, zlib.crc32, values)}
    if crc32 is not zlib.crc32:
        cases["CRC-32, zlib-ng"] = functools.partial(_blocks, crc32, values)
    cases["multilinear hash"] = functools.partial(fingerprint, values, on_cpu=False)
    cases["copy"] = functools.partial(copy.copy_, values)
    seconds = time_in_turns(cases, num_rounds=num_rounds)
    speed = {case: f"{NUM_BYTES / 1e9 / statistics.median(own):.1f}" for case, own in seconds.items()}
    return Targets(
        f"{NUM_BYTES / 2**20:.0f} MiB on one core",
        BASELINE,
        seconds,
        dict.fromkeys(cases, BASELINE),
        (),
        {"GB/s": speed},
    )


def _blocks(function: Callable[[memoryview], int], values: torch.Tensor) -> None:
    data = bytes_of(values)
    for start in range(0, len(data), BLOCK_BYTES):
        function(data[start : start + BLOCK_BYTES])
