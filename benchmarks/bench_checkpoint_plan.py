"""Processor time of planning a checkpoint of an 8B model with Adam on many ranks, which one process plays.

``coordinator`` is all that the first rank does besides its own part: it reads what the ranks send, puts it together,
and makes the manifest. ``again`` is the same for the next save of the same layout, whose plan all ranks have kept.
``rank`` is what every rank does, and ``load`` what it does to plan a load into its own shards. ``DCP`` is the global
plan of torch's planner on its coordinator, for what it sends there: without the pickles that it reads and writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from vescale.ckpt import Box, Manifest, StoredFile, StoredTensor, TensorMeta
from vescale.ckpt._control import _message, _read
from vescale.ckpt._format.manifest import check_pieces, manifest_from_text, manifest_to_text
from vescale.ckpt._load.plan import plan_load
from vescale.ckpt._save.checkpoint import Files
from vescale.ckpt._save.holdings import Holding, Inventory, merge_held, merge_plain, split
from vescale.ckpt._save.saving import Given, Offer, Share, Told, Written, _typed
from vescale.ckpt._save.shares import shares
from vescale.ckpt._save.written import Rows

#: name -> number of replicas of each shard on 1,024 ranks, shards along the last dim
CASES = {"sharded": (1, 1), "sharded, 2 replicas": (2, 1), "sharded, tensor parallel 8": (1, 8), "replicated": (0, 1)}
RANKS = (64, 256, 1024)
MOST = (8192, "sharded, tensor parallel 8")
DCP_CASES = ("sharded",)
PICTURE = Path(__file__).parent / "results" / "checkpoint_plan.svg"
_ANY_SIZE = 10**12


@dataclass(frozen=True)
class Row:
    """Processor times in seconds, and the size of the manifest in MiB."""

    case: str
    ranks: int
    coordinator: float
    again: float
    dcp: float | None
    rank: float
    load: float
    manifest: float


@dataclass(frozen=True)
class Times:
    """A benchmark's result that is a table of processor times."""

    title: str
    rows: Sequence[Row]

    def table(self) -> str:
        """Return a markdown table with one line per case."""
        lines = [
            "| layout | ranks | coordinator, s | again, s | DCP, s | rank, s | load, s | manifest, MiB |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
        ]
        for row in self.rows:
            dcp = "" if row.dcp is None else f"{row.dcp:.2f}"
            lines.append(
                f"| {row.case} | {row.ranks:,} | {row.coordinator:.2f} | {row.again:.2f} | {dcp} | {row.rank:.3f} | "
                f"{row.load:.3f} | {row.manifest:.2f} |"
            )
        return "\n".join(lines)


def run(num_rounds: int) -> Times:
    """Measure each case once: every rank is played, so a case has as many rounds as ranks."""
    del num_rounds
    cases = [(name, ranks) for ranks in RANKS for name in CASES]
    cases.append((MOST[1], MOST[0]))
    rows = [_measured(name, ranks) for name, ranks in cases]
    _draw(rows)
    return Times(f"Planning of checkpoints, processor time (picture: results/{PICTURE.name})", rows)


