"""Call public functions with bad arguments: each is refused by an error that says so, or is right as it is.

Every argument of every call of a table is replaced by every bad value, one at a time: by the values of `VALUES`, by
values near to the right one (a misspelled name, a sequence that is longer or shorter, a mapping with one key more, a
tensor of another dtype or shape), and, inside of mappings and sequences, by each of these at each place.

A refusal is a ValueError or a TypeError that a statement of the package raises, in a text that names the argument, what
was expected, and what it got; of a value inside of an argument, in any text. Everything else is a fault: an error from
inside of Python or torch, a call that does not end, and a bad value that is accepted without being listed as right.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch

__all__ = ["VALUES", "Call", "check_calls", "check_table"]

#: Seconds that a call may take before it counts as one that does not end.
PATIENCE = 20.0

#: What an error must say, besides the name of the argument, and the words that say it.
WORDS: Mapping[str, str] = {
    "expected": r"\b(expect|must|needs|matches no|in no)",
    "got": r"\b(got|matches no|in no)\b",
}

#: Name -> function that makes the bad value.
VALUES: Mapping[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "huge": lambda: 10**30,
    "0.5": lambda: 0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "no text": lambda: "",
    "text": lambda: "nonsense",
    "bytes": lambda: b"nonsense",
    "()": tuple,
    "[]": list,
    "[None]": lambda: [None],
    "[0]": lambda: [0],
    "[text]": lambda: ["nonsense"],
    "{}": dict,
    "{text: 0}": lambda: {"nonsense": 0},
    "{0: 0}": lambda: {0: 0},
    "iterator": lambda: iter(()),
    "object": object,
    "class": lambda: object,
    "function": lambda: lambda: None,
    "module": torch.nn.Identity,
    "tensor": lambda: torch.ones(3),
    "integers": lambda: torch.ones(2, 3, dtype=torch.int64),
}


@dataclass(frozen=True)
class Call:
    """A public function or constructor, and arguments with which it works.

    Attributes:
        function: the function, or one that makes the call: its parameters are the arguments.
        right: returns new right arguments, by name; those of ``*names`` as a tuple.
        accepts: argument -> names of the bad values that are right for it.
        called: argument -> what errors call it, if that is another name: that of the function inside.
    """

    function: Callable[..., Any]
    right: Callable[[], Mapping[str, Any]]
    accepts: Mapping[str, Iterable[str]] = field(default_factory=dict)
    called: Mapping[str, str] = field(default_factory=dict)


class _EndlessError(BaseException):
    """A call took longer than `PATIENCE`."""


def check_table(modules: Mapping[str, ModuleType], calls: Iterable[str], results: Iterable[str]) -> None:
    """Check that a table has every public function and class that takes arguments.

    Args:
        modules: prefix -> module with ``__all__``, such as ``{"": vescale.pipe}``.
        calls: names of the table; that of a method is ``"Class.method"``.
        results: names that need no call: what functions return, protocols, and what others check.

    Raises:
        AssertionError: a name is in neither, in both, or is not public.
    """
    public = {
        prefix + name
        for prefix, module in modules.items()
        for name in module.__all__
        if callable(value := getattr(module, name)) and not (inspect.isclass(value) and issubclass(value, Exception))
    }
    owners = {name for name in calls if name in public}
    assert not owners & set(results), f"in both: {sorted(owners & set(results))}"
    missing, unknown = public - owners - set(results), set(results) - public
    assert not missing, f"without a call: {sorted(missing)}"
    assert not unknown, f"not public: {sorted(unknown)}"


def check_calls(calls: Mapping[str, Call], *, package: str = "vescale") -> int:
    """Make every call of a table with every bad value of every argument, and return how many were refused.

    Args:
        calls: the table.
        package: name of the package whose modules raise the errors.

    Raises:
        AssertionError: a right call fails, an argument is missing in the table, or a bad value is neither refused in
            the required form nor listed as right, or listed and refused.
    """
    faults: dict[str, list[str]] = {}
    num_refused = 0
    for name, call in calls.items():
        num_refused += _make(name, call, faults, package)
    num_faults = sum(map(len, faults.values()))
    shown = "\n".join(f"{fault}\n    {len(which)}: {', '.join(which[:12])}" for fault, which in faults.items())
    if faults:
        raise AssertionError(f"{num_faults} calls end badly, and {num_refused} are refused as they should be:\n{shown}")
    return num_refused


def _make(name: str, call: Call, faults: dict[str, list[str]], package: str) -> int:
    """Make a call with every bad value; return the number of refusals, and add faults, alike ones together."""
    arguments, parameters = dict(call.right()), inspect.signature(call.function).parameters
    if set(arguments) != set(parameters):
        raise AssertionError(f"{name}: the table has {sorted(arguments)}, the function {sorted(parameters)}")
    error = _error_of(call.function, arguments)
    if error is not None:
        raise AssertionError(f"{name} with right arguments: {error!r}") from error
    num_refused = 0
    for argument in arguments:
        accepted = set(call.accepts.get(argument, ()))
        is_keywords = parameters[argument].kind is inspect.Parameter.VAR_KEYWORD
        for label, make in _bad_values(arguments[argument], inside_only=is_keywords):
            given = dict(call.right())
            given[argument] = make(given[argument])
            error = _error_of(call.function, given)
            is_inside = "=" in label
            fault = _judge(error, package, "" if is_inside else call.called.get(argument, argument), label in accepted)
            num_refused += error is not None and not fault
            if fault and not (is_inside and error is None):
                faults.setdefault(f"{name}.{argument} {fault}", []).append(label)
    return num_refused


def _judge(error: BaseException | None, package: str, argument: str, is_right: bool) -> str:
    """Return what is wrong with the end of a call, or an empty text."""
    if is_right:
        return f"is listed as right, but refused: {error!r}" if error is not None else ""
    if error is None:
        return "is accepted"
    if isinstance(error, OSError) and error.filename is not None:
        return ""  # of a file or folder that cannot be used: the system names it
    where = f"{type(error).__name__} of {_frame_text(error)}: {error}".replace("\n", " ")
    where = re.sub(r"got .*|'.*' object", "...", where)[:200]  # alike errors have alike texts
    if not isinstance(error, ValueError | TypeError):
        return f"no ValueError or TypeError, but {where}"
    if not _is_own(error, package):
        return f"not raised by a statement of the package: {where}"
    text = str(error)
    words = {**WORDS, argument: rf"\b{re.escape(argument)}"} if argument else {}
    missing = [word for word, pattern in words.items() if not re.search(pattern, text)]
    return f"the text lacks {missing}: {where}" if missing else ""


def _is_own(error: BaseException, package: str) -> bool:
    """Return whether an error comes from a ``raise`` statement in a module of a package."""
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    statement = linecache.getline(frame.f_code.co_filename, line).strip()
    return frame.f_globals.get("__name__", "").split(".")[0] == package and statement.startswith("raise ")


def _frame_text(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.split('/site-packages/')[-1].split('/src/')[-1]}:{frame.lineno}"


def _error_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> BaseException | None:
    try:
        with warnings.catch_warnings(), _limited():
            warnings.simplefilter("ignore")
            _call(function, arguments)
    except (Exception, _EndlessError) as error:
        return error
    return None


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    positional: list[Any] = []
    named: dict[str, Any] = {}
    parameters = inspect.signature(function).parameters
    has_variable = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    for name, parameter in parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            value = arguments[name]
            positional += value if isinstance(value, tuple) else [value]
        elif parameter.kind is parameter.VAR_KEYWORD:
            named |= arguments[name]
        elif parameter.kind is parameter.POSITIONAL_ONLY or (
            has_variable and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ):
            positional.append(arguments[name])
        else:
            named[name] = arguments[name]
    result = function(*positional, **named)
    if isinstance(result, contextlib.AbstractContextManager) and not isinstance(result, torch.nn.Module):
        with result:
            pass


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Interrupt the main thread after `PATIENCE` seconds."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise _EndlessError(f"the call did not end within {PATIENCE:g} s")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ------------------------------------------------------------------------------------------------- bad values


def _bad_values(right: Any, *, inside_only: bool = False) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Yield the name of each bad value, and a function of the right value that makes it."""
    for name, make in () if inside_only else VALUES.items():
        if not _is_same(make(), right):
            yield name, functools.partial(_made, make)
    yield from () if inside_only else _near(right)
    for place in _places(right):
        for name, make in VALUES.items():
            label = "".join(f"[{key!r}]" for key in place)
            yield f"{label}={name}", functools.partial(_made_inside, make, place)


