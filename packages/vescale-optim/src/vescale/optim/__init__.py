"""Data parallelism, ZeRO and distributed optimizers that leave the result as it is on one device."""

from .clip import clip_grad_norm_
from .ddp import DDP
from .distributed_optimizer import DistributedOptimizer
from .muon import Muon

__all__ = ["DDP", "DistributedOptimizer", "Muon", "clip_grad_norm_"]
