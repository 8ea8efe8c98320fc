"""The sum of several pytest runs is read from their closing lines, and from nothing else."""

from count_tests import count

LOG = """nox > Running session unit(vescale-pipe)
===== 12 passed, 3 skipped in 1.20s =====
5 passed in 0.10s
FAILED tests/test_x.py::test_y - AssertionError: 7 passed in 1.00s is not 8
  9 passed in 1.00s
=== 1 failed, 2 passed, 4 deselected, 6 warnings, 2 errors in 83.20s (0:01:23) ===
nox > Session unit(vescale-pipe) was successful in 3 seconds.
"""


def test_closing_lines_are_added():
    total = count(LOG)
    assert (total["passed"], total["failed"], total["skipped"]) == (19, 3, 3)


def test_a_log_without_tests_has_none():
    assert count("nox > Session lint was successful.\nno tests ran in 0.01s\n")["passed"] == 0
