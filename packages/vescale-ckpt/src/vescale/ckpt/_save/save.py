"""Save a state from any number of ranks as a checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .._checked import CheckedInside, Count, FilePath, checked
from .._control import open_control
from .._progress import Progress
from .checkpoint import CheckpointWriter, Options
from .saving import Saving
from .staging import Staging


@checked
def save(
    path: FilePath,
    state: CheckedInside[dict[str, Any]],
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    keep_last: Count | None = None,
    check_replicas: bool = True,
    async_: bool = False,
    progress: bool | Callable[[int, int], object] = False,
    process_group: CheckedInside[dist.ProcessGroup | None] = None,
) -> None:
    """Save a state as a checkpoint that loads under any other layout.

    A collective: all ranks of the group call it with the same path. Each element is stored once, by one of the ranks
    that hold it, balanced by bytes. The checkpoint appears at ``path`` when it is complete and on disk, or not at all.

    Args:
        path: directory to create, on a file system shared by all ranks, or a URL that fsspec knows, such as
            ``"s3://bucket/run/step-100"`` (``pip install vescale-ckpt[fsspec]``). Its parents are created.
        state: nested dict (or list) of objects with ``state_dict`` and ``load_state_dict`` (models, optimizers,
            schedulers), tensors, DTensors, arrays of numpy, values with ``__global_shape__`` and ``__boxes__()``,
            bytes, JSON values, and `PerRank` for what every rank has its own of. An optimizer of ``torch.optim`` is
            stored by parameter names and needs its model in the same state.
        metadata: a JSON object to store in the manifest.
        overwrite: replace a checkpoint at ``path``; it stays in place until the new one is complete.
        keep_last: when the checkpoint is complete, remove those that are named like it apart from the number at the end
            of the name, in the same directory, but the last ``keep_last`` that were saved.
        check_replicas: compare replicas between ranks by hashes, and refuse to save if they differ. The cost is one
            pass over the replicated bytes of each rank. If False and replicas differ, the stored tensor may mix parts
            of several ranks.
        async_: return when what this rank writes has been copied to host memory, and write in a thread. The state may
            change then. Errors come from `wait`, or from the next ``save``, ``load`` or ``latest``, which wait for a
            save that runs. The copy stays allocated for the next save.
        progress: show on the terminal of the first rank how far it is, or call this function there with the bytes that
            are written and all that the rank writes, about as many as each other rank. With ``async_``, the thread
            calls it. An error in it fails the save.
        process_group: the ranks that save, with a CPU backend such as gloo for small collectives. Default: all
            ranks, with a gloo group of this package if the default group has no CPU backend.

    Raises:
        CheckpointError: the state cannot be stored or the path cannot be written; the text is the same on all ranks.
        RuntimeError: a rank has ended during the save; the text names it. A checkpoint at ``path`` is unchanged then.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> save("runs/step-10", {"model": model, "step": 10}, overwrite=True, keep_last=3)
    """
    options = Options(path, metadata, overwrite, keep_last, async_)
    with open_control(process_group) as control, torch.no_grad():
        writer = CheckpointWriter(options, control.rank, Progress.asked("saved", progress, control.rank))
        saving = Saving(
            writer,
            state,
            control,
            check_replicas=check_replicas,
            otherwise=", or pass check_replicas=False to store one of them",
            copies=_staging.copies if async_ else list,
        )
        saving.run(is_async=async_)


_staging = Staging()
