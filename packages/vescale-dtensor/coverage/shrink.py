"""Shrink a program: the smallest one found that still has the verdict."""

from __future__ import annotations

import dataclasses
import itertools
import re
import time
from collections.abc import Callable, Iterator

from combos import LETTER
from program import Input, Program, is_steady, variables_in

__all__ = ["shrink"]


def shrink(program: Program, still_fails: Callable[[Program, dict], bool], *, seconds: float) -> Program:
    """Return the smallest program found for which ``still_fails(program, results of one device)``.

    Candidates that fail on one device, or whose results rounding errors change, are left out.
    """
    end = time.monotonic() + seconds
    tried = {program}
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for candidate in _candidates(program):
            if time.monotonic() > end:
                return program
            if candidate in tried:
                continue
            tried.add(candidate)
            if (expected := is_steady(candidate)) is not None and still_fails(candidate, expected):
                program, is_smaller = candidate, True
                break
    return program


def _candidates(program: Program) -> Iterator[Program]:
    """Yield smaller programs, those with much less first."""
    change = _changed(program)
    lines = program.lines
    for length in (len(lines) // 2, len(lines) // 4, 1):
        if length:
            starts = range(len(lines) - length, -1, -1)
            yield from (change(lines=lines[:start] + lines[start + length :]) for start in starts)
    yield from _without_a_result(program)
    if program.order:
        yield change(order=program.order - 1)
    yield from _without_an_input(program)
    yield from _on_fewer_axes(program)
    for number, each in enumerate(program.inputs):
        letters = _letters(each)
        for axis, letter in enumerate(letters):
            if letter != "R":
                simpler = "".join("R" if i == axis else other for i, other in enumerate(letters))
                yield _with_input(program, number, placements=simpler)
        if each.requires_grad:
            yield _with_input(program, number, requires_grad=False)
        if each.is_transposed:
            yield _with_input(program, number, is_transposed=False)
        if each.kind in ("float32", "complex"):
            yield _with_input(program, number, kind="float")
    sizes = sorted({size for each in program.inputs for size in each.shape}, reverse=True)
    for size, smaller in itertools.product(sizes, (1, 2, 3)):
        if smaller < size:
            yield _resized(program, size, smaller)


def _changed(program: Program) -> Callable[..., Program]:
    return lambda **changes: dataclasses.replace(program, **changes)


def _without_a_result(program: Program) -> Iterator[Program]:
    """Leave out a line, and use one of its operands instead of its result."""
    for number in range(len(program.lines) - 1, -1, -1):
        result, *operands = variables_in(program.lines[number]) or [""]
        if not program.lines[number].startswith(f"{result} = "):
            continue
        for operand in dict.fromkeys(operands):
            rest = [re.sub(rf"\b{result}\b", operand, line) for line in program.lines[number + 1 :]]
            yield dataclasses.replace(program, lines=(*program.lines[:number], *rest))


def _without_an_input(program: Program) -> Iterator[Program]:
    """Leave out the last input if nothing uses it, or use another one instead of it."""
    last = len(program.inputs) - 1
    for number in range(last):
        lines = tuple(re.sub(rf"\bx{last}\b", f"x{number}", line) for line in program.lines)
        yield dataclasses.replace(program, inputs=program.inputs[:last], lines=lines)
    for number in range(last):  # two inputs change places, if the lines do not use the earlier one
        if not any(f"x{number}" in variables_in(line) for line in program.lines):
            inputs = (*program.inputs[:number], program.inputs[last], *program.inputs[number + 1 : last])
            lines = tuple(re.sub(rf"\bx{last}\b", f"x{number}", line) for line in program.lines)
            yield dataclasses.replace(program, inputs=inputs, lines=lines)


def _on_fewer_axes(program: Program) -> Iterator[Program]:
    if len(program.mesh) == 1:
        if program.mesh[0] > 2:
            yield dataclasses.replace(program, mesh=(2,))
        return
    for axis in range(len(program.mesh)):
        inputs = tuple(dataclasses.replace(each, placements=_letters(each)[axis]) for each in program.inputs)
        lines = tuple(re.sub(r"\[([^][,]*\)), ([^][]*\))\]", rf"[\{axis + 1}]", line) for line in program.lines)
        yield dataclasses.replace(program, mesh=(program.mesh[axis],), inputs=inputs, lines=lines)


def _letters(each: Input) -> list[str]:
    return [letter + dim for letter, dim in LETTER.findall(each.placements)]


def _with_input(program: Program, number: int, **changes: object) -> Program:
    inputs = list(program.inputs)
    inputs[number] = dataclasses.replace(inputs[number], **changes)
    return dataclasses.replace(program, inputs=tuple(inputs))


def _resized(program: Program, size: int, smaller: int) -> Program:
    shapes = [tuple(smaller if n == size else n for n in each.shape) for each in program.inputs]
    inputs = [dataclasses.replace(each, shape=shape) for each, shape in zip(program.inputs, shapes, strict=True)]
    return dataclasses.replace(program, inputs=tuple(inputs))
