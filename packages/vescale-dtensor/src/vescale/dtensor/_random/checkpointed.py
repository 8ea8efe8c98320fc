"""The random streams as an object of a checkpoint, whose state is the same on every rank and under every layout.

`random.get_state` holds the generators of all devices that a process sees. Of these a rank uses its current one alone,
which is another one on every rank, and another machine has another number of them. So the state here has one generator
per kind of device: that of the current one, from which this rank draws. It moves as that of one device, so all ranks
have the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checked import checked
from .state import get_state, kinds_of, set_state


class Streams:
    """Both random streams of this process, to be saved and loaded with a model and its optimizer.

    A training with dropout continues exactly only from the positions of its streams. The state is equal on all ranks
    and independent of their number: torch's CPU generator, the generator of the current accelerator if one is in use,
    and seed and counter of the stream "philox".

    Example:
        >>> import torch
        >>> streams = Streams()
        >>> state = streams.state_dict()
        >>> drawn = torch.rand(3)
        >>> streams.load_state_dict(state)
        >>> torch.equal(torch.rand(3), drawn)
        True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the present positions, a flat dict of tensors and integers."""
        state = get_state()
        for kind, index in _current_devices(state).items():
            state[f"torch.{kind}"] = state[f"torch.{kind}"][index].clone()
        return state

    @checked
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the positions of `state_dict`, on the current device.

        Args:
            state_dict: what `state_dict` has returned, in this process or another.

        Raises:
            TypeError: not a dict.
            ValueError: of another version, with missing, unknown or malformed entries, or of a kind of device that is
                not in use here. Nothing has changed then.
        """
        present = get_state()
        state = dict(state_dict)
        in_use = _current_devices(present)
        for kind in kinds_of(state):
            key, value = f"torch.{kind}", state[f"torch.{kind}"]
            if kind not in in_use:
                raise ValueError(
                    f"random state: expected generators of devices in use here ({', '.join(in_use) or 'none'}), got "
                    f"{key}; continue on the kind of device that was saved, or leave the streams out of the state"
                )
            rows = present[key]
            if not isinstance(value, Tensor) or value.dtype != rows.dtype or value.shape != rows.shape[1:]:
                found = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise ValueError(
                    f"random state: expected {key} to be a {rows.dtype} tensor of shape {tuple(rows.shape[1:])}, got "
                    f"{found}"
                )
            rows[in_use[kind]] = value
            state[key] = rows
        set_state(state)


def _current_devices(state: dict[str, Any]) -> dict[str, int]:
    """Return the index of the current device of every kind of accelerator in a state of `get_state`."""
    return {kind: torch.get_device_module(kind).current_device() for kind in kinds_of(state)}
