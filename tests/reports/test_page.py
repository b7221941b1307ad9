"""The page: its numbers, that it fetches nothing, hostile names, and what a real browser makes of it."""

import dataclasses
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from mixednuts_dist.reports.counts import interval_text, percent_text
from mixednuts_dist.reports.figures import figures
from mixednuts_dist.reports.page import report_files
from mixednuts_dist.reports.results import RunResults
from tests.helpers.browser import Tab
from tests.helpers.made_up_run import made_up_results

pytestmark = pytest.mark.usefixtures("pictures")

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}<!--"


class Outline(HTMLParser):
    """Tags with their attributes, and each row's cells as text; scripts and styles left out."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.headings: list[str] = []
        self._open: list[str] = []
        self.feed(page.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("h1", "h2", "h3"):
            self.headings.append(f"{self._open[-1]} {data}")
        if self.rows and {"td", "th"} & set(self._open):
            self.rows[-1][-1] += data

    def row(self, first: str) -> str:
        return " ".join(" ".join(next(row for row in self.rows if row and row[0] == first)).split())


def test_numbers_are_the_results(page: dict[str, bytes], results: RunResults) -> None:
    outline = Outline(page["index.html"])
    for row in results.accuracy:
        text = outline.row(row.classifier)
        for count in (row.clean, row.robust):
            for words in (f"{count.correct}/{count.total}", percent_text(count), interval_text(count)):
                assert words in text
    for step in results.survival:
        assert f"{step.standing.correct}/{step.standing.total} {step.lost}" in outline.row(step.step)
    assert json.loads(page["results.json"]) == json.loads(json.dumps(results.to_json()))


def test_table_has_a_row_for_every_beta(page: dict[str, bytes], results: RunResults) -> None:
    outline = Outline(page["index.html"])
    for entry in results.search.entries:
        shown = outline.row(f"{entry.beta:g}").replace("−", "-").split()
        assert [float(word) for word in shown[1:4]] == [5, 4, -1.1]
        assert float(shown[4]) == pytest.approx(entry.alpha, abs=1e-4)
        assert f"{entry.clean_correct}/{entry.total}" in shown
        assert f"{entry.kept_predicted}/{entry.total}" in shown


def test_nothing_is_fetched(page: dict[str, bytes]) -> None:
    for tag, attrs in Outline(page["index.html"]).tags:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            address = attrs.get(name)
            assert address is None or address.startswith(("data:", "#")) or (tag == "a" and address in page)
        assert "url(" not in (attrs.get("style") or "")
    style = re.findall(rb"<style>(.*?)</style>", page["index.html"], re.DOTALL)
    assert not any(b"url(" in text or b"@import" in text for text in style)


def test_policy_forbids_to_fetch(page: dict[str, bytes]) -> None:
    policy = next(a["content"] for _, a in Outline(page["index.html"]).tags if "http-equiv" in a) or ""
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy and "script-src" not in policy
    assert "http" not in policy


@pytest.fixture(scope="module")
def hostile_page() -> bytes:
    """A page whose run name tries to leave every context it is written into."""
    return report_files(made_up_results(40, name=HOSTILE))["index.html"]


def test_hostile_names_stay_text(hostile_page: bytes) -> None:
    outline = Outline(hostile_page)
    assert f"h1 {HOSTILE}" in outline.headings
    assert not any("onerror" in attrs for _, attrs in outline.tags)
    assert b"</script>" not in hostile_page


def test_is_readable_without_seeing_it(page: dict[str, bytes]) -> None:
    outline = Outline(page["index.html"])
    assert [heading for heading in outline.headings if heading.startswith("h1")] == ["h1 made-up"]
    pictures = [attrs for tag, attrs in outline.tags if tag == "img"]
    alts = [attrs["alt"] or "" for attrs in pictures]
    drawn = [attrs["aria-label"] or "" for _, attrs in outline.tags if attrs.get("role") == "img" and "id" in attrs]
    assert len(drawn) == len(figures(made_up_results(40)))
    assert all(len(words) > 60 for words in drawn)
    assert sum(alt.startswith("Image ") for alt in alts) == 3 * len(made_up_results(40).worst)
    assert all(alts)
    assert ("html", {"lang": "en"}) in outline.tags


def test_report_uses_given_names(results: RunResults) -> None:
    cat, names = ("airplane", "car", "bird", "cat", *"efghij"), {"std": "ConvNeXt", "mixed": "MixedNUTS"}
    named = report_files(dataclasses.replace(results, class_names=cat, names=names))
    rows = Outline(named["index.html"]).rows
    assert [row[0] for row in rows if row[0] in names.values()] == ["ConvNeXt", "MixedNUTS"]
    assert f"class {cat[results.worst[0].label]}" in named["index.html"].decode()
    assert "std = ConvNeXt, py:zoo.py:std_c10_resnet18" in named["index.html"].decode()
    assert "ConvNeXt &" in named["table.tex"].decode()
    assert "adaptive AutoAttack for mixed" in named["table.tex"].decode()
    figure = named["tradeoff.svg"].decode()
    assert ">ConvNeXt</text>" in figure
    assert not [name for name in names if f">{name}</text>" in figure]


def test_every_file_is_linked(page: dict[str, bytes]) -> None:
    links = {attrs.get("href") for tag, attrs in Outline(page["index.html"]).tags if tag == "a"}
    assert set(page) - {"index.html"} <= links


def test_browser_draws_all_and_asks_for_nothing(page: dict[str, bytes], open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(page["index.html"])
    assert tab.requests == []
    sizes = tab.evaluate(
        "[...document.querySelectorAll('.panels svg')].map((svg) => [svg.clientWidth, svg.clientHeight])"
    )
    assert len(sizes) == sum(len(figure.panels) for figure in figures(made_up_results(40)).values())
    assert all(width > 150 and height > 80 for width, height in sizes)


def test_browser_log_would_show_a_request(open_tab: Callable[..., Tab]) -> None:
    beacon = b"<!DOCTYPE html><body><img src='http://localhost:1/x.png'></body>"
    assert open_tab(beacon).requests == ["http://localhost:1/x.png"]


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_fits_the_screen_in_the_readers_colors(
    page: dict[str, bytes], open_tab: Callable[..., Tab], width: int, dark: bool
) -> None:
    tab = open_tab(page["index.html"], width=width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)"
    )
    inner = tab.evaluate(
        "Math.max(...[...document.querySelectorAll('.scroll')].map((e) => e.scrollWidth - e.clientWidth))"
    )
    assert inner <= 1 or width < 600, "no table scrolls on a desktop"
    assert tab.evaluate("[...document.images].filter((image) => image.complete && !image.naturalWidth).length") == 0


def test_browser_shows_hostile_names_as_text(hostile_page: bytes, open_tab: Callable[..., Tab]) -> None:
    tab = open_tab(hostile_page)
    assert tab.text("h1") == HOSTILE
    assert tab.evaluate("document.querySelectorAll('[onerror]').length") == 0
