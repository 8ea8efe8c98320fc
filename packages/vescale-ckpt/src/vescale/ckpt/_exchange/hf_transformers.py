"""Names by the conversions that ``transformers`` declares for a model, read from the model or its config.

The model's own code has experts stacked, and other names than its files; ``transformers`` declares what it does to them
when it loads. The names here come from its own functions. What it does to values is taken over if it has the form of
boxes (stacks, concatenations, chunks), and refused by name otherwise. It is imported for its own models only.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError
from .hf_links import InFiles, InModule, Names
from .hf_rules import RuleNames, WeightRule


def model_of(module: Any) -> Any:
    """Return the model of ``transformers`` that a module is or wraps as ``module``, or None."""
    library = sys.modules.get("transformers")  # there is no model of it if it is not imported
    kind = getattr(library, "PreTrainedModel", None)
    while kind is not None and module is not None:
        if isinstance(module, kind):
            return module
        module = getattr(module, "module", None)
    return None


def names_to_load(module: Any, rules: Sequence[WeightRule] | None, wanted: Sequence[str]) -> Names:
    """Return the names of a module's tensors in files that are loaded: by rules, or else by its declarations."""
    model = model_of(module)
    if rules is not None or model is None:
        return RuleNames(tuple(rules or ()))
    return _Declared(_conversions(lambda mapping: mapping.get_model_conversion_mapping(model)), (), model, wanted)


def names_to_save(module: Any, rules: Sequence[WeightRule] | None) -> Names:
    """Return the names of a module's tensors in files that are saved."""
    model = model_of(module)
    if rules is not None or model is None:
        return RuleNames(tuple(rules or ()))
    given = getattr(model, "_weight_conversions", None)  # of the files that it was loaded from

    def find(mapping: Any) -> Any:
        if given is not None:
            return given
        return _without_prefixes(mapping.get_model_conversion_mapping(model, add_legacy=False))

    return _Declared((), _conversions(find), model, ())


