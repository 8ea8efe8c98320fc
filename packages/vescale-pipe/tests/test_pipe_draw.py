"""Schedules as pictures: a text table, and a file drawn with matplotlib."""

import sys

import pytest

from vescale.pipe import Costs, Schedule, draw, format_table, gpipe, one_f_one_b


def test_table_of_one_f_one_b():
    assert format_table(one_f_one_b(3, 2)).splitlines() == [
        "rank 0 |F0 |F1 | .   .   .   .   . |B0     | . |B1     |",
        "rank 1 | . |F0 |F1 | .   . |B0     | . |B1     | .   . |",
        "rank 2 | .   . |F0 |B0     |F1 |B1     | .   .   .   . |",
        "bubble 50.0%, peak activations 2 2 1 (micro-batches per rank)",
    ]


def test_rows_of_a_table_are_equally_long():
    *rows, _ = format_table(gpipe(4, 12)).splitlines()
    assert len({len(row) for row in rows}) == 1


def test_table_names_stages_where_a_rank_has_several():
    assert "|3F0 |3B0" in format_table(Schedule.parse("0F0 3F0 3B0 0B0; 1F0 2F0 2B0 1B0"))


@pytest.mark.parametrize("suffix, magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_draw_writes_a_picture(tmp_path, suffix, magic):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"schedule.{suffix}"
    draw(one_f_one_b(4, 8), path, costs=Costs(1.0, 1.2, 0.8, latency=0.05))
    assert path.read_bytes().startswith(magic)


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'vescale-pipe\[draw\]'"):
        draw(gpipe(1, 1), tmp_path / "schedule.png")
