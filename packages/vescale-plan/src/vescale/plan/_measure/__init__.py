"""Run a model on tensors without data, and count what a training step keeps and computes.

| file | concept |
|---|---|
| `build.py` | the model: from a module, a config or a class with arguments; a copy with fake parameters |
| `inputs.py` | example inputs of any number of rows |
| `experts.py` | the experts in blocks |
| `values.py` | operators on shapes, and on data where code reads it: integers, masks |
| `split.py` | which memory tensor parallelism splits, followed through operators |
| `memory.py` | memory as it is allocated and freed, by position and by kind |
| `recorder.py` | the mode in which the model runs |
| `attention.py` | fused attention, as a device computes it |
| `run.py` | forward and backward, twice; the result as numbers per row |

Each file imports only files listed before it, and `result.py`, the result as data.
"""
