"""`Metrics`: what a training run does per step, as one line for people and one dict for a logger.

A *row* is made at every ``every``-th step, of all steps since the row before it:

    tokens_per_second               tokens of the global batches / seconds
    mfu                             tokens_per_second * flops_per_token / (devices * peak)     arXiv 2204.02311, app. B
    exposed_communication           part of the time in which this rank waits for collectives
    pipeline_wait                   part of the time in which it waits for other stages

Between rows a step adds two numbers, and nothing is communicated or synchronized. A row reads the loss and the norm
of gradients, for which the host waits, and averages the loss over the data-parallel ranks, which is its only
collective; without ``loss`` there is none. Seconds are those of the host. Where a row reads a number of the device,
they end with its work; otherwise they end when it is launched, which differs little over many steps.
"""

import contextlib
import logging
import math
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vescale.dtensor.extension import Condition, Count, checked, group_of_ranks, on_wait, waits_of

from ._device_peaks import peak_flops
from ._parallel_model import ParallelModel
from ._progress import display
from ._wait_clock import WaitClock

logger = logging.getLogger("vescale")

Scalar = Annotated[Tensor, Condition("a tensor of one number", lambda value: value.dim() == 0)]
Positive = Annotated[float, Condition("a finite number above 0", lambda value: 0 < value < math.inf)]


@checked
class Metrics:
    """Measure the steps of a training loop. Every rank makes one and calls `step`; rank 0 prints.

    Args:
        model: the model of `vescale.parallelize`.
        optimizer: its optimizer; with it a row has the norm of gradients before clipping.
        flops_per_token: floating-point operations of forward and backward for one token, without recomputation: about
            six times the parameters, see `vescale.count_flops`; ``vescale.plan.profile(...).flops_per_token`` is the
            same number. Without it a row has no MFU.
        peak_flops_per_device: of one device in the dtype of the matrix products; by default the dense bfloat16 rate of
            this GPU, if it is in the table of ``vescale/_device_peaks.py``.
        every: steps per row.
        progress: show a progress bar in place of lines, if tqdm is installed (``pip install 'vescale[progress]'``).
        num_steps: of the whole run, for the progress bar.
        write: called with each line on rank 0; ``None`` prints nothing.
        over_ranks: memory and waits of a row are the largest of all ranks, by one more collective, not this rank's.

    Raises:
        TypeError, ValueError: an argument is no such value.

    Example:
        >>> metrics = Metrics(model, optimizer, flops_per_token=6 * 7e9, every=10)                  # doctest: +SKIP
        >>> for batch in batches:                                                                   # doctest: +SKIP
        ...     loss = model(**model.local_batch(batch)).loss
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     if row := metrics.step(tokens=batch["input_ids"].numel(), loss=loss):
        ...         wandb.log(row)
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        flops_per_token: Positive | None = None,
        peak_flops_per_device: Positive | None = None,
        every: Count = 1,
        progress: bool = False,
        num_steps: Count | None = None,
        write: Callable[[str], object] | None = print,
        over_ranks: bool = False,
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._device = torch.device(model.plan.device)
        self._flops_per_token = flops_per_token
        self._peak = peak_flops_per_device or self._peak_of_device()
        self._every, self._over_ranks = every, over_ranks
        self._num_steps = self._steps_of_row = self._tokens = 0
        is_shown = write is not None and dist.get_rank() == 0
        self._display = display(write=write, progress=progress, num_steps=num_steps) if is_shown and write else None
        self._collectives, self._messages = WaitClock(), WaitClock()
        open_meters = contextlib.ExitStack()
        open_meters.enter_context(on_wait(self._collectives))
        if model.engine is not None:
            open_meters.enter_context(model.engine.on_wait(self._messages))
        self._close_meters = weakref.finalize(self, open_meters.close)
        self._began = time.perf_counter()

    def _peak_of_device(self) -> float | None:
        if self._device.type != "cuda" or self._flops_per_token is None:
            return None
        name = torch.cuda.get_device_name()
        if (peak := peak_flops(name)) is None:
            logger.warning("Metrics: no peak is known of %s; pass peak_flops_per_device for the MFU", name)
        return peak

    @checked
    def step(self, *, tokens: Count, loss: Scalar | None = None) -> dict[str, float]:
        """Count a step, after ``optimizer.step()``. Every rank calls it, since a row may communicate.

        Args:
            tokens: in the global batch of this step, over all ranks.
            loss: of this rank, as the model returns it; the row has its mean over the data-parallel ranks.

        Returns:
            The row, ready for a logger, or an empty dict if this step has none. ``step`` counts from 1; times are
            parts of 1, memory is in bytes.
        """
        self._num_steps += 1
        self._steps_of_row += 1
        self._tokens += tokens
        if self._display is not None:
            self._display.advance()
        if self._num_steps % self._every:
            return {}
        row = {"step": self._num_steps, **self._values(loss), **self._rates()}
        if self._display is not None:
            self._display.show(row)
        return row

    def _values(self, loss: Tensor | None) -> dict[str, float]:
        """Return the loss and the norm of gradients; the host waits for them."""
        values = {}
        if loss is not None:
            values["loss"] = self._model.global_loss(loss).item()
        if (norm := getattr(self._optimizer, "grad_norm", None)) is not None:
            values["grad_norm"] = norm.item()
        return values

    def _rates(self) -> dict[str, float]:
        """Return what depends on the time since the last row, and begin a new one."""
        now = time.perf_counter()
        seconds, self._began = max(now - self._began, 1e-9), now
        num_devices = self._model.plan.world_size
        rate, num_steps = self._tokens / seconds, self._steps_of_row
        self._tokens = self._steps_of_row = 0
        rates = {
            "step_seconds": seconds / num_steps,
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / num_devices,
        }
        if self._flops_per_token is not None and self._peak:
            rates["mfu"] = rate * self._flops_per_token / (num_devices * self._peak)
        own = {"memory_peak_bytes": float(memory_peak(self._device))}
        own["exposed_communication"] = self._collectives.take() / seconds
        if self._model.engine is not None:
            own["pipeline_wait"] = self._messages.take() / seconds
        return rates | (largest_of_ranks(own, self._device) if self._over_ranks else own)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out of the row, such as that of an evaluation or a checkpoint."""
        began = time.perf_counter()
        self._collectives.is_paused = self._messages.is_paused = True
        try:
            yield
        finally:
            self._collectives.is_paused = self._messages.is_paused = False
            self._began += time.perf_counter() - began

    def close(self) -> None:
        """Stop measuring, and end the progress bar."""
        self._close_meters()
        if self._display is not None:
            self._display.close()
            self._display = None

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def memory_peak(device: torch.device) -> int:
    """Return the largest number of bytes that this process has held: on a GPU in tensors, else in memory at all."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # bytes there, KiB elsewhere


def largest_of_ranks(values: dict[str, float], device: torch.device) -> dict[str, float]:
    """Return the largest value of all ranks for each name; a collective over all of them."""
    flat = torch.tensor(list(values.values()), dtype=torch.float64, device=device)
    if dist.get_world_size() > 1:
        world = waits_of(group_of_ranks(range(dist.get_world_size())))
        world.run("all-reduce", dist.all_reduce, flat, dist.ReduceOp.MAX)
    return dict(zip(values, flat.tolist(), strict=True))
