"""Static mode: the module's own code on local tensors, communication only at the boundaries of the plan.

Folder map; a file imports only files above it::

    model              what a program uses of the parallelized model
    parts              full names; the submodules, eager parts and experts of a program
    movement/          from one layout to another: steps, collectives, conversions, interleaved
    direct_calls       boundaries without hooks
    local_modules      embeddings, biases and attributes that must change for local tensors
    recording/observe  boundary records: one tensor at one boundary
    recording/names    which modules run
    operators          recorded random operators, by local shapes and by the order of calls
    recording/draws    the recorder of random operators
    recording/layouts  recorded layouts, by signature of the call
    recording/dry_run  one call without side effects: the recording and the check
    recording/compare  the comparison of both dry runs
    local_parameters   plain leaves over the memory of DTensors, and their gradients
    call               the call in progress: its state, values at its edges
    random_operators   random operators on shards draw what one device draws
    regions            parts in eager mode, experts
    program            the state machine

Life cycle of a call::

    enter   IDLE: parameters stale? make local parameters and the patch
            signature known?  no: record on DTensors -> adopt layouts -> check on local tensors -> compare
            open: apply the patch, arguments -> local tensors
    forward the module's own code; boundaries run recorded conversions
    leave   restore the patch, results -> the tensors that eager mode returns
    backward: local gradients -> DTensors; recomputed parts open the program again

Invariants:

- The patch is in the module exactly while the state is OPEN. Only the program changes the state.
- A recording is plain data (``Recording``). The program adopts it; no dry run writes into the program.
- All ranks of the mesh record the same calls in the same order. An error on one rank is raised on all.
- The hooks of parts depend on ``Call``, not on the program.

Rows of data-parallel ranks are one more mesh axis of a plan. ``_rows`` records modules without a plan, and shares the
search and the modes. Where later work goes: a pipeline stage owns a ``StaticProgram`` as ``Execution`` does, and calls
``enter`` and ``leave``.
"""

from .program import StaticProgram

__all__ = ["StaticProgram"]
