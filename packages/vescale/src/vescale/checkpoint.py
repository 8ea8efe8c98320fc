"""Checkpoints that load under any layout: an alias of ``vescale.ckpt``.

vescale.checkpoint.save("runs/step-100", {"model": model, "optimizer": optimizer})
vescale.checkpoint.load("runs/step-100", {"model": model, "optimizer": optimizer})
"""

from vescale.ckpt import CheckpointError, PerRank, diff, latest, load, load_dcp, save, save_dcp, verify, wait

__all__ = [
    "CheckpointError",
    "PerRank",
    "diff",
    "latest",
    "load",
    "load_dcp",
    "save",
    "save_dcp",
    "verify",
    "wait",
]
