"""Checkpoints that load under any layout: one file format, any mesh, any degrees.

    from vescale.ckpt import save, load

    save("runs/step-100", {"model": model, "optimizer": optimizer, "step": 100})
    load("runs/step-100", {"model": model, "optimizer": optimizer, "step": 0})

A checkpoint is a directory of safetensors files and one ``manifest.json``, without pickle. Each element of a tensor is
stored once, by one of the ranks that hold it, under the tensor's name and its offsets in the global tensor. A load uses
names and boxes alone, so a state moves between any data, tensor and pipeline parallel degrees, and one process.

Supported values are plain tensors, torch's ``DTensor``, and any value with

    value.__global_shape__      the shape of the global tensor
    value.__boxes__()           list of (offsets in the global tensor, view of that block)

What every rank has its own of, such as the position of a data loader, goes into a ``PerRank``.
"""

from ._background import wait
from ._errors import CheckpointError
from ._exchange.dcp_load import load_dcp
from ._exchange.dcp_save import save_dcp
from ._exchange.hf_load import load_hf
from ._exchange.hf_rules import WeightRule
from ._exchange.hf_save import save_hf
from ._format.boxes import Box
from ._format.inspect import read_manifest, verify
from ._format.layouts import Layout, Loop, Run
from ._format.manifest import Manifest, Piece, StoredFile, StoredTensor, TensorMeta
from ._load.difference import Difference, diff
from ._load.latest import latest
from ._load.load import load
from ._save.save import save
from ._state.per_rank import PerRank
from ._torch_range import warn_if_untested

__all__ = [
    "Box",
    "CheckpointError",
    "Difference",
    "Layout",
    "Loop",
    "Manifest",
    "PerRank",
    "Piece",
    "Run",
    "StoredFile",
    "StoredTensor",
    "TensorMeta",
    "WeightRule",
    "diff",
    "latest",
    "load",
    "load_dcp",
    "load_hf",
    "read_manifest",
    "save",
    "save_dcp",
    "save_hf",
    "verify",
    "wait",
]

warn_if_untested()
