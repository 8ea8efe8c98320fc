"""Checkpoints that load under any layout: an alias of ``vescale.ckpt``.

vescale.checkpoint.save("runs/step-100", {"model": model, "optimizer": optimizer})
vescale.checkpoint.load("runs/step-100", {"model": model, "optimizer": optimizer})
"""

from vescale.ckpt import (
    CheckpointError,
    PerRank,
    WeightRule,
    diff,
    latest,
    load,
    load_dcp,
    load_hf,
    save,
    save_dcp,
    save_hf,
    verify,
    wait,
)

__all__ = [
    "CheckpointError",
    "PerRank",
    "WeightRule",
    "diff",
    "latest",
    "load",
    "load_dcp",
    "load_hf",
    "save",
    "save_dcp",
    "save_hf",
    "verify",
    "wait",
]
