"""Load a folder of Hugging Face into a module, sharded in any way.

Five rounds (see ``_control.py``), of which the three in the middle are those of every load:

    1. every rank lists its names; rank 0 reads index and headers, and sends all ranks what is where
    2. every rank compares its module with it
    3. every rank reads the boxes that it holds, in place
    4. nothing is left to do for plain values, of which files have none
    5. every rank passes the filled state dict to ``load_state_dict``
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .._checked import CheckedInside, FilePath, checked
from .._control import open_control
from .._errors import CheckpointError, as_text, require_same
from .._format.manifest import Manifest, TensorMeta
from .._load.load import Source, load_from
from .hf_content import Content
from .hf_files import ListedFile, OpenFile, list_folder, real_path
from .hf_links import Names, links_to_load
from .hf_rules import WeightRule
from .hf_state import ModuleState, Ties, merged_ties
from .hf_transformers import ignored_keys, names_to_load, optional_names, tied_names


@checked
def load_hf(
    folder: FilePath,
    module: torch.nn.Module,
    *,
    rules: Sequence[WeightRule] | None = None,
    strict: bool = True,
    ignore: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    allow_dtype_cast: bool = False,
    process_group: CheckedInside[dist.ProcessGroup | None] = None,
) -> None:
    """Load the weights of a Hugging Face folder into a module, on any number of ranks.

    A collective: all ranks of the group call it. Parameters may be plain tensors, DTensors, or any values with
    ``__boxes__``. They are filled in place, and each rank reads only the boxes that it holds. Such files have no
    checksums, so changed values are not found; headers that do not fit their files are.

    Args:
        folder: has ``model.safetensors``, or ``model.safetensors.index.json`` and its files.
        module: to load into; of a pipeline, the stage of this rank.
        rules: how tensors of the files make up those of the module. Default: for a model of ``transformers``, or a
            wrapper whose ``module`` is one, the conversions that it declares; for others, equal names. Files with the
            module's own names load, too.
        strict: refuse names of the module that are not stored, and stored names that no rank has. A name that shares
            its tensor with a stored one, as tied embeddings do, is not missing.
        ignore: stored names that no rank needs to have.
        rename: beginnings of stored names, and what replaces them, such as ``{"model.": ""}``; after ``rules``.
        allow_dtype_cast: convert stored values to the dtype of the module's tensor instead of refusing them.
        process_group: as for ``save``.

    Raises:
        CheckpointError: with the same text on all ranks. If the folder does not fit, the module is unmodified.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> save_hf("weights", model, overwrite=True)
        >>> other = torch.nn.Linear(4, 2)
        >>> load_hf("weights", other)
        >>> torch.equal(other.weight, model.weight)
        True
    """
    where = Path(os.path.abspath(folder))
    loading = _Loading(where, module, rules, dict(rename or {}))
    with open_control(process_group) as control, torch.no_grad():
        found: _Found = control.run_round(
            lambda: loading.begin(reads=control.rank == 0), loading.decide, result=_Given, share=_Found
        )
        regions = found.content.regions()
        manifest = found.content.manifest().renamed(rename or {})

        def open_file(name: str) -> OpenFile:
            return OpenFile(real_path(where, name), manifest.files[name].num_bytes, regions[name])

        source = Source(where, manifest, open_file)
        tensors = {name: value for name, value in loading.state.tensors.items() if name not in found.absent}
        try:
            load_from(source, tensors, control, strict=strict, ignore=ignore, allow_dtype_cast=allow_dtype_cast)
        except CheckpointError as error:
            raise CheckpointError(_of_folders(str(error))) from error
        control.run_round(lambda: loading.state.put_back(found.absent), control.no_shares)


@dataclass(frozen=True)
class _Given:
    """What a rank was given, the names of its module, and those that share a tensor."""

    folder: str
    rename: str
    names: tuple[str, ...]
    ties: Ties


@dataclass(frozen=True)
class _Found:
    """What the folder holds, and names of the module that it lacks, but needs not have: each with one that it has.

    A name that may simply be missing comes with itself.
    """

    content: Content
    absent: Mapping[str, str]


def _of_folders(text: str) -> str:
    """Return the text of an error of a load in words for folders and modules."""
    text = text.replace("a checkpoint that fits the state", "a folder that fits the module")
    return text.replace("in the checkpoint", "in the files").replace("tensors of the state", "tensors of the module")


class _Loading:
    """The first round of a load; ``decide`` acts on rank 0."""

    state: ModuleState

    def __init__(
        self, where: Path, module: torch.nn.Module, rules: Sequence[WeightRule] | None, rename: dict[str, str]
    ) -> None:
        self._where, self._module, self._rules, self._rename = where, module, rules, rename
        self._files: Mapping[str, ListedFile] = {}

    def begin(self, *, reads: bool) -> _Given:
        self.state = ModuleState.of(self._module)
        if reads:
            self._files = list_folder(self._where)
        rename = json.dumps(self._rename, sort_keys=True)
        return _Given(as_text(self._where), rename, tuple(self.state.tensors), self.state.ties())

    def decide(self, given: Sequence[_Given]) -> list[_Found]:
        require_same("folder", [each.folder for each in given])
        require_same("rename", [each.rename for each in given])
        wanted = list(dict.fromkeys(name for each in given for name in each.names))
        try:
            names = names_to_load(self._module, self._rules, wanted)
            content = content_of(self._files, names, wanted, ignored_keys(self._module))
            stored = content.manifest().renamed(self._rename)
        except CheckpointError as error:
            raise error if str(self._where) in str(error) else CheckpointError(f"{self._where}: {error}") from None
        ties = merged_ties([group for each in given for group in each.ties])
        absent = absent_of(wanted, stored, ties, optional_names(self._module))
        # of a pipeline, the names of a tie may be on different ranks
        apart = {
            name: other
            for name, other in tied_names(self._module).items()
            if name in wanted and name not in {*stored.tensors, *absent} and other in content.tensors
        }
        found = _Found(content.with_ties({} if self._rename else apart), absent)
        return [found] * len(given)


def content_of(
    files: Mapping[str, ListedFile], names: Names, wanted: Collection[str], ignored: Sequence[str] = ()
) -> Content:
    """Return the content of a folder by the names of a module, without those not wanted that a regex ignores."""
    stored: dict[str, TensorMeta] = {}
    places: dict[str, tuple[int, int]] = {}
    for number, file in enumerate(files.values()):
        for key, tensor in file.tensors.items():
            stored[key] = TensorMeta(tensor.dtype, tensor.shape)
            places[key] = number, tensor.start
    ordered = {key: stored[key] for key in sorted(stored)}
    metas, links = links_to_load(ordered, names, set(wanted))
    kept = {
        name: meta
        for name, meta in metas.items()
        if name in wanted or not any(re.search(pattern, name) for pattern in ignored)
    }
    sizes = {name: file.num_bytes for name, file in files.items()}
    return Content.of(sizes, kept, [link for link in links if link.name in kept], places)


def absent_of(wanted: Sequence[str], stored: Manifest, ties: Ties, optional: Sequence[str]) -> dict[str, str]:
    """Return the names that are not stored and need not be: each with one that is, or with itself."""
    absent: dict[str, str] = {}
    for group in ties:
        if there := [name for name in group if name in stored.tensors]:
            absent |= {name: there[0] for name in group if name not in stored.tensors}
    for name in wanted:
        if name not in stored.tensors and any(re.search(pattern, name) for pattern in optional):
            absent.setdefault(name, name)
    return absent