def model_of_config(folder: Path) -> Any:
    """Return the model that ``config.json`` in a folder describes, without values; None if it is not known.

    Raises:
        CheckpointError: the config cannot be read.
    """
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError:
        return None
    try:
        config = library.AutoConfig.from_pretrained(os.fspath(folder))
        (name, *_) = config.architectures or (None,)
        kind = None if name is None else getattr(library, name, None)
    except (ValueError, KeyError):  # of code that is not part of the library
        return None
    except (OSError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: expected the config of a model, got {error}") from None
    if kind is None:
        return None
    with torch.device("meta"):
        return kind(config)


def ignored_keys(module: Any) -> list[str]:
    """Return regexes for names of files that the model does not miss."""
    return sorted(getattr(model_of(module), "_keys_to_ignore_on_load_unexpected", None) or ())


def optional_names(module: Any) -> list[str]:
    """Return regexes for names of the model that files may lack."""
    return sorted(getattr(model_of(module), "_keys_to_ignore_on_load_missing", None) or ())


def unsaved_names(module: Any) -> set[str]:
    """Return names of the model that files do not get."""
    return set(getattr(model_of(module), "_keys_to_ignore_on_save", None) or ())


def tied_names(module: Any) -> dict[str, str]:
    """Return names of the model that are ties, each with the one that files have."""
    return dict(getattr(model_of(module), "all_tied_weights_keys", None) or {})


def write_config(module: Any, folder: Path) -> None:
    """Write what else ``from_pretrained`` needs of a module, if it has a config that can be saved."""
    model = model_of(module)
    config = getattr(module if model is None else model, "config", None)
    if not callable(getattr(config, "save_pretrained", None)):
        return
    own: Any = copy.deepcopy(config)
    if model is not None:
        own.architectures = [type(model).__name__]
        own.dtype = str(model.dtype).removeprefix("torch.")
    own.save_pretrained(os.fspath(folder))
    generation = getattr(model, "generation_config", None)
    if generation is not None and model.can_generate():
        generation.save_pretrained(os.fspath(folder))


class _Declared:
    """Names by declared conversions: those of a load, or those of a save, in the order in which they are declared."""

    def __init__(self, to_load: Sequence[Any], to_save: Sequence[Any], model: Any, wanted: Sequence[str]) -> None:
        library = _part_of_transformers("core_model_loading")
        self._library = library
        to_load = copy.deepcopy(list(to_load))
        self._renamings, self._converters = self._sorted(to_load)
        self._reversed_renamings, self._reversed_converters = self._sorted(
            [each.reverse_transform() for each in reversed(to_save)]
        )
        self._forward_of = dict(
            zip(
                map(id, self._reversed_converters),
                [each for each in reversed(to_save) if isinstance(each, library.WeightConverter)],
                strict=True,
            )
        )
        self._wanted = dict.fromkeys(wanted, True)
        self._base = getattr(model, "base_model_prefix", None) if model is not None else None

    def _sorted(self, conversions: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        renamings = [each for each in conversions if isinstance(each, self._library.WeightRenaming)]
        return renamings, [each for each in conversions if isinstance(each, self._library.WeightConverter)]

    def in_module(self, key: str) -> InModule:
        """Return the place of a tensor of a file."""
        renamed = self._library.apply_renamings(key, self._renamings)
        for converter in self._converters:
            target, pattern = converter.rename_source_key(renamed)
            if pattern is not None:
                return self._converted(key, renamed, target, pattern, converter)
        return InModule((self._based(renamed),))

    def _converted(self, key: str, renamed: str, target: str, pattern: str, converter: Any) -> InModule:
        form = _form_of(converter, key)
        names = tuple(map(self._based, _targets(target, converter, key)))
        index = 0
        if form.stack is not None:
            found = re.search(pattern.replace("*.", r"(?P<number>[0-9]{1,9})\.", 1), renamed)
            if found is None or "number" not in found.groupdict():
                raise CheckpointError(f"tensor {key!r}: expected a number for the '*' of {pattern!r}, got none")
            index = int(found["number"])
        if form.is_chunk:
            return InModule(names, concatenate=form.concatenate)
        part = converter.source_patterns.index(pattern)
        return InModule(names, form.stack, index, form.concatenate, part, len(converter.source_patterns))

    def in_files(self, name: str, shape: tuple[int, ...]) -> InFiles:
        """Return the place of a tensor of the module."""
        rename = lambda key: self._library.apply_renamings(key, self._reversed_renamings)  # noqa: E731
        for converter in self._reversed_converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is None:
                continue
            form = _form_of(self._forward_of[id(converter)], name)
            if form.is_chunk:
                part, parts = converter.source_patterns.index(pattern), len(converter.source_patterns)
                return InFiles(((rename(target),),), None, form.concatenate, part, parts)
            whole = _targets(target, converter, name)
            if form.stack is None:
                return InFiles(tuple((rename(each),) for each in whole), None, form.concatenate)
            numbers = range(shape[form.stack] if form.stack < len(shape) else 0)
            keys = tuple(tuple(rename(each.replace("*", str(i))) for i in numbers) for each in whole)
            return InFiles(keys, form.stack, form.concatenate)
        return InFiles(((rename(name),),))

    def _based(self, name: str) -> str:
        """Return a name with or without the prefix of the base model, as the module has it."""
        if not self._base or name in self._wanted:
            return name
        bare = name.removeprefix(f"{self._base}.")
        if bare != name and bare in self._wanted:
            return bare
        return f"{self._base}.{name}" if f"{self._base}.{name}" in self._wanted else name


def _targets(first: str, converter: Any, name: str) -> tuple[str, ...]:
    """Return what a converter makes of a name: ``first`` by its first pattern, others by the others.

    Raises:
        CheckpointError: the patterns have groups, so that the others do not follow from the first.
    """
    pattern, *others = converter.target_patterns
    if others and pattern not in first:
        raise CheckpointError(
            f"tensor {name!r}: expected conversions of the model to plain names, got {converter.target_patterns}; "
            "convert the weights with transformers"
        )
    return (first, *(first.replace(pattern, other, 1) for other in others))


@dataclass(frozen=True)
class _Form:
    """What operations do, as boxes."""

    stack: int | None = None
    concatenate: int | None = None
    is_chunk: bool = False


def _form_of(converter: Any, name: str) -> _Form:
    """Return what the operations of a converter do when it loads.

    Raises:
        CheckpointError: they have no form of boxes.
    """
    operations = list(converter.operations)
    kinds = [type(each).__name__ for each in operations]
    is_plain = all(getattr(each, "num_shards_attribute", None) is None for each in operations)
    dims = [getattr(each, "dim", 0) for each in operations]
    if is_plain and all(dim >= 0 for dim in dims):
        if kinds == ["MergeModulelist"]:
            return _Form(stack=dims[0])
        if kinds == ["MergeModulelist", "Concatenate"]:
            return _Form(stack=dims[0], concatenate=dims[1])
        if kinds == ["Concatenate"] and not any("*" in each for each in converter.source_patterns):
            return _Form(concatenate=dims[0])
        if kinds == ["Chunk"]:
            return _Form(concatenate=dims[0], is_chunk=True)
    raise CheckpointError(
        f"tensor {name!r}: expected conversions of the model that stack, concatenate or split, got "
        f"{', '.join(map(repr, operations))}; convert the weights with transformers"
    )


def _without_prefixes(conversions: Sequence[Any]) -> list[Any]:
    """Return conversions that files of the model's own need: added prefixes are of other files."""
    return [each for each in conversions if type(each).__name__ != "PrefixChange"]


def _conversions(find: Any) -> tuple[Any, ...]:
    """Return what ``find`` reads of the conversions of ``transformers``."""
    return tuple(find(_part_of_transformers("conversion_mapping")) or ())


def _part_of_transformers(name: str) -> Any:
    """Return a module of ``transformers``, which this package does not depend on.

    Raises:
        CheckpointError: it is not installed, or has no such module.
    """
    try:
        return importlib.import_module(f"transformers.{name}")
    except ImportError as error:
        raise CheckpointError(
            f"expected transformers 5 for the conversions of a model, got {error}; install it, or pass rules="
        ) from None
