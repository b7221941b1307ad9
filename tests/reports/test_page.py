"""The page: its numbers, that it fetches nothing, hostile names, and what a real browser makes of it."""

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from mixednuts_dist.reports.figures import FIGURES
from mixednuts_dist.reports.intervals import Count
from mixednuts_dist.reports.page import render_page
from mixednuts_dist.reports.results import RunResults
from mixednuts_dist.reports.wording import interval_text, percent_text, share_text

from .made_up_run import made_up_results

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
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


def page_data(page: bytes) -> dict[str, Any]:
    found = re.search(rb'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_leaves_every_file(page: dict[str, bytes]) -> None:
    pictures = {f"{name}.{kind}" for name in FIGURES for kind in ("svg", "png")}
    assert set(page) == {"index.html", "table.csv", "table.tex", "results.json"} | pictures
    assert all(page.values())


def test_numbers_are_the_results(page: dict[str, bytes], results: RunResults) -> None:
    outline = Outline(page["index.html"])
    for row in results.accuracy:
        text = outline.row(row.classifier)
        for count in (row.clean, row.robust):
            for words in (f"{count.correct}/{count.total}", percent_text(count), interval_text(count)):
                assert words in text
    for step in results.survival:
        assert f"{step.standing.correct}/{step.standing.total} {step.lost} " in outline.row(step.step)
    assert json.loads(page["results.json"]) == json.loads(json.dumps(results.to_json()))


def test_slider_has_a_stop_for_every_beta(page: dict[str, bytes], results: RunResults) -> None:
    curve = page_data(page["index.html"])["curve"]
    assert [stop["beta"] for stop in curve] == sorted(entry.beta for entry in results.search.entries)
    slider = next(attrs for tag, attrs in Outline(page["index.html"]).tags if attrs.get("type") == "range")
    assert curve[int(slider["value"] or -1)]["beta"] == results.parameters.beta


def test_nothing_is_fetched(page: dict[str, bytes]) -> None:
    for tag, attrs in Outline(page["index.html"]).tags:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            address = attrs.get(name)
            assert address is None or address.startswith(("data:", "#")), (tag, address)
        assert "url(" not in (attrs.get("style") or "")
    style = re.findall(rb"<style>(.*?)</style>", page["index.html"], re.DOTALL)
    assert not any(b"url(" in text or b"@import" in text for text in style)


def test_policy_forbids_to_fetch(page: dict[str, bytes]) -> None:
    policy = next(a["content"] for _, a in Outline(page["index.html"]).tags if "http-equiv" in a) or ""
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "http" not in policy


@pytest.fixture(scope="module")
def hostile_page() -> bytes:
    """A page whose run name tries to leave every context it is written into."""
    return render_page(made_up_results(40, name=HOSTILE))["index.html"]


def test_hostile_names_stay_text(hostile_page: bytes) -> None:
    outline = Outline(hostile_page)
    assert f"h1 {HOSTILE}" in outline.headings
    assert not any("onerror" in attrs for _, attrs in outline.tags)
    assert hostile_page.count(b"</script>") == 3
    assert page_data(hostile_page)["curve"]


def test_is_readable_without_seeing_it(page: dict[str, bytes]) -> None:
    outline = Outline(page["index.html"])
    assert [heading for heading in outline.headings if heading.startswith("h1")] == ["h1 made-up"]
    pictures = [attrs for tag, attrs in outline.tags if tag == "img"]
    assert len(pictures) == len(FIGURES)
    assert all(len(attrs["alt"] or "") > 60 for attrs in pictures)
    labels = {attrs["for"] for tag, attrs in outline.tags if tag == "label"}
    assert {attrs["id"] for tag, attrs in outline.tags if tag == "input"} <= labels
    assert ("html", {"lang": "en"}) in outline.tags


def test_downloads_are_the_files(page: dict[str, bytes]) -> None:
    links = [attrs for tag, attrs in Outline(page["index.html"]).tags if tag == "a" and "download" in attrs]
    found = {attrs["download"]: base64.b64decode((attrs["href"] or "").partition("base64,")[2]) for attrs in links}
    assert found == {f"made-up-3f2a1c9e-{name}": page[name] for name in ("table.csv", "table.tex", "results.json")}


@pytest.fixture
def open_in_browser(tmp_path: Path) -> Callable[..., bytes]:
    """Open a page in headless Chromium without a network and return the document it ends up as."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")

    def opened(page: bytes, *, width: int = 1280, then: str = "") -> bytes:
        waiting = (
            "(function wait() { if (!document.body.dataset.drawn) return setTimeout(wait, 50);"
            "document.body.dataset.fetched = performance.getEntriesByType('resource')"
            ".filter((entry) => !entry.name.startsWith('data:')).length;"
            f"{then} }})();"
        )
        file = tmp_path / "page.html"
        before, end, after = page.rpartition(b"</body>")
        file.write_bytes(before + f"<script>{waiting}</script>".encode() + end + after)
        flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        flags += "--disable-component-update --disable-sync --dump-dom --virtual-time-budget=10000"
        command = [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000"]
        hosts = "--host-resolver-rules=MAP * ~NOTFOUND"
        done = subprocess.run([*command, hosts, file.as_uri()], capture_output=True, timeout=120, check=True)
        return done.stdout

    return opened


def test_browser_draws_all_and_fetches_nothing(page: dict[str, bytes], open_in_browser: Callable[..., bytes]) -> None:
    document = open_in_browser(page["index.html"])
    body = next(attrs for tag, attrs in Outline(document).tags if tag == "body")
    assert (body["data-drawn"], body["data-fetched"]) == ("yes", "0")
    sizes = re.findall(rb'<svg[^>]*class="marks" width="(\d+)" height="(\d+)"', document)
    assert len(sizes) == len(FIGURES)
    assert all(int(width) > 300 and int(height) > 100 for width, height in sizes)


def test_browser_slider_shows_the_stop(
    page: dict[str, bytes], results: RunResults, open_in_browser: Callable[..., bytes]
) -> None:
    move = (
        "const slider = document.getElementById('beta'); slider.value = slider.max;"
        "slider.dispatchEvent(new Event('input'));"
    )
    document = open_in_browser(page["index.html"], width=400, then=move).decode()
    first = results.search.entries[0]
    assert '<output id="at-beta" for="beta">1</output>' in document
    robust = share_text(Count(first.robust_correct_bound, first.total))
    assert f'<dd id="at-robust_bound">{robust}</dd>' in document
    assert 'aria-valuetext="beta 1"' in document
    rings = re.findall(r'aria-label="[^"]*beta: ([\d.]+)[^"]*"', document)
    assert rings.count("1") == rings.count("0.95") + 2, "in both panels the ring has moved from .95 to 1"


def test_browser_shows_hostile_names_as_text(hostile_page: bytes, open_in_browser: Callable[..., bytes]) -> None:
    outline = Outline(open_in_browser(hostile_page))
    assert f"h1 {HOSTILE}" in outline.headings
    assert not any("onerror" in attrs for _, attrs in outline.tags)
