"""What DDP leaves on parameters for other packages: attributes, so that neither side imports the other.

parameter._vescale_takes_gradients    a `Taker`: takes local gradients from elsewhere than autograd (`_taker.py`)
parameter._vescale_memory             a `Memory`: hears of tensors over the memory of the parameter, which are then
                                      guarded as the parameter is (`_parameters/guard.py`)
"""

from __future__ import annotations

__all__ = ["TAKER", "ParameterAttribute"]

TAKER = "_vescale_takes_gradients"


class ParameterAttribute:
    """The value of such an attribute. Copies of a parameter, also through pickle, have None: no DDP holds them."""

    def __reduce__(self) -> tuple:
        return _nobody, ()


def _nobody() -> None:
    return None
