"""The programs of an engine, one for each signature of inputs; all stages record a program, or none does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .._stages.placement import Placement
from .draws import DrawRules, unequal_generators
from .microbatch import Inputs, checksum, describe_inputs, digest
from .program import Program
from .ties import TiedWeights
from .transport import Transport
from .values import PipelineError


class Programs:
    """Finds the programs of the micro-batches of a step.

    Args:
        placement: the rank of every stage.
        transport: this rank's communication.
        draws: how steps draw random numbers.
        ties: the weights that several stages use.
    """

    def __init__(self, placement: Placement, transport: Transport, draws: DrawRules, ties: TiedWeights) -> None:
        self._placement, self._transport, self._draws, self._ties = placement, transport, draws, ties
        self._of_form: dict[str, Program] = {}

    def of(
        self,
        microbatches: Sequence[Inputs],
        sizes: Sequence[int],
        mode: str,
        stage_form: str,
        record: Callable[[Inputs], Program] | None,
    ) -> list[Program]:
        """Return the program of each micro-batch: the same one for the same number of rows.

        Args:
            microbatches: their inputs.
            sizes: their numbers of rows.
            mode: what else the program depends on, equal on all ranks.
            stage_form: the same of this rank alone.
            record: returns the program of a micro-batch in a dry run; None otherwise.

        Raises:
            PipelineError: the stages got different inputs.
        """
        first = {size: sizes.index(size) for size in dict.fromkeys(sizes)}
        forms = [f"{describe_inputs(*microbatches[index])}; {mode}" for index in first.values()]
        known = [self._known(form, stage_form) for form in forms]
        is_stale = [program is None for program in known]
        if self._placement.num_stages > 1:
            is_stale = self._stale_anywhere(forms, known)
        of_size: dict[int, Program] = {}
        for (size, index), form, program, stale in zip(first.items(), forms, known, is_stale, strict=True):
            if program is None or stale:
                program = self._new(stage_form, microbatches[index], record)
                self._of_form[form] = program
            of_size[size] = program
        return [of_size[size] for size in sizes]

    def __len__(self) -> int:
        """Return the number of programs that are known."""
        return len(self._of_form)

    def forget(self, program: Program) -> None:
        """Drop a program after a failed recording; the next step records again."""
        self._of_form = {form: kept for form, kept in self._of_form.items() if kept is not program}

    def _known(self, form: str, stage_form: str) -> Program | None:
        program = self._of_form.get(form)
        return program if program is not None and program.stage_form == stage_form else None

    def _stale_anywhere(self, forms: Sequence[str], known: Sequence[Program | None]) -> list[bool]:
        """Return which programs some stage does not know. A collective.

        Raises:
            PipelineError: the stages got different inputs, or their generators are at different positions.
        """
        key, place = digest("\n".join(forms)), self._draws.generators.read().checksum
        stale = sum(1 << i for i, program in enumerate(known) if program is None)
        arrivals = self._transport.gather_integers([key, stale, place])
        if any(other != key for other, _, _ in arrivals):
            gathered = self._transport.gather_objects(" and ".join(forms))
            lines = "\n".join(f"  {self._placement.name_of(rank)}: {text}" for rank, text in enumerate(gathered))
            raise PipelineError(
                f"expected the same inputs on every stage, got different ones; pass the same batch:\n{lines}"
            )
        draws = any(program is not None and program.draws for program in known)
        if draws and any(other != place for _, _, other in arrivals):
            raise unequal_generators()
        return [any(bits >> i & 1 for _, bits, _ in arrivals) for i in range(len(known))]

    def _new(self, stage_form: str, inputs: Inputs, record: Callable[[Inputs], Program] | None) -> Program:
        """Return a program, which has to be recorded if there are several stages. A collective there."""
        if self._placement.num_stages == 1:
            return Program(stage_form=stage_form, recorded=True)
        if record is not None:
            program = record(inputs)
            program.stage_form, program.draws = stage_form, None  # what the twin has drawn is not followed
            return program
        self._check_same_elements(inputs)
        return Program(stage_form=stage_form, ties=self._ties.agree())

    def _check_same_elements(self, inputs: Inputs) -> None:
        if self._transport.is_alone:
            return
        sums = self._transport.gather_integers([checksum(*inputs)])
        if any(other != sums[0] for other in sums):
            raise PipelineError(
                "expected the same inputs on every stage, got the same shapes with different elements; pass the same "
                "batch to all ranks of the pipeline axis (shard the data over the data-parallel axis only)"
            )
