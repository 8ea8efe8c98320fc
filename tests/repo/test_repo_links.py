"""Every relative link of every page leads to a file that exists, and to a heading where it names one."""

import re
from pathlib import Path

import pytest
from projects import ROOT
from run_examples import blocks, pages

LINK = re.compile(r"\]\(([^)\s]+)\)")
LINE = re.compile(r"L\d+(-L\d+)?")


def prose(page: Path) -> str:
    """Return the text of a page without its code blocks."""
    text = page.read_text(encoding="utf-8")
    inside = {line for _, lines in blocks(text) for line in lines}
    return "\n".join(line for number, line in enumerate(text.splitlines()) if number not in inside)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


def problem(page: Path, link: str) -> str | None:
    """Return what is wrong with a link of a page, or None."""
    if "://" in link or link.startswith("mailto:"):
        return None
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return f"{page.name}: no file {path}"
    if not anchor:
        return None
    if target.suffix == ".md":
        return None if anchor in anchors(target) else f"{page.name}: {target.name} has no heading #{anchor}"
    if target.is_file() and LINE.fullmatch(anchor):
        last = int(anchor.split("L")[-1])
        return None if last <= len(target.read_text().splitlines()) else f"{page.name}: {path} has no line {last}"
    return f"{page.name}: #{anchor} of {path} is neither a heading nor a line"


def every_page() -> list[Path]:
    return sorted({*pages(ROOT), *ROOT.glob("packages/*/src/**/*.md")})


@pytest.mark.parametrize("page", every_page(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    assert [p for link in LINK.findall(prose(page)) if (p := problem(page, link))] == []


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("other.md", None),
        ("other.md#the-second-part", None),
        ("other.md#the-second-part-1", None),
        ("#here", None),
        ("https://example.org/x#y", None),
        ("code.py#L2", None),
        ("folder", None),
        ("missing.md", "page.md: no file missing.md"),
        ("other.md#third", "page.md: other.md has no heading #third"),
        ("code.py#L3", "page.md: code.py has no line 3"),
        ("code.py#f", "page.md: #f of code.py is neither a heading nor a line"),
    ],
)
def test_a_broken_link_is_found(tmp_path, link, expected):
    (tmp_path / "folder").mkdir()
    (tmp_path / "page.md").write_text("# Here\n")
    (tmp_path / "other.md").write_text("# Other\n## The `second` part\n## The second part\n```\n# third\n```\n")
    (tmp_path / "code.py").write_text("def f():\n    pass\n")
    assert problem(tmp_path / "page.md", link) == expected
