"""Load a folder of ``torch.distributed.checkpoint.save`` (DCP) into a state under any layout.

Rank 0 reads ``.metadata`` and the values that are no tensors. It sends all ranks a list of tensors, places and JSON
values, from which each makes the same `Manifest`; the rest is the load of any source.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._checked import CheckedInside, FilePath, checked
from .._control import open_control
from .._errors import require_same
from .._format.manifest import Manifest
from .._load.load import Source, load_from
from .dcp_folder import Folder, Listing, Reading, require_pickle


@checked
def load_dcp(
    folder: FilePath,
    state: CheckedInside[dict[str, Any]],
    *,
    allow_pickle: bool = False,
    strict: bool = True,
    ignore: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    allow_dtype_cast: bool = False,
    process_group: CheckedInside[dist.ProcessGroup | None] = None,
) -> Manifest:
    """Load a folder of ``torch.distributed.checkpoint.save`` (DCP) into a state under any layout.

    A collective: all ranks of the group call it. Each rank reads only the rows that it holds, in place. The state dict
    that was saved is matched by its keys: ``{"model": ..., "optimizer": ...}`` of ``get_state_dict`` loads into
    ``{"model": model, "optimizer": optimizer}``.

    Args:
        folder: with ``.metadata`` and ``__<rank>_<n>.distcp`` files.
        state: as for ``load``. Optimizers must have been saved by parameter names, as ``get_optimizer_state_dict``
            returns them, flattened or not.
        allow_pickle: allow to read ``.metadata``, which is a pickle. Names other than the classes of DCP's metadata are
            refused, and values are read by ``torch.load(weights_only=True)``.
        strict: as for ``load``. If False, stored values that cannot be read are skipped, too.
        ignore: as for ``load``; stored values that it covers need not be readable.
        rename: as for ``load``. The name of the DCP key ``model.a.weight`` is ``model/a.weight``.
        allow_dtype_cast: as for ``load``.
        process_group: as for ``save``.

    Returns:
        What the folder has, as a manifest.

    Raises:
        CheckpointError: with the same text on all ranks; the state is as for ``load`` then. The files have no checksums
            of parts, so changed values are not detected.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> save_dcp("runs/dcp-10", {"model": model, "step": 10}, overwrite=True)
        >>> state = {"model": torch.nn.Linear(4, 2), "step": 0}
        >>> _ = load_dcp("runs/dcp-10", state, allow_pickle=True)
        >>> state["step"]
        10
    """
    where = Path(os.path.abspath(folder))
    names, is_ignored = dict(rename or {}), list(ignore)
    with open_control(process_group) as control, torch.no_grad():

        def read() -> _Given:
            require_pickle(where, allow=allow_pickle)
            given = json.dumps([names, sorted(is_ignored), strict], sort_keys=True)
            if control.rank != 0:
                return _Given(given, None)
            listing = Reading(where, state, names, is_ignored, strict).listing()
            Folder(where, listing, names).check()
            return _Given(given, listing)

        def decide(found: list[_Given]) -> list[Listing | None]:
            require_same("rename, ignore and strict", [each.given for each in found])
            return [found[0].listing] * control.size

        listing = control.run_round(read, decide, result=_Given, share=Listing)
        own = Folder(where, listing, names)
        source = Source(where, own.manifest, own.open_file)
        load_from(source, state, control, strict=strict, ignore=ignore, allow_dtype_cast=allow_dtype_cast)
    return own.manifest


@dataclass(frozen=True)
class _Given:
    """What must agree between ranks, and the listing on the first one."""

    given: str
    listing: Listing | None
