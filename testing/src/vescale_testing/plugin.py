"""Pytest plugin: an option, markers, a fixture, and one thread.

`ranks` works without it. The plugin adds

- `--ranks-timeout SECONDS`, the time-out of rank tests that name none (60);
- the marker `gpu`: such tests are skipped, with a reason, where there is no CUDA device;
- the marker `ranks`, given to every test decorated with `ranks`, so that `-m "not ranks"` selects the quick rest;
- the markers `thorough`, for what the plain run leaves out, and `halved` (`vescale_testing.halves`);
- the fixture `compile_with`, which chooses a backend of `torch.compile` that is ready sooner than generated kernels;
- one torch thread in the parent, so that its results do not depend on the machine and a fork copies no worker threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from vescale_testing.halves import mark_the_rest
from vescale_testing.ranks import default_timeout


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--ranks-timeout`."""
    parser.getgroup("ranks", "tests on several processes").addoption(
        "--ranks-timeout",
        type=float,
        default=default_timeout.get(),
        metavar="SECONDS",
        help="time-out of tests under @ranks that name none (default: %(default)g s)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and limit torch to one thread."""
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped with a reason elsewhere")
    config.addinivalue_line("markers", "thorough: takes long; the plain run of a project may leave it out")
    config.addinivalue_line("markers", "halved: every second of its cases is thorough, as the fields of a chessboard")
    config.addinivalue_line("markers", "ranks: runs on several processes; set by the decorator of that name")
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests decorated with `ranks` and the rest of those that are `halved`; skip `gpu` tests without a GPU."""
    # device_count() asks NVML; is_available() would start CUDA, which does not survive a fork.
    no_gpu = torch.cuda.device_count() == 0
    for item in items:
        if hasattr(getattr(item, "function", None), "world_size"):
            item.add_marker("ranks")
        mark_the_rest(item)
        if no_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))


@pytest.fixture
def compile_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | Callable], None]:
    """`compile_with(backend)`: all that is compiled from here on takes this backend of torch, or this function."""
    stock = torch.compile

    def install(backend: str | Callable) -> None:
        chosen: dict[str, Any] = {"backend": backend, "options": None}
        monkeypatch.setattr(torch, "compile", lambda function, **options: stock(function, **options | chosen))

    return install


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Apply `--ranks-timeout` while a test runs."""
    token = default_timeout.set(item.config.getoption("--ranks-timeout"))
    try:
        return (yield)
    finally:
        default_timeout.reset(token)
