"""`record`: a context around a training loop that writes what every module call of it computed.

    pre-hook of each module       inputs
    hook of each module           outputs; a tensor hook on each of them for its gradient
    hook after optimizer.step()   gradients of parameters as the optimizer used them, parameters, buffers; the step ends

Gradients are those of outputs, not of inputs: an output is one tensor with one gradient in every layout, and an input
may have other consumers in one layout and not in another.

Where static mode runs the first call of a signature on DTensors to record it, the hooks note the placements of every
tensor. Later calls compute on local tensors, which these placements describe. So a static program is recorded again
when a record begins. Compiled blocks have no calls inside: what surrounds them is recorded. A pipeline records the
units of its stages; values outside of units may be placeholders. Calls that backward repeats are not recorded again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import inspect
import math
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Annotated, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale.dmodule import set_mode
from vescale.dmodule.rows import in_dry_run
from vescale.dtensor.extension import Condition, Count, FilePath, carriers, checked, exact_num_blocks
from vescale.optim import DDP

from .._parallel_model import ParallelModel
from .._torch import unseen
from .file import Writer
from .holdings import Layout, gradient_of, holding
from .pending import Rows, Step, longest_sum, num_elements

Steps = Annotated[Sequence[int], Condition("steps, 0 or more", lambda steps: all(step >= 0 for step in steps))]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class record:  # noqa: N801 - a context, as those of torch
    """Record what every module call of a training loop computes, into a folder with one file per rank.

    Per tensor a digest is stored that no layout changes: 64-bit hashes, projections and norms of 8 blocks of rows.
    Values are stored for the modules in ``values`` alone. Ranks do not communicate. The loop computes what it computes
    without the record.

    Args:
        path: folder of the record; files of an earlier record in it are replaced.
        model: what the loop calls: a module, a ``vescale.optim.DDP``, or the model of `vescale.parallelize`.
        optimizer: the step of this optimizer ends a step of the record, with gradients and parameters. Without one, the
            next forward does.
        steps: numbers of the steps to record, counted from 0 in this context; by default all.
        values: full names of modules and parameters whose values are stored, too.
        max_bytes: bound of the file of each rank. The step that would exceed it and those after it are left out, which
            the file says.

    Raises:
        ValueError: a name in ``values`` is not one of the model.

    Example:
        >>> with record("runs/tp2", model, optimizer):                                   # doctest: +SKIP
        ...     for batch in batches:
        ...         model(**model.local_batch(batch)).loss.backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
    """

    @checked
    def __init__(
        self,
        path: FilePath,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        steps: Steps | None = None,
        values: Sequence[str] = (),
        max_bytes: Count = 1 << 30,
    ) -> None:
        self._outer = model
        self._parallel = model if isinstance(model, ParallelModel) else None
        self._ddp = self._parallel.ddp if self._parallel else model if isinstance(model, DDP) else None
        self._model: nn.Module = model if self._ddp is None else self._ddp.module
        self._optimizer = optimizer
        self._steps = None if steps is None else frozenset(steps)
        self._values = frozenset(values)
        self._path, self._max_bytes = path, max_bytes
        self._check_values()
        self._step: Step | None = None
        self._number, self._recorded = 0, -1
        self._handles: list[Any] = []
        self._rows = Rows()
        self._is_repeated = False
        self._thread = 0
        self._running: list[tuple[str, int, list[tuple[int, ...]]]] = []
        self._seen: set[str] = set()
        self._missing: Counter[str] = Counter()
        self._terms: dict[str, int] = {}
        self._layouts = _Layouts(self._model)

    def _check_values(self) -> None:
        known = {name for name, _ in self._model.named_modules()} | {name for name, _ in self._model.named_parameters()}
        if unknown := sorted(self._values - known):
            raise ValueError(
                f"record: expected names of modules or parameters of {type(self._model).__name__} in values, got "
                f"{unknown}; take them from the report of a comparison, or from model.named_modules()"
            )

    def __enter__(self) -> record:
        plan = None if self._parallel is None else self._parallel.plan
        if plan is not None and plan.mode != "eager":
            set_mode(self._model, plan.mode)  # which discards recordings: the next one shows the placements
        modules = self._modules()
        self._signatures = {name: inspect.signature(module.forward) for name, module in modules.items()}
        self._writer = Writer(self._path, self._header(sorted(modules)), max_bytes=self._max_bytes)
        self._handles += [
            self._outer.register_forward_pre_hook(_Hook(self._begin_forward), prepend=True, with_kwargs=True)
        ]
        for name, module in modules.items():
            before, after = functools.partial(self._before, name), functools.partial(self._after, name)
            self._handles += [
                module.register_forward_pre_hook(_Hook(before), with_kwargs=True),
                module.register_forward_hook(_Hook(after), always_call=True),
            ]
        if self._optimizer is not None:
            self._handles.append(self._optimizer.register_step_post_hook(lambda *_: self._end_step()))
        self._thread = threading.get_ident()
        carriers.append(self._carrier)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _where: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        carriers.remove(self._carrier)
        if self._step is not None and self._optimizer is None and error is None:
            self._end_step()
        elif self._step is not None:
            self._write(is_complete=False)
        end = "closed" if error is None else "".join(traceback.format_exception_only(kind, error)).strip()
        silent = [name for name in self._modules() if name not in self._seen]
        self._writer.close(end, self._missing, silent)

    def _modules(self) -> dict[str, nn.Module]:
        """Return the modules whose calls are recorded: in a pipeline, those in the units of this rank's stages."""
        found = {
            name: module
            for name, module in self._model.named_modules()
            if not isinstance(module, _CONTAINERS) and "" not in getattr(module, "absent_fqns", ())
        }
        if self._parallel is None or self._parallel.plan.pp == 1:
            return found
        units = getattr(self._model, "_vescale_units", ())
        return {name: module for name, module in found.items() if any(f"{name}.".startswith(f"{u}.") for u in units)}

    def _header(self, modules: list[str]) -> dict[str, Any]:
        is_many = dist.is_initialized()
        header: dict[str, Any] = {"vescale": importlib.metadata.version("vescale"), "torch": torch.__version__}
        header |= {"rank": dist.get_rank() if is_many else 0, "world": dist.get_world_size() if is_many else 1}
        if self._parallel is not None:
            mesh = self._parallel.mesh
            coords = dict(zip(mesh.mesh_dim_names or (), mesh.get_coordinate() or (), strict=False))
            header |= {"plan": self._parallel.plan.to_json(), "coords": coords}
        elif self._ddp is not None:
            axis = self._ddp.data_axes.all
            header |= {"coords": {"dp": axis.coord}}
        return header | {"modules": modules}

    # ------------------------------------------------------------------------------------------------ steps

    def _is_wanted(self, number: int) -> bool:
        return (self._steps is None or number in self._steps) and not self._writer.is_full

    def _begin_forward(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        if in_dry_run() or self._is_repeated:
            return
        if self._optimizer is None and self._step is not None and self._step.forwards:
            self._end_step()
        if self._step is None and self._is_wanted(self._number):
            self._step = Step(self._number)
            if self._recorded != self._number - 1 or self._number == 0:
                self._add_state("initial parameter")
        if self._step is not None:
            self._step.forwards += 1
            self._rows = self._rows_of(args, kwargs)
            self._running.clear()  # of a forward that raised

    def _rows_of(self, args: tuple, kwargs: dict) -> Rows:
        if self._ddp is None:
            return Rows()
        rows = next((value.shape[0] for value in (*args, *kwargs.values()) if _has_rows(value)), 0)
        axis = self._ddp.data_axes.all
        count = 1 if self._parallel is None else self._parallel.plan.num_microbatches
        return Rows(axis.coord, axis.size, rows, count, tuple(axis.ranks))

    def _end_step(self) -> None:
        if self._step is not None:
            self._add_gradients()
            self._add_state("parameter")
            self._write(is_complete=True)
        self._number += 1

    def _write(self, *, is_complete: bool) -> None:
        step, self._step = self._step, None
        assert step is not None
        with unseen():
            lines = step.lines()
        self._missing += step.missing
        self._recorded = step.number
        self._writer.step(step.number, lines, exact=exact_num_blocks(), is_complete=is_complete)

    def _add_state(self, kind: str) -> None:
        step = self._step
        assert step is not None
        state = self._model.state_dict() if self._ddp is None else self._ddp.state_dict()
        trained = {name for name, _ in self._model.named_parameters(remove_duplicate=False)}
        with unseen():
            for name, value in state.items():
                if isinstance(value, Tensor) or hasattr(value, "__boxes__"):
                    named = kind if name in trained else kind.replace("parameter", "buffer")
                    step.add(named, name, holding(value), with_values=self._wants(name))

    def _add_gradients(self) -> None:
        step = self._step
        assert step is not None
        with unseen():
            for name, parameter in reversed(list(self._model.named_parameters())):
                held = gradient_of(parameter)
                if held is not None:
                    terms = self._terms.get(name.rpartition(".")[0], 1) * self._rows.num_ranks
                    step.add("gradient", name, held, terms=terms, with_values=self._wants(name))

    def _wants(self, name: str) -> bool:
        return name in self._values or name.rpartition(".")[0] in self._values

    # ------------------------------------------------------------------------------------------------ calls

    def _before(self, name: str, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._is_repeated:
            return
        if in_dry_run():
            self._layouts.enter(name)
            self._layouts.note(self._inputs(name, args, kwargs))
            return
        step = self._step
        if step is None:
            return
        self._seen.add(name)
        call = step.calls[step.forwards - 1, name]
        step.calls[step.forwards - 1, name] += 1
        tensors = self._inputs(name, args, kwargs)
        shapes = [tuple(tensor.shape) for tensor in tensors.values()]
        self._running.append((name, call, shapes))
        for place, tensor in tensors.items():
            self._add("input", name, call, place, tensor, longest_sum(shapes))

    def _inputs(self, name: str, args: tuple, kwargs: dict) -> dict[str, Tensor]:
        """Return the tensors among the arguments of a call, by the names of the arguments, however they were passed."""
        try:
            arguments = self._signatures[name].bind_partial(*args, **kwargs).arguments
        except TypeError:
            arguments = {**{str(at): each for at, each in enumerate(args)}, **kwargs}
        return dict(pair for key, value in arguments.items() for pair in _named(f"input {key}", value))

    def _after(self, name: str, module: nn.Module, _args: tuple, output: Any) -> None:
        if self._is_repeated:
            return
        tensors = dict(_named("output", output))
        if in_dry_run():
            self._layouts.note(tensors)
            self._layouts.leave(tensors)
            return
        step = self._step
        if step is None or not self._running:
            return
        while self._running and (entry := self._running.pop())[0] != name:
            pass  # calls that raised
        _, call, shapes = entry
        shapes += [tuple(tensor.shape) for tensor in tensors.values()]
        own = [tuple(p.shape[1:]) for p in module.parameters(recurse=False)]
        terms = longest_sum([*shapes, *((math.prod(shape),) for shape in own)])
        for place, tensor in tensors.items():
            shape = tuple(tensor.shape)
            self._add("output", name, call, place, tensor, terms if shape else num_elements(shapes))
            self._terms[name] = max(self._terms.get(name, 1), math.prod(shape[:-1]))
            if tensor.requires_grad and torch.is_grad_enabled():
                self._follow(name, call, place, tensor, terms)

    def _follow(self, name: str, call: int, place: str, tensor: Tensor, terms: int) -> None:
        """Record the gradient of an output when backward has it."""
        step, rows, forward = self._step, self._rows, self._step.forwards - 1 if self._step else 0

        def note(gradient: Tensor) -> None:
            if step is self._step and step is not None and not in_dry_run():
                layout = self._layouts.find(name, call, f"gradient of {place}", gradient)
                with unseen():
                    held = holding(gradient, layout, is_assumed=self._layouts.is_sharded and layout is None)
                    step.add(
                        "output gradient",
                        name,
                        held,
                        call=(forward, call),
                        tensor=place,
                        terms=terms,
                        rows=rows,
                        factor=1 / rows.num_ranks,  # the loss of a rank is the mean over its rows
                        with_values=name in self._values,
                    )

        tensor.register_hook(note)

    def _add(self, kind: str, name: str, call: int, place: str, tensor: Tensor, terms: int) -> None:
        step = self._step
        assert step is not None
        layout = self._layouts.find(name, call, place, tensor)
        with unseen():
            held = holding(tensor, layout, is_assumed=self._layouts.is_sharded and layout is None)
            where = (step.forwards - 1, call)
            wanted = name in self._values
            step.add(kind, name, held, call=where, tensor=place, terms=terms, rows=self._rows, with_values=wanted)

    def _carrier(self) -> Callable[[], contextlib.AbstractContextManager[None]] | None:
        return self._repeating if threading.get_ident() == self._thread else None  # emulated ranks are threads

    @contextlib.contextmanager
    def _repeating(self) -> Iterator[None]:
        before, self._is_repeated = self._is_repeated, True
        try:
            yield
        finally:
            self._is_repeated = before


class _Hook:
    """A hook that compiled code leaves out, and whose copies do nothing."""

    _vescale_in_graph = "absent"  # docs/protocols.md

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        self._function(*args)

    def __deepcopy__(self, _memo: dict) -> Callable[..., None]:
        return _nothing


def _nothing(*_args: Any) -> None:
    return None


class _Layouts:
    """The placements that values of a static program have, noted while it is recorded on DTensors.

    Args:
        model: with parameters that are DTensors.
    """

    def __init__(self, model: nn.Module) -> None:
        self._meshes = [parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)]
        self.is_sharded = any(mesh.size() > 1 for mesh in self._meshes)
        self._found: dict[tuple[str, int, str], Layout] = {}
        self._calls: Counter[str] = Counter()
        self._running: list[tuple[str, int]] = []

    def enter(self, name: str) -> None:
        """Begin a call of a dry run; an outermost one begins a dry run of its module."""
        if not self._running:
            for other in [each for each in self._calls if f"{each}.".startswith(f"{name}." if name else "")]:
                del self._calls[other]
        self._running.append((name, self._calls[name]))
        self._calls[name] += 1

    def leave(self, outputs: dict[str, Tensor]) -> None:
        """End a call of a dry run, and note the placements of gradients of its outputs in its backward."""
        if not self._running:
            return
        name, call = self._running.pop()
        for place, tensor in outputs.items():
            if isinstance(tensor, DTensor) and tensor.requires_grad:
                key = (name, call, f"gradient of {place}")
                tensor.register_hook(functools.partial(self._keep, key))

    def note(self, tensors: dict[str, Tensor]) -> None:
        """Note the placements of inputs or outputs of the running call."""
        if self._running:
            for place, tensor in tensors.items():
                self._keep((*self._running[-1], place), tensor)

    def _keep(self, key: tuple[str, int, str], tensor: Tensor) -> None:
        if isinstance(tensor, DTensor) and tensor.device_mesh in self._meshes:
            self._found[key] = Layout.of(tensor)

    def find(self, name: str, call: int, place: str, tensor: Tensor) -> Layout | None:
        """Return the layout of a local tensor in a call; None for a DTensor, or if it is not known."""
        if isinstance(tensor, DTensor) or not self._calls[name]:
            return None
        return self._found.get((name, call % self._calls[name], place))


def _named(prefix: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in an argument or a result, with the places where they are."""
    if isinstance(value, Tensor):
        yield prefix, value
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _named(f"{prefix}[{index}]", each)
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _named(f"{prefix}[{name!r}]", each)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
