"""Files that packages share by copy, because they do not import each other, are the same everywhere."""

import pytest
from projects import ROOT

# Name of the file -> packages with a copy. Change one, then copy it to the others.
COPIES = {
    "_blocks.py": ("vescale-pipe", "vescale-plan"),
    "_checked.py": ("vescale-dtensor", "vescale-ckpt", "vescale-pipe", "vescale-plan"),
    "_lost_ranks.py": ("vescale-dtensor", "vescale-ckpt", "vescale-pipe"),
    "_torch_range.py": ("vescale-dtensor", "vescale-ckpt", "vescale-pipe", "vescale-plan"),
    "_typed_json.py": ("vescale-ckpt", "vescale-pipe", "vescale-plan"),
}


def copies(name: str) -> dict[str, str]:
    """Return the text of each copy by its package."""
    return {
        path.relative_to(ROOT).parts[1]: path.read_text(encoding="utf-8")
        for path in ROOT.glob(f"packages/*/src/vescale/*/{name}")
    }


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_equal(name):
    found = copies(name)
    assert set(found) == set(COPIES[name])
    different = [package for package, text in found.items() if text != found[COPIES[name][0]]]
    assert different == [], f"{name} differs from that of {COPIES[name][0]}"


def test_a_copy_uses_nothing_of_its_package():
    for name in COPIES:
        assert "from ." not in next(iter(copies(name).values())), name
