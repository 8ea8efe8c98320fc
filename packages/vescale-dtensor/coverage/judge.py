"""Run one case on a rank, and judge it on the first rank.

All ranks build the sample's tensors in the case's placements, run the operator, and publish their results: shards with
their placements, plain values, or the exception. Then they do the same with the gradients of a random weighting of the
results. The first rank assembles the results and compares them with those of the plain operator on plain tensors.
"""

from __future__ import annotations

import dataclasses
import itertools

import _torch
import torch
from board import Board
from combos import parse
from compare import check_backward, check_leaves, is_differentiable, on_one_device, random_weight, same_when_finished
from pieces import Mismatch, assemble, cut, part
from plan import UNINITIALISED, Case, Plan, given_out, run_variant
from records import LIMIT, decoded, described, encoded, head, same, unpacked
from torch.distributed.tensor import DTensor, Partial, Replicate

__all__ = ["Rank", "Verdict"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a case.

    Attributes:
        kind: ``right``, ``refused`` (by an error of ours, or, for stock, any), ``raised`` (an error that is not ours),
            ``wrong``, ``diverged`` or ``died``.
        text: The difference, or the exception.
        where: ``forward`` or ``backward``.
        sharded: A tensor was sharded and no element of it was sent to another rank.
        collectives: How many collectives the forward needed; for a refusal, how many came before it.
    """

    kind: str
    text: str = ""
    where: str = "forward"
    sharded: bool = False
    collectives: int = 0


class Rank:
    """One rank of a world: runs cases, and, if it is the first, judges them."""

    def __init__(self, rank: int, board: Board, meshes: dict, *, stock: bool) -> None:
        self.rank, self.board, self.meshes, self.stock = rank, board, meshes, stock
        self._references: dict = {}

    def forget(self) -> None:
        """Drop the references of the last operator."""
        self._references.clear()

    def run(self, plan: Plan, case: Case) -> Verdict | None:
        """Run a case; return the verdict on the first rank, and on every rank if the ranks diverged."""
        mesh = self.meshes[case.num_axes]
        record, state = self._forward(plan, case, mesh)
        records = self._exchanged(record)
        if verdict := self._failed(records, "forward"):
            return verdict if self.rank == 0 or verdict.kind == "diverged" else None
        verdict = self._judged(plan, case, records, "forward") if self.rank == 0 else None
        if case.variant != "op" or plan.op.name in UNINITIALISED:
            return verdict
        backward = self._backward(case, mesh, *state)
        records = self._exchanged(backward)
        if failed := self._failed(records, "backward"):
            if failed.kind == "diverged" or (self.rank == 0 and verdict.kind == "right"):
                return failed
            return verdict
        if self.rank == 0 and verdict.kind == "right":
            judged = self._judged(plan, case, records, "backward")
            return verdict if judged.kind == "right" else judged
        return verdict

    def _exchanged(self, record: dict) -> list[dict]:
        """Publish a record; return those of all ranks. Their tensors stay packed: most ranks do not use them."""
        tick = self.board.publish(self.rank, record)
        return [self.board.read(rank, tick) for rank in range(self.board.num_ranks)]

    # -------------------------------------------------------------------------------------------- running

    def _inputs(self, plan: Plan, case: Case, mesh) -> list[DTensor]:
        sample, coord = plan.samples[case.sample], mesh.get_coordinate()
        made = []
        for number, (whole, text) in enumerate(zip(sample.whole(), case.placements, strict=True)):
            placements = parse(text)
            local = part(whole, mesh.shape, coord, placements, seed=number + 17)
            made.append(_torch.make(local, whole.shape, whole.stride(), mesh, placements))
        return made

    def _forward(self, plan: Plan, case: Case, mesh) -> tuple[dict, tuple]:
        sample = plan.samples[case.sample]
        inputs = self._inputs(plan, case, mesh)
        before = [(_torch.local_tensor(tensor).clone(), tensor.shape) for tensor in inputs]
        if case.variant == "op":
            for tensor, grad in zip(inputs, sample.requires_grad, strict=True):
                tensor.requires_grad_(grad)
        counted = _torch.gathers(), _torch.collectives_started(mesh)
        result, record = None, {}
        try:
            result = self._call(plan, case, sample.arguments(inputs))
        except Exception as error:
            record["error"] = described(error)
        record["gathers"] = _torch.gathers() - counted[0]
        record["collectives"] = _torch.collectives_started(mesh) - counted[1]
        if "error" not in record:
            with torch.no_grad():
                record["results"] = [encoded(leaf) for leaf in _torch.tree_leaves(result)]
                record["inputs"] = [
                    None if same(_torch.local_tensor(tensor), old) and tensor.shape == shape else encoded(tensor)
                    for tensor, (old, shape) in zip(inputs, before, strict=True)
                ]
        return record, (inputs, result)

    def _call(self, plan: Plan, case: Case, arguments: tuple):
        torch.default_generator.manual_seed(1234)
        args, kwargs = arguments
        if case.variant == "op":
            return run_variant(plan.op, "op", args, kwargs)
        with torch.no_grad():
            if case.variant == "inplace":
                return run_variant(plan.op, "inplace", args, kwargs)
            if case.variant == "out":  # the first run, which says what the result is like, may write to its operands
                args, kwargs = _torch.tree_map(_copied, arguments)
            result = run_variant(plan.op, "op", args, kwargs)
            if case.variant == "twice":
                return [result, [_used(leaf) for leaf in _torch.tree_leaves(result)]]
            (args, kwargs), out = arguments, given_out(result, _like)
            torch.default_generator.manual_seed(1234)
            result = run_variant(plan.op, "out", args, kwargs, out)
            return [out if result is None else result, out]  # some that write to lists return nothing

    def _backward(self, case: Case, mesh, inputs: list, result: object) -> dict:
        record: dict = {"gathers": 0, "collectives": 0}
        before = _torch.collectives_started(mesh)
        try:
            outs = {i: leaf for i, leaf in enumerate(_torch.tree_leaves(result)) if is_differentiable(leaf)}
            ins = {i: tensor for i, tensor in enumerate(inputs) if tensor.requires_grad}
            weights = [self._weight(i, leaf, case.partial_grad) for i, leaf in outs.items()]
            grads = ()
            if outs and ins:
                grads = torch.autograd.grad(list(outs.values()), list(ins.values()), weights, allow_unused=True)
            with torch.no_grad():
                record["results"] = [None if grad is None else encoded(grad) for grad in grads]
            record["outs"] = list(outs)
        except Exception as error:
            record["error"] = described(error)
        record["collectives"] = _torch.collectives_started(mesh) - before
        return record

    def _weight(self, number: int, leaf: torch.Tensor, partial: bool) -> torch.Tensor:
        whole = random_weight(number, leaf)
        if not isinstance(leaf, DTensor):
            return whole
        mesh = leaf.device_mesh
        placements = [Replicate() if isinstance(p, Partial) else p for p in leaf.placements]
        if partial:
            placements = [Partial() if isinstance(p, Replicate) else p for p in placements]
        local = part(whole, mesh.shape, mesh.get_coordinate(), placements, seed=number)
        return _torch.make(local, whole.shape, whole.stride(), mesh, placements)

    # -------------------------------------------------------------------------------------------- judging

    def _failed(self, records: list[dict], where: str) -> Verdict | None:
        """Return a verdict if a rank raised, or if the ranks diverged."""
        errors = [record.get("error") for record in records]
        started = {record["collectives"] for record in records}
        if not any(errors):
            if len(started) > 1:
                return Verdict("diverged", f"the ranks started different numbers of collectives: {started}", where)
            kinds = {repr([head(entry) for entry in record["results"]]) for record in records}
            if len(kinds) > 1:
                return Verdict("diverged", "the ranks returned different kinds: " + " | ".join(kinds)[:LIMIT], where)
            return None
        names = {error[0] if error else "no error" for error in errors}
        if len(names) > 1 or len(started) > 1:
            each = "; ".join(f"rank {i}: {e[0] + ': ' + e[1][:160] if e else 'no error'}" for i, e in enumerate(errors))
            return Verdict("diverged", each, where)
        name, text, ours = errors[0]
        kind = "refused" if ours or self.stock else "raised"
        return Verdict(kind, f"{name}: {text}", where, collectives=records[0]["collectives"])

    def _judged(self, plan: Plan, case: Case, records: list[dict], where: str) -> Verdict:
        gathers, collectives = records[0]["gathers"], records[0]["collectives"]
        sharded = case.is_sharded and not gathers
        is_blank = plan.op.name in UNINITIALISED
        for record in records:
            for name in ("results", "inputs"):
                record[name] = [unpacked(entry, blank=is_blank) for entry in record.get(name, ())]
        try:
            expected = self._reference(plan, case)
            if where == "forward":
                self._check_forward(plan, case, records, expected)
            else:
                mesh_shape = tuple(self.meshes[case.num_axes].shape)
                check_backward(records, expected, mesh_shape)
        except Mismatch as finding:
            return Verdict("wrong", str(finding)[:LIMIT], where, sharded, collectives)
        return Verdict("right", "", where, sharded, collectives)

    def _check_forward(self, plan: Plan, case: Case, records: list[dict], expected: dict) -> None:
        mesh_shape = self.meshes[case.num_axes].shape
        wanted = expected["results"]
        got = [
            decoded([record["results"][i] for record in records], mesh_shape) for i in range(len(records[0]["results"]))
        ]
        rtol = expected["rtol"]
        readings = [got[: len(got) // 2], got[len(got) // 2 :]] if case.variant in ("out", "twice") else [got]
        for reading in readings:
            try:
                check_leaves(reading, wanted, "result", rtol)
            except Mismatch as finding:
                if not same_when_finished(plan.samples[case.sample], reading, expected, finding):
                    raise
        for i, whole in enumerate(expected["inputs"]):
            entries = [record["inputs"][i] for record in records]
            if all(entry is not None for entry in entries):
                check_leaves(
                    [decoded(entries, mesh_shape)], [whole], f"tensor {i} of the arguments after the call", rtol
                )
            elif any(entry is not None for entry in entries) or expected["changed"][i]:
                self._check_partly_changed(plan, case, i, entries, whole, rtol)

    def _check_partly_changed(self, plan, case, i: int, entries: list, whole: torch.Tensor, rtol: float) -> None:
        """Check an argument that was written on some ranks only: use the original shards of the others."""
        mesh_shape, placements = self.meshes[case.num_axes].shape, parse(case.placements[i])
        start = plan.samples[case.sample].whole()[i]
        coords = itertools.product(*map(range, mesh_shape))
        locals_ = [
            part(start, mesh_shape, coord, placements, seed=i + 17) if entry is None else entry[-1]
            for coord, entry in zip(coords, entries, strict=True)
        ]
        got = assemble(locals_, whole.shape, mesh_shape, placements)
        check_leaves([got], [whole], f"tensor {i} of the arguments after the call", rtol)

    def _reference(self, plan: Plan, case: Case) -> dict:
        """Return the results of one device, its arguments after the call, and its gradients."""
        key = case.sample, "op" if case.variant in ("out", "twice") else case.variant
        if key not in self._references:
            self._references[key] = on_one_device(plan, case.sample, key[1])
        return self._references[key]


def _copied(leaf: object) -> object:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _used(leaf: object) -> object:
    """Use a result, and return what the use gives: its values on every rank."""
    if not isinstance(leaf, DTensor):
        return leaf
    return leaf.clone().redistribute(placements=[Replicate()] * leaf.device_mesh.ndim)


def _like(result: torch.Tensor) -> torch.Tensor:
    """Return a tensor of zeros for ``out=``; in the placements of the result, which must not be partial."""
    if not isinstance(result, DTensor):
        return result.clone().zero_()
    mesh = result.device_mesh
    placements = [Replicate() if isinstance(p, Partial) else p for p in result.placements]
    whole = torch.zeros(result.shape, dtype=result.dtype)
    local = cut(whole, mesh.shape, mesh.get_coordinate(), placements).clone()
    return _torch.make(local, result.shape, result.stride(), mesh, placements)
