"""Rows are shown as lines, or beside a progress bar where tqdm is installed."""

import io
import sys

import pytest

from vescale._progress import Bar, Lines, display, line

ROW = {
    "step": 20,
    "loss": 2.34567,
    "grad_norm": 1.25,
    "step_seconds": 0.5,
    "tokens_per_second": 1.234e6,
    "tokens_per_second_per_device": 12340.0,
    "mfu": 0.4567,
    "memory_peak_bytes": 3 * 2**29,
    "exposed_communication": 0.034,
    "pipeline_wait": 0.1,
}
LINE = (
    "loss 2.3457  grad norm 1.25  1.2M tokens/s (12.3k per device)  MFU 45.7%  memory 1.50 GiB  "
    "waits for communication 3.4%  waits for pipeline 10.0%"
)


def test_a_line_has_every_number():
    assert line(ROW) == LINE
    assert line({"step": 1}) == ""


def test_lines_are_written():
    lines = []
    shown = display(write=lines.append, progress=False, num_steps=None)
    assert type(shown) is Lines
    shown.advance()
    shown.show(ROW)
    shown.close()
    assert lines == [f"step 20  {LINE}"]


def test_without_tqdm_a_bar_is_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert type(display(write=print, progress=True, num_steps=3)) is Lines


def test_a_bar_counts_steps_and_shows_the_row(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    lines = []
    bar = display(write=lines.append, progress=True, num_steps=3)
    assert isinstance(bar, Bar)
    for _ in range(3):
        bar.advance()
    bar.show({"step": 3, "loss": 1.5})
    bar.close()
    assert lines == []
    assert "3/3" in shown.getvalue()
    assert "loss 1.5000" in shown.getvalue()


@pytest.mark.parametrize(("number", "text"), [(12.0, "12.0"), (1234.0, "1.2k"), (5e6, "5.0M"), (7.3e9, "7.3G")])
def test_rates_are_short(number, text):
    assert line({"step": 1, "tokens_per_second": number}) == f"{text} tokens/s"
