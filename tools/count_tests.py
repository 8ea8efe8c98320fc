"""Add up the closing lines of several pytest runs in a log.

    python tools/count_tests.py LOG          # prints: tests: 412 passed, 0 failed, 7 skipped

A log without a single passed test counts as a failure: a run that tested nothing must not look green.
"""

import re
import sys
from collections import Counter
from pathlib import Path

# "===== 3 failed, 12 passed in 1.20s =====", or with --quiet the same without the frame
CLOSING = re.compile(r"^(?:=+ )?((?:\d+ [a-z]+(?:, )?)+) in [0-9.]+s\b", re.MULTILINE)


def count(log: str) -> Counter:
    """Return how many tests passed, failed (errors included) and were skipped, over all closing lines of a log."""
    total = Counter(passed=0, failed=0, skipped=0)
    for closing in CLOSING.findall(log):
        for number, word in re.findall(r"(\d+) ([a-z]+)", closing):
            total["failed" if word in ("error", "errors") else word] += int(number)
    return total


def main(path: str) -> None:
    """Print the sum for the log at ``path``; exit with status 1 when no test passed."""
    total = count(Path(path).read_text(encoding="utf-8", errors="replace"))
    print(f"tests: {total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    sys.exit(total["passed"] == 0)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/count_tests.py LOG")
    main(sys.argv[1])