def _made(make: Callable[[], Any], _right: Any) -> Any:
    return make()


def _made_inside(make: Callable[[], Any], place: tuple[Any, ...], right: Any) -> Any:
    return _replaced(right, place, make())


def _near(right: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    if isinstance(right, str):
        yield "misspelled", lambda right: f"{right}x"
    elif type(right) in (list, tuple) and right:
        yield "longer", lambda right: type(right)([*right, right[-1]])
        yield "shorter", lambda right: right[:-1]
    elif isinstance(right, dict):
        yield "another key", lambda right: {**right, "nonsense": next(iter(right.values()), None)}
    elif isinstance(right, torch.Tensor) and not isinstance(right, torch.nn.Parameter):
        other = torch.int64 if right.is_floating_point() else torch.float32
        yield "another dtype", lambda right: torch.ones(right.shape, dtype=other)
        yield "another shape", lambda right: torch.ones((*right.shape, 2), dtype=right.dtype)


def _is_same(value: Any, right: Any) -> bool:
    """Return whether a bad value is right for this argument, as both values of a flag are."""
    if isinstance(value, bool):
        return isinstance(right, bool)
    return type(value) is type(right) and not isinstance(value, torch.Tensor) and repr(value) == repr(right)


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every element of nested mappings and sequences."""
    items = tree.items() if type(tree) is dict else enumerate(tree) if type(tree) in (list, tuple) else ()
    for key, element in items:
        yield (*path, key)
        yield from _places(element, (*path, key))


def _replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    key, *rest = path
    if type(tree) is dict:
        return {**tree, key: _replaced(tree[key], tuple(rest), value)}
    return type(tree)(_replaced(element, tuple(rest), value) if i == key else element for i, element in enumerate(tree))
