"""Rules by which a module's tensors are named otherwise in files, and made of several tensors there."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._checked import Size, checked
from .hf_links import InFiles, InModule

_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


@checked
@dataclass(frozen=True)
class WeightRule:
    """How tensors in files of Hugging Face make up tensors of a module, in both directions.

    Names are patterns: a field such as ``{layer}`` stands for any text, the same in all patterns of the rule. With one
    name on each side, a rule renames. Several names on one side are concatenated to the one on the other.

    Args:
        file: pattern of the name in files, or several.
        module: pattern of the name in the module, or several.
        stack: the dim of the module's tensor along which tensors of files are stacked. Their patterns have one field
            more, which is the number in the stack, from 0 on.
        concatenate: the dim of the concatenation, in the tensor that is the larger one. It is split into equal parts.

    Raises:
        ValueError: the patterns do not fit each other.

    Example:
        >>> WeightRule("embed_out.{rest}", "lm_head.{rest}")                # renames
        WeightRule(file='embed_out.{rest}', module='lm_head.{rest}', stack=None, concatenate=None)
        >>> gate_and_up = WeightRule(
        ...     ["{layer}.experts.{number}.w1.weight", "{layer}.experts.{number}.w3.weight"],
        ...     "{layer}.experts.gate_up_proj",
        ...     stack=0,
        ...     concatenate=1,
        ... )
        >>> down = WeightRule("{layer}.experts.{number}.w2.weight", "{layer}.experts.down_proj", stack=0)
        >>> qkv = WeightRule("{layer}.qkv.{kind}", ["{layer}.q.{kind}", "{layer}.k.{kind}", "{layer}.v.{kind}"],
        ...                  concatenate=0)
    """

    file: str | Sequence[str]
    module: str | Sequence[str]
    stack: Size | None = None
    concatenate: Size | None = None

    def __post_init__(self) -> None:
        files, modules = self._files, self._modules
        if not files or not modules:
            raise ValueError("WeightRule: expected a pattern for file and one for module, got none; give both")
        if len(files) > 1 and len(modules) > 1:
            raise ValueError(
                f"WeightRule: expected one pattern for file or for module, got {len(files)} and {len(modules)}; write "
                "a rule for each"
            )
        if (len(files) > 1 or len(modules) > 1) != (self.concatenate is not None):
            raise ValueError(
                "WeightRule: expected concatenate= for several patterns and for these alone, got "
                f"{self.concatenate!r} for {len(files)} of file and {len(modules)} of module; give the dim with them"
            )
        if self.stack is not None and len(modules) > 1:
            raise ValueError(
                f"WeightRule: expected one pattern for module to stack, got {len(modules)}; write a rule for each"
            )
        fields = [set(_FIELD.findall(pattern)) for pattern in (*modules, *files)]
        extra = fields[-1] - fields[0]
        in_files = all(own == fields[0] | extra for own in fields[len(modules) :])
        if not in_files or any(own != fields[0] for own in fields[: len(modules)]):
            raise ValueError(
                f"WeightRule: expected equal fields in the patterns of file and module, got {[*files, *modules]}"
            )
        if len(extra) != (self.stack is not None):
            raise ValueError(
                "WeightRule: expected a field more in file than in module, the number in the stack, with stack= alone, "
                f"got {sorted(extra)} for stack={self.stack!r}"
            )

    @property
    def _files(self) -> tuple[str, ...]:
        return (self.file,) if isinstance(self.file, str) else tuple(self.file)

    @property
    def _modules(self) -> tuple[str, ...]:
        return (self.module,) if isinstance(self.module, str) else tuple(self.module)

    @property
    def _number(self) -> str | None:
        """The field of the number in the stack."""
        return next(iter(set(_FIELD.findall(self._files[0])) - set(_FIELD.findall(self._modules[0]))), None)

    def in_module(self, key: str) -> InModule | None:
        """Return the place of a tensor of a file; None if the rule is not about it."""
        number = self._number
        for part, pattern in enumerate(self._files):
            if (found := _regex(pattern, number).fullmatch(key)) is not None:
                fields = found.groupdict()
                index = int(fields.pop(number)) if number is not None else 0
                names = tuple(_filled(each, fields) for each in self._modules)
                return InModule(names, self.stack, index, self.concatenate, part, len(self._files))
        return None

    def in_files(self, name: str, shape: tuple[int, ...]) -> InFiles | None:
        """Return the place of a tensor of the module; None if the rule is not about it."""
        if self.stack is not None and self.stack >= len(shape):
            return None
        count = 1 if self.stack is None else shape[self.stack]
        for part, pattern in enumerate(self._modules):
            if (found := _regex(pattern, None).fullmatch(name)) is not None:
                fields = found.groupdict()
                numbered = [fields | ({self._number: str(i)} if self._number else {}) for i in range(count)]
                keys = tuple(tuple(_filled(each, own) for own in numbered) for each in self._files)
                return InFiles(keys, self.stack, self.concatenate, part, len(self._modules))
        return None


@dataclass(frozen=True)
class RuleNames:
    """Names by rules, of which the first that fits counts; other names are the same in files."""

    rules: tuple[WeightRule, ...] = ()

    def in_module(self, key: str) -> InModule:
        """Return the place of a tensor of a file."""
        return next(filter(None, (rule.in_module(key) for rule in self.rules)), InModule((key,)))

    def in_files(self, name: str, shape: tuple[int, ...]) -> InFiles:
        """Return the place of a tensor of the module."""
        return next(filter(None, (rule.in_files(name, shape) for rule in self.rules)), InFiles(((name,),)))


@functools.cache
def _regex(pattern: str, number: str | None) -> re.Pattern[str]:
    text, end, seen = "", 0, set()
    for found in _FIELD.finditer(pattern):
        field = found[1]
        kind = "0|[1-9][0-9]{0,8}" if field == number else ".+?"
        text += re.escape(pattern[end : found.start()])
        text += f"(?P={field})" if field in seen else f"(?P<{field}>{kind})"
        end = found.end()
        seen.add(field)
    return re.compile(text + re.escape(pattern[end:]))


def _filled(pattern: str, fields: Mapping[str, str]) -> str:
    return _FIELD.sub(lambda found: fields[found[1]], pattern)
