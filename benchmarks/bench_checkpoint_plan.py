"""Processor time of planning a checkpoint of an 8B model with Adam on many ranks, which one process plays.

``coordinator`` is all that the first rank does besides its own part: it reads what the ranks send, puts it together,
and makes the manifest. ``rank`` is what every rank does, and ``load`` what it does to plan a load into its own shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vescale.ckpt import Box, Manifest, StoredFile, StoredTensor, TensorMeta
from vescale.ckpt._control import _message, _read
from vescale.ckpt._format.manifest import check_pieces, manifest_from_text, manifest_to_text
from vescale.ckpt._load.plan import plan_load
from vescale.ckpt._save.holdings import Holding, Inventory, merge, split
from vescale.ckpt._save.save import _Offer, _Share, _Written
from vescale.ckpt._save.shares import shares
from vescale.ckpt._save.written import Rows

#: name -> number of replicas of each shard on 1,024 ranks, shards along the last dim
CASES = {"sharded": (1, 1), "sharded, 2 replicas": (2, 1), "sharded, tensor parallel 8": (1, 8), "replicated": (0, 1)}
RANKS = (64, 1024)
MOST = (8192, "sharded, tensor parallel 8")
_ANY_SIZE = 10**12


@dataclass(frozen=True)
class Times:
    """A benchmark's result that is a table of processor times."""

    title: str
    rows: Sequence[tuple[str, int, float, float, float, float]]

    def table(self) -> str:
        """Return a markdown table with one line per case."""
        lines = [
            "| layout | ranks | coordinator of a save, s | rank of a save, s | rank of a load, s | manifest, MiB |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        for name, ranks, coordinator, rank, load, size in self.rows:
            lines.append(f"| {name} | {ranks:,} | {coordinator:.2f} | {rank:.3f} | {load:.3f} | {size:.2f} |")
        return "\n".join(lines)


def run(num_rounds: int) -> Times:
    """Measure each case once: every rank is played, so a case has as many rounds as ranks."""
    del num_rounds
    cases = [(name, ranks) for ranks in RANKS for name in CASES]
    cases.append((MOST[1], MOST[0]))
    return Times("Planning of checkpoints, processor time", [_measured(name, ranks) for name, ranks in cases])


def _shapes() -> dict[str, tuple[int, ...]]:
    """Return the parameters of LLaMA-3 8B, and the state of Adam."""
    hidden, kv, ffn, vocab = 4096, 1024, 14336, 128256
    model: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "head": (vocab, hidden), "norm": (hidden,)}
    for i in range(32):
        layer = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
        layer |= {"gate": (ffn, hidden), "up": (ffn, hidden), "down": (hidden, ffn)}
        layer |= {"norm1": (hidden,), "norm2": (hidden,)}
        model |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    names = {f"model/{name}": shape for name, shape in model.items()}
    for name, shape in model.items():
        entries: dict[str, tuple[int, ...]] = {"exp_avg": shape, "exp_avg_sq": shape, "step": ()}
        names |= {f"optimizer/state/{name}/{entry}": own for entry, own in entries.items()}
    return names


def _cut(box: Box, dim: int, count: int, index: int) -> Box | None:
    """Return one of ``count`` shards, as torch makes them; None if it is empty."""
    length = -(-box.sizes[dim] // count)
    first, last = min(index * length, box.sizes[dim]), min((index + 1) * length, box.sizes[dim])
    return box.rows(dim, first, last) if first < last else None


def _boxes(shape: tuple[int, ...], rank: int, ranks: int, case: tuple[int, int]) -> tuple[Box, ...]:
    replicas, columns = case[0] or ranks, case[1]
    if not shape or replicas == ranks:
        return (Box.full(shape),)
    place, column = divmod(rank % (ranks // replicas), columns)
    rows = _cut(Box.full(shape), 0, ranks // replicas // columns, place)
    own = rows and _cut(rows, len(shape) - 1, columns, column)
    return (own,) if own else ()


class _Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        began = time.process_time()
        result = function(*args)
        self.seconds += time.process_time() - began
        return result


def _measured(name: str, ranks: int) -> tuple[str, int, float, float, float, float]:
    shapes, coordinator, of_rank, of_load = _shapes(), _Clock(), _Clock(), _Clock()
    offers = [of_rank(_offered, inventory, rank) for rank, inventory in enumerate(_inventories(shapes, ranks, name))]
    read = coordinator(lambda: [_read(offer, _Offer, rank) for rank, offer in enumerate(offers)])
    merged = coordinator(merge, [read[0].table], [0] * ranks, [offer.boxes for offer in read])
    text = coordinator(_message, _Share("save-00000000", merged.held))
    held = _read(text, _Share, 0).held
    plans = shares(held, range(ranks))
    of_rank.seconds /= ranks
    of_rank(lambda: _written(held, shares(_read(text, _Share, 0).held, [1])[1], 1))
    texts = [_written(held, plans[rank], rank) for rank in range(ranks)]
    written = coordinator(lambda: [_read(own, _Written, rank) for rank, own in enumerate(texts)])
    manifest = coordinator(lambda: _committed(held, written))
    own = {tensor: _boxes(shape, 1, ranks, CASES[name]) for tensor, shape in shapes.items()}
    of_load(lambda: _planned(own, manifest))
    return name, ranks, coordinator.seconds, of_rank.seconds, of_load.seconds, len(manifest) / 2**20


def _inventories(shapes: dict[str, tuple[int, ...]], ranks: int, name: str) -> Iterator[Inventory]:
    for rank in range(ranks):
        boxes = {shape: _boxes(shape, rank, ranks, CASES[name]) for shape in set(shapes.values())}
        held = {tensor: Holding(TensorMeta("float32", shape), boxes[shape]) for tensor, shape in shapes.items()}
        yield Inventory(held, {"step": "100"})


def _offered(inventory: Inventory, rank: int) -> bytes:
    table, boxes = split(inventory)
    table.digest()
    return _message(_Offer(boxes, None if rank else table))


def _written(held: Any, plan: Any, rank: int) -> bytes:
    rows = Rows(held)
    pieces = rows.packed((write.name, 0, write.box) for write in plan.writes)
    replicas = rows.packed((name, 7, box) for name, box in plan.replicas)
    return _message(_Written({f"data-{rank}-0.safetensors": StoredFile(_ANY_SIZE, rank)}, pieces, replicas))


def _committed(held: Any, written: Sequence[Any]) -> str:
    rows = Rows(held)
    assert rows.torn([own.replicas for own in written]) is None
    layouts = rows.layouts([own.pieces for own in written], [len(own.files) for own in written])
    tensors = {name: StoredTensor(meta, layouts[name]) for name, meta in held.tensors().items()}
    files = {name: file for own in written for name, file in own.files.items()}
    return manifest_to_text(Manifest(len(written), 0.0, {}, {}, "save-00000000", files, tensors))


def _planned(boxes: Any, text: str) -> None:
    manifest = manifest_from_text(text, where="here")
    check_pieces(manifest, "here")
    plan_load(boxes, manifest)
