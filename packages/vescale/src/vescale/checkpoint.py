"""Checkpoints that load under any layout: an alias of ``vescale.ckpt``.

vescale.checkpoint.save("runs/step-100", {"model": model, "optimizer": optimizer})
vescale.checkpoint.load("runs/step-100", {"model": model, "optimizer": optimizer})
"""

from vescale.ckpt import CheckpointError, latest, load, save

__all__ = ["CheckpointError", "latest", "load", "save"]
