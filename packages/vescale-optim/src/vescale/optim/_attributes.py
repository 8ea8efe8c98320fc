"""What DDP leaves on parameters for other packages: attributes, so that neither side imports the other.

parameter._vescale_memory    a `Memory`: gets tensors over the memory of the parameter, and guards them as it guards the
                             parameter (`_parameters/guard.py`, `_parameters/sharded_values.py`)

Gradient receivers are attached through `vescale.dtensor.extension`.
"""

from __future__ import annotations

__all__ = ["MEMORY", "ParameterAttribute"]

MEMORY = "_vescale_memory"


class ParameterAttribute:
    """The value of such an attribute. Copies of a parameter, also through pickle, have None: no DDP holds them."""

    def __reduce__(self) -> tuple:
        return _nobody, ()


def _nobody() -> None:
    return None