def _draw(rows: Sequence[Row]) -> None:
    """Draw the time of the coordinator over the number of ranks."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "plan"
    figure, axes = pyplot.subplots(figsize=(8.4, 4))
    lines = {name: [row for row in rows if row.case == name] for name in CASES}
    for name, own in lines.items():
        axes.plot([row.ranks for row in own], [row.coordinator for row in own], marker="o", label=name)
    kept = lines[MOST[1]]
    axes.plot([row.ranks for row in kept], [row.again for row in kept], "--", marker="o", label=f"{MOST[1]}, again")
    theirs = [row for row in rows if row.dcp is not None]
    axes.plot([row.ranks for row in theirs], [row.dcp for row in theirs], "k", marker="s", label="DCP, sharded")
    axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel="first rank, seconds of processor time")
    axes.set_xticks([64, 256, 1024, 8192], ["64", "256", "1,024", "8,192"], minor=False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", bbox_to_anchor=(1.02, 1), loc="upper left")
    figure.tight_layout()
    figure.savefig(PICTURE, metadata={"Date": None})
    pyplot.close(figure)


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


def _measured(name: str, ranks: int) -> Row:
    shapes, coordinator, again, of_rank, of_load = _shapes(), _Clock(), _Clock(), _Clock(), _Clock()
    offers = [of_rank(_offered, inventory, rank) for rank, inventory in enumerate(_inventories(shapes, ranks, name))]
    held = coordinator(_merged, offers)
    text = coordinator(_message, Share("", held, True, "save-00000000"))
    held = _read(text, Share, 0).held
    plans = shares(held, range(ranks))
    of_rank.seconds /= ranks
    of_rank(lambda: _written(held, shares(_read(text, Share, 0).held, [1])[1], 1))
    texts = [_written(held, plans[rank], rank) for rank in range(ranks)]
    manifest, layouts = coordinator(_committed, held, texts, None)
    told, digest = _read(offers[0], Offer, 0).told, "0" * 64
    kept = [_message(Given({}, True, digest, digest, digest, None if rank else told)) for rank in range(ranks)]
    texts = [_written(held, plans[rank], rank, is_new=False) for rank in range(ranks)]
    again(lambda: merge_plain([own.told.table for own in _all(kept) if own.told], [0] * ranks))
    assert again(_committed, held, texts, layouts)[0] == manifest
    own = {tensor: _boxes(shape, 1, ranks, CASES[name]) for tensor, shape in shapes.items()}
    of_load(lambda: _planned(own, manifest))
    size, dcp = len(manifest) / 2**20, _dcp_seconds(shapes, ranks, CASES[name]) if name in DCP_CASES else None
    return Row(name, ranks, coordinator.seconds, again.seconds, dcp, of_rank.seconds, of_load.seconds, size)


def _dcp_seconds(shapes: dict[str, tuple[int, ...]], ranks: int, case: tuple[int, int]) -> float:
    plans, clock = [], _Clock()
    properties = TensorProperties(dtype=torch.float32)
    for rank in range(ranks):
        items = []
        for name, shape in shapes.items():
            for box in _boxes(shape, rank, ranks, case):
                chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                data = TensorWriteData(chunk, properties, torch.Size(shape))
                items.append(WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items))
    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner({}, is_coordinator=True)
    clock(planner.create_global_plan, plans)
    return clock.seconds


def _inventories(shapes: dict[str, tuple[int, ...]], ranks: int, name: str) -> Iterator[Inventory]:
    for rank in range(ranks):
        boxes = {shape: _boxes(shape, rank, ranks, CASES[name]) for shape in set(shapes.values())}
        held = {tensor: Holding(TensorMeta("float32", shape), boxes[shape]) for tensor, shape in shapes.items()}
        yield Inventory(held, {"step": "100"})


def _offered(inventory: Inventory, rank: int) -> bytes:
    table, boxes = split(inventory)
    table.digest()
    table.digest_with(boxes)
    return _message(Offer(None if rank else Told(table, None), boxes))


def _all(given: Sequence[bytes]) -> list[Given]:
    return [_read(text, Given, rank) for rank, text in enumerate(given)]


def _merged(offers: Sequence[bytes]) -> Any:
    read = [_read(offer, Offer, rank) for rank, offer in enumerate(offers)]
    tables, table_of = [read[0].told.table], [0] * len(read)
    merge_plain(tables, table_of)
    return merge_held(tables, table_of, [offer.boxes for offer in read])


def _written(held: Any, plan: Any, rank: int, *, is_new: bool = True) -> bytes:
    rows = Rows(held)
    pieces = rows.packed((write.name, 0, write.box) for write in plan.writes) if is_new else None
    replicas = rows.packed((name, 7, box) for name, box in plan.replicas)
    return _message(Written(replicas, Files({f"data-{rank}-0.safetensors": StoredFile(_ANY_SIZE, rank)}, pieces)))


def _committed(held: Any, texts: Sequence[bytes], layouts: Any) -> tuple[str, Any]:
    written = [_read(text, _typed(Written, "more", Files), rank) for rank, text in enumerate(texts)]
    rows = Rows(held)
    assert rows.torn([own.replicas for own in written]) is None
    written = [own.more for own in written]
    layouts = layouts or rows.layouts([own.pieces for own in written], [len(own.files) for own in written])
    tensors = {name: StoredTensor(meta, layouts[name]) for name, meta in held.tensors().items()}
    files = {name: file for own in written for name, file in own.files.items()}
    return manifest_to_text(Manifest(len(written), 0.0, {}, {}, "save-00000000", files, tensors)), layouts


def _planned(boxes: Any, text: str) -> None:
    manifest = manifest_from_text(text, where="here")
    check_pieces(manifest, "here")
    plan_load(boxes, manifest)
