"""docs/support.md says what runs together, as it is found by trying."""

import pytest
from projects import ROOT
from support_matrix import FEATURES, find_all, first_sentence, page


@pytest.fixture(scope="module")
def results():
    by_rank = find_all()
    assert all(set(each) == set(by_rank[0]) for each in by_rank)
    ran = [{key for key, refusal in each.items() if not refusal} for each in by_rank]
    assert all(each == ran[0] for each in ran), "a combination runs on some ranks and is refused on others"
    return by_rank[0]


def test_the_page_is_what_is_found(results):
    assert (ROOT / "docs" / "support.md").read_text(encoding="utf-8") == page(results), (
        "run: python tools/support_matrix.py docs/support.md"
    )


def test_something_runs_and_something_is_refused(results):
    assert {name for name, *_ in results} == set(FEATURES)
    assert not results["linear layers", "static", 1, 3]
    assert "batch_norm" in results["BatchNorm", "eager", 2, 0]


def test_a_refusal_is_shortened_to_its_first_sentence():
    assert first_sentence("no BatchNorm; use another\nmore") == "no BatchNorm; use another"
    assert first_sentence("it failed:\nTraceback\nValueError: no. Yes") == "it failed: ValueError: no"
