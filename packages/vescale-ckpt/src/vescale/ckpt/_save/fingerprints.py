"""One number for the bits of a tensor, computed where the tensor is: replicas that differ have other numbers.

On the CPU it is the CRC-32 of the CRC-32s of its blocks. Elsewhere that would need a copy on the host, so it is the sum
of 32-bit words times fixed random 64-bit weights, modulo 2**64: the multilinear hash of D. Lemire and O. Kaser,
"Strongly universal string hashing is fast", The Computer Journal 57(11), 2014. Words of long tensors are summed row by
row, and then the sums. Values that differ have equal numbers with a probability of 2**-32, wherever they differ.
"""

from __future__ import annotations

import functools

import numpy as np
import torch

from .._format.crc32 import crc32
from .._format.data_files import checksums, resolved

_ROW_WORDS = 2**17
_BATCH_ROWS = {"cpu": 1}  # what fits into the cache of a processor; other devices take more rows in one call
_OTHER_BATCH_ROWS = 64


def fingerprint(values: torch.Tensor, *, on_cpu: bool) -> int:
    """Return the number of a tensor, which depends on its bits in row-major order.

    Args:
        values: the tensor.
        on_cpu: whether it, and all its replicas, are on the CPU: the two kinds of numbers cannot be compared.
    """
    if on_cpu:
        return crc32(np.array(checksums(values), dtype="<u4").tobytes())
    sums = _row_sums(_words(values))
    while sums.numel() > 1:
        sums = _row_sums(sums.view(torch.int32))
    return int(sums)


def _words(values: torch.Tensor) -> torch.Tensor:
    """Return the bits as 32-bit words, with zeros behind the last ones."""
    whole = resolved(values).contiguous()
    flat = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)  # dims of size 1 may have any stride
    missing = -flat.numel() % 4
    if missing or flat.storage_offset() % 4:
        flat = torch.nn.functional.pad(flat, (0, missing)) if missing else flat.clone()
    return flat.view(torch.int32)


def _row_sums(words: torch.Tensor) -> torch.Tensor:
    weights, sums = _weights(words.device), []
    whole = words.numel() // _ROW_WORDS * _ROW_WORDS
    rows = words[:whole].view(-1, _ROW_WORDS)
    for batch in rows.split(_BATCH_ROWS.get(words.device.type, _OTHER_BATCH_ROWS)):
        sums.append((batch * weights).sum(1))
    rest = words[whole:]
    sums.append((rest * weights[: rest.numel()]).sum(0, keepdim=True))
    return torch.cat(sums)


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    draw = np.random.Generator(np.random.PCG64(0))
    return torch.from_numpy(draw.integers(-(2**63), 2**63, size=_ROW_WORDS)).to(device)
