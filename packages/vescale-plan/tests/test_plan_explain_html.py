"""The page of a plan is one well-formed file, and its figures are right: sizes of bars, limits, labels that fit."""

import itertools
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from vescale.plan import Candidate, Cluster, Constraints, Layout, Plan, StageMemory, generate_plan

GIB = 2**30
VOID = {"meta"}
SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Check that elements are closed in order, and collect what could load another file."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.loads, self.rows, self.texts = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "action", "data")]
        self.rows += [dict(attrs).get("class", "")] if tag == "tr" and "tbody" in self.open else []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def figures(text):
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)]


def boxes(figure, kind):
    return [
        tuple(float(each.get(name)) for name in ("x", "y", "width", "height"))
        for each in figure.iter(f"{SVG}rect")
        if each.get("class") == kind
    ]


def text_boxes(figure):
    """Return the box of each text, as wide as the widest common sans-serif font makes it on average."""
    found = {}
    for each in figure.iter(f"{SVG}text"):
        size, x, y = float(each.get("font-size")), float(each.get("x")), float(each.get("y"))
        width = 0.6 * size * len(each.text)
        left = {"start": x, "middle": x - width / 2, "end": x - width}[each.get("text-anchor")]
        found[f"{each.text} at {x},{y}"] = left, y - 0.8 * size, width, size
    return found


def overlaps(a, b):
    return all(a[i] < b[i] + b[i + 2] and b[i] < a[i] + a[i + 2] for i in (0, 1))


def check_places(figure):
    _, _, width, height = map(float, figure.get("viewBox").split())
    texts = text_boxes(figure)
    for name, (left, top, wide, high) in texts.items():
        assert 0 <= left <= width - wide, name
        assert 0 <= top <= height + 4 - high, name
    crowded = [(a, b) for (a, one), (b, other) in itertools.combinations(texts.items(), 2) if overlaps(one, other)]
    assert crowded == []


def stages(count):
    return tuple(StageMemory(9 * GIB, 9 * GIB, 27 * GIB, (count - number) * GIB, GIB // 3) for number in range(count))


@pytest.fixture(scope="module")
def generated():
    from torch import nn

    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(1024, 16, batch_first=True, device="meta"), 12)
    return generate_plan(
        model, Cluster(16, memory_bytes=2 * GIB), Constraints(global_batch_size=32, sequence_length=512)
    )


def test_the_page_is_well_formed_and_loads_nothing(generated, tmp_path):
    text = generated.to_html(devices_per_host=8)
    page = Page(text)
    assert page.loads == []
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/2000/svg)", text)
    assert len(figures(text)) == 2
    generated.explain_html(tmp_path / "plan.html", devices_per_host=8)
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == text


def test_a_page_that_is_not_closed_is_found():
    with pytest.raises(AssertionError):
        Page("<p><b></p>")


def test_every_layout_has_a_row_and_the_chosen_one_is_marked(generated):
    page = Page(generated.to_html())
    fields = sum(row == "default" for row in page.rows)
    rows = page.rows[: len(generated.table)]
    assert rows.count("chosen") == 1
    assert rows.count("refused") == sum(each.verdict == "refused" for each in generated.table)
    assert fields > 10
    text = " ".join(page.texts)
    for reason in {each.reason for each in generated.table}:
        assert reason in text


def test_columns_sort_by_number():
    from vescale.plan._explain.page import sort_key

    cells = ["any", "1.50 GiB", "900.00 MiB", "20.0%", "12", "fits"]
    assert [sort_key(cell) for cell in cells] == ["-1", "1610612736", "943718400", "20", "12", "fits"]


@pytest.mark.parametrize("count", [1, 2, 7, 32])
@pytest.mark.parametrize("limit", [None, 40 * GIB, 72 * GIB, 3000 * GIB])
def test_bars_lie_in_the_plot_and_are_as_long_as_their_bytes(count, limit):
    memory = stages(count)
    figure = figures(Plan(pp=count, memory=memory, limit_bytes=limit).to_html())[0]
    check_places(figure)
    bars = boxes(figure, "bar")
    assert len(bars) == 5 * count
    ticks = [float(each.get("x1")) for each in figure.iter(f"{SVG}line") if each.get("class") == "tick"]
    assert 2 <= len(ticks) <= 7
    limits = [float(each.get("x1")) for each in figure.iter(f"{SVG}line") if each.get("class") == "limit"]
    assert len(limits) == (limit is not None)
    left = min(ticks)
    for number, part in enumerate(memory):
        row = sorted(bars[5 * number : 5 * number + 5])
        assert row[0][0] == pytest.approx(left)
        for one, other in itertools.pairwise(row):
            assert one[0] + one[2] == pytest.approx(other[0], abs=0.02)
        end = row[-1][0] + row[-1][2]
        assert end <= 960 - 190
        if limits:
            assert (end - left) / (limits[0] - left) == pytest.approx(part.total / limit, rel=1e-2)
            assert (end <= limits[0]) == (part.total <= limit)


@pytest.mark.parametrize(
    ("degrees", "devices_per_host"),
    [
        ({"dp": 2, "tp": 4, "pp": 2}, 8),
        ({"dp": 2, "tp": 4, "pp": 2}, None),
        ({"dp": 3, "tp": 5}, 4),
        ({}, None),
        ({"dp": 16, "tp": 16, "pp": 16}, 16),
    ],
)
def test_every_rank_has_a_cell_with_its_coordinates(degrees, devices_per_host):
    plan = Plan(**degrees)
    (figure,) = figures(plan.to_html(devices_per_host=devices_per_host))
    check_places(figure)
    cells = boxes(figure, "rank")
    assert len(cells) == min(plan.world_size, 256)
    assert not any(overlaps(one, other) for one, other in itertools.combinations(cells, 2))
    titles = [each.text for each in figure.iter(f"{SVG}title")]
    last = len(cells) - 1
    coords = {"tp": last % plan.tp, "dp": last // plan.tp % plan.dp, "pp": last // plan.tp // plan.dp}
    assert titles[-1] == f"rank {last}: " + ", ".join(f"{axis} {coords[axis]}" for axis in ("pp", "dp", "tp"))
    texts = [each.text for each in figure.iter(f"{SVG}text")]
    assert (f"... and {plan.world_size - 256} ranks more" in texts) == (plan.world_size > 256)
    hosts = 0 if devices_per_host is None else -(-len(cells) // devices_per_host)
    assert sum(text.startswith("host ") for text in texts) == hosts


def test_texts_are_escaped():
    table = (Candidate(Layout(dp=1, tp=1, pp=1), "refused", "<script>alert('x')</script> & more"),)
    text = Plan(module_plan="</td><b>", table=table).to_html()
    Page(text)
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; more" in text
    assert "&lt;/td&gt;&lt;b&gt;" in text


def test_a_plan_written_by_hand_says_what_it_lacks():
    text = Plan(dp=2).to_html()
    assert "it has no estimate" in text
    assert "no layouts were compared" in text


def test_overlapping_labels_are_found():
    text = Plan(pp=2, memory=stages(2)).to_html()
    figure = figures(text)[0]
    moved = next(each for each in figure.iter(f"{SVG}text") if each.text == "stage 1")
    moved.set("y", "60")
    with pytest.raises(AssertionError):
        check_places(figure)
