"""DTensor core of veScale: torch's own DTensor, made equal to one device.

Importing this package registers rules with torch's dispatcher for DTensors: random operators that draw the values of
one device, operators that are right or refused, ragged and interleaved placements, and a ``repr`` that names the rank
and the box of its values. Plain tensors are untouched. :func:`disabled` removes all rules, or one family, to compare
with stock torch.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from . import debug, extension, random
from ._deferred import deferred_init, is_deferred, materialize
from ._exact import exact, set_exact
from ._install import disabled, register
from ._operators.strict import ImplicitRedistributionError, strict
from ._placements import InterleavedShard, RaggedShard
from ._placements.redistribute import distribute_tensor
from ._rank_checks import check_ranks
from ._torch_range import warn_if_untested
from .errors import UnsupportedOperator, UnsupportedPlacement, UnsupportedRandomOperator

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
    "check_ranks",
    "debug",
    "deferred_init",
    "disabled",
    "distribute_tensor",
    "exact",
    "extension",
    "init_device_mesh",
    "is_deferred",
    "materialize",
    "random",
    "set_exact",
    "strict",
]

warn_if_untested()
register()
