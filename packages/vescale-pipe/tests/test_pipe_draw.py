"""Schedules as pictures: a text table, and a file drawn with matplotlib."""

import json
import sys

import pytest

from vescale.pipe import (
    Costs,
    Schedule,
    draw,
    dual_pipe_v,
    format_table,
    gpipe,
    lower,
    one_f_one_b,
    simulate,
    to_trace,
    zb_v,
)


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


def test_what_overlaps_is_one_cell_of_a_table():
    table = format_table(lower(dual_pipe_v(2, 4)))
    assert "|0F3+3B1       |" in table
    assert "SEND" not in table


@pytest.mark.parametrize("make", [one_f_one_b, dual_pipe_v])
@pytest.mark.parametrize("suffix, magic", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_draw_writes_a_picture(tmp_path, suffix, magic, make):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"schedule.{suffix}"
    draw(make(4, 8), path, costs=Costs(1.0, 1.2, 0.8, latency=0.05))
    assert path.read_bytes().startswith(magic)


@pytest.mark.parametrize("make", [zb_v, dual_pipe_v])
def test_labels_fit_their_boxes(tmp_path, monkeypatch, make):
    figure = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_args, **_kwargs: drawn.append(self))
    draw(simulate(make(4, 10), Costs(1, 1.2, 0.8, 0.05)), tmp_path / "step.svg")
    (axes,) = drawn[0].axes
    renderer = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg(drawn[0]).get_renderer()
    boxes = [bar.get_window_extent(renderer) for bars in axes.containers for bar in bars]
    labels = [text.get_window_extent(renderer) for text in axes.texts]
    assert len(labels) > 60
    for label in labels:
        assert any(box.x0 <= label.x0 and label.x1 <= box.x1 and box.y0 <= label.y0 < box.y1 for box in boxes)


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'vescale-pipe\[draw\]'"):
        draw(gpipe(1, 1), tmp_path / "schedule.png")


def test_a_trace_has_every_action_on_its_rank(tmp_path):
    schedule = lower(one_f_one_b(2, 3), reduce_grad=True)
    costs = Costs(1.0, 2.0, 1.0, latency=0.5, reduce_grad=4.0)
    to_trace(schedule, tmp_path / "step.json", costs=costs, microseconds=10.0)
    events = [e for e in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["name"]) for e in events] == [(rank, str(action)) for rank, action in schedule]
    found = {e["name"]: e for e in events}
    assert (found["1F0"]["ts"], found["1F0"]["dur"], found["1F0"]["tid"]) == (15.0, 10.0, 0)
    assert (found["1REDUCE_GRAD"]["dur"], found["1REDUCE_GRAD"]["tid"]) == (40.0, 1)


def test_a_unit_of_time_is_positive(tmp_path):
    with pytest.raises(ValueError, match="expected a finite number above 0 for microseconds, got 0"):
        to_trace(gpipe(1, 1), tmp_path / "step.json", microseconds=0)
