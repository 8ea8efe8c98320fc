"""Checkpoints that load under any layout: one file format, any mesh, any degrees.

    from vescale.ckpt import save, load

    save("runs/step-100", {"model": model, "optimizer": optimizer, "step": 100})
    load("runs/step-100", {"model": model, "optimizer": optimizer, "step": 0})

A checkpoint is a directory of safetensors files and one ``manifest.json``; there is no pickle in it. Every tensor is
stored by its name and its place in the global tensor, once, by one of the ranks that hold it. Loading asks only for
names and boxes, so a model and its optimizer move freely between data, tensor and pipeline parallel degrees, and
one process.

The package knows plain tensors, torch's ``DTensor``, and any value with

    value.__global_shape__      the shape of the global tensor
    value.__boxes__()           list of (offsets in the global tensor, tensor view of that block)
"""

from ._errors import CheckpointError
from ._load import load
from ._manifest import Manifest, Piece, StoredTensor, TensorMeta
from ._read import read_manifest, verify
from ._save import save

__all__ = [
    "CheckpointError",
    "Manifest",
    "Piece",
    "StoredTensor",
    "TensorMeta",
    "load",
    "read_manifest",
    "save",
    "verify",
]
