"""Save a state from any number of ranks.

Three rounds (see ``_control.py``):

    1. every rank lists what it holds        rank 0 creates the folder, and asks one rank for each table of names
    2. every rank sends its boxes            rank 0 puts them together, and tells all what they hold
    3. every rank derives and writes its     rank 0 compares replicas, writes the manifest and commits
       share

An asynchronous save copies the share of each rank in a round of its own before the last one, which a thread runs
(``background.py``). A failure in any round leaves ``path`` unchanged.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from .._background import background_control, settle, start
from .._checked import CheckedInside, Count, FilePath, checked
from .._control import open_control
from .saving import Asked, Given, Offer, Options, Saving, Share, Written
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
        process_group: the ranks that save, with a CPU backend such as gloo for small collectives. Default: all
            ranks, with a temporary gloo group if the default group has no CPU backend.

    Raises:
        CheckpointError: the state cannot be stored or the path cannot be written; the text is the same on all ranks.
        RuntimeError: a rank has ended during the save; the text names it. A checkpoint at ``path`` is unchanged then.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> save("runs/step-10", {"model": model, "step": 10}, overwrite=True, keep_last=3)
    """
    options = Options(path, metadata, overwrite, keep_last, check_replicas, async_)
    with open_control(process_group) as control, torch.no_grad():
        saving = Saving(options, state, control)
        discard = saving.discard

        def begin() -> Given:
            settle()
            return saving.begin()

        def write(share: Share) -> Written:
            saving.take(share)
            return saving.write()

        try:
            asked = control.run_round(begin, saving.choose, result=Given, share=Asked, on_failure=discard)
            share = control.run_round(
                lambda: saving.offer(asked), saving.plan, result=Offer, share=Share, on_failure=discard
            )
            if not async_:
                control.run_round(lambda: write(share), saving.commit, result=Written, on_failure=discard)
                return
            own = background_control(control)
            control.run_round(lambda: saving.take(share, _staging.copies), control.no_shares, on_failure=discard)
        except BaseException:  # an interrupt or a lost peer, which is not an error of all ranks
            discard()
            raise

    def finish() -> None:
        try:
            own.run_round(saving.write, saving.commit, result=Written, on_failure=discard)
        except BaseException:
            discard()
            raise

    start(saving.path, finish)


_staging = Staging()
