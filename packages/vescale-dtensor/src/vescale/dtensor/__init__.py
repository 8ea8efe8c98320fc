"""DTensor core of veScale: torch's own DTensor, made equal to one device.

Importing this package registers rules with torch's dispatcher for DTensors: random operators that draw what one device
draws, operators that are right or refused, ragged and interleaved placements, and a ``repr`` that says whose values it
shows. Plain tensors are untouched. :func:`disabled` takes the rules out, all or by family, to compare with stock torch.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from . import debug, random
from ._deferred import deferred_init, is_deferred, materialize
from ._install import disabled, register
from ._layout.boxes import flat_range_boxes
from ._layout.shards import local_views
from ._operators.strict import ImplicitRedistributionError, strict
from ._placements import InterleavedShard, RaggedShard, UnsupportedPlacement
from ._placements.collectives import group_of_ranks
from ._placements.distribute import distribute_tensor
from .errors import UnsupportedOperator, UnsupportedRandomOperator

__all__ = [
    "DTensor",
    "DeviceMesh",
    "ImplicitRedistributionError",
    "InterleavedShard",
    "Partial",
    "Placement",
    "RaggedShard",
    "Replicate",
    "Shard",
    "UnsupportedOperator",
    "UnsupportedPlacement",
    "UnsupportedRandomOperator",
    "debug",
    "deferred_init",
    "disabled",
    "distribute_tensor",
    "flat_range_boxes",
    "group_of_ranks",
    "init_device_mesh",
    "is_deferred",
    "local_views",
    "materialize",
    "random",
    "strict",
]

register()
