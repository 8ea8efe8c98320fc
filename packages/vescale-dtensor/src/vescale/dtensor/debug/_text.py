"""Text for reports and errors: placements and meshes by the names of the mesh's axes, numbers of bytes, tables."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

__all__ = ["axis_names", "bytes_text", "mesh_text", "placements_text", "plural", "text_table"]

UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of the axes; an axis without a name is named by its position.

    Example:
        >>> axis_names(init_device_mesh("cpu", (2, 2)))                             # doctest: +SKIP
        ('axis 0', 'axis 1')
    """
    return tuple(mesh.mesh_dim_names or (f"axis {i}" for i in range(mesh.ndim)))


def mesh_text(mesh: DeviceMesh) -> str:
    """Return the axes with their sizes: ``mesh dp=2, tp=4 (cpu)``."""
    axes = ", ".join(f"{name}={size}" for name, size in zip(axis_names(mesh), mesh.shape, strict=True))
    return f"mesh {axes} ({mesh.device_type})"


def placements_text(mesh: DeviceMesh, placements: Sequence[Placement]) -> str:
    """Return the placement on every axis: ``dp: Shard(dim=0), tp: Replicate()``."""
    return ", ".join(f"{name}: {p!r}" for name, p in zip(axis_names(mesh), placements, strict=True))


def bytes_text(num_bytes: float) -> str:
    """Return a number of bytes, which may be an average, with three or four digits: ``1.5 KiB``.

    Example:
        >>> bytes_text(1536), bytes_text(12)
        ('1.5 KiB', '12 B')
    """
    if num_bytes < 1024:
        return f"{num_bytes:.4g} B"
    value = float(num_bytes)
    for unit in UNITS:
        value /= 1024
        if value < 1000 or unit == UNITS[-1]:
            break
    return f"{value:.3g} {unit}"


def plural(count: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``.

    Example:
        >>> plural(1, "rank"), plural(2, "rank")
        ('1 rank', '2 ranks')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, num_text: int) -> str:
    """Lay out rows under a header, the first ``num_text`` columns to the left and the others to the right.

    The last row is a sum and stands under a rule of its own.

    Example:
        >>> print(text_table(["name", "count"], [["a", "10"], ["all", "10"]], num_text=1))
        name  count
        ----  -----
        a        10
        ----  -----
        all      10
    """
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [c.ljust(w) if i < num_text else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        return "  ".join(cells).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(header), rule, *map(line, rows[:-1]), rule, line(rows[-1])])
