"""The page: its numbers, that it fetches nothing and runs no script, and hostile names."""

import dataclasses

import pytest
from bs4 import BeautifulSoup

from mixednuts_dist.reports.figures import figures
from mixednuts_dist.reports.page import report_files
from mixednuts_dist.reports.results import RunResults
from tests.helpers.made_up_run import made_up_results

pytestmark = pytest.mark.usefixtures("pictures")

HOSTILE = "</script><img src=x onerror=alert(1)>\"'&{{ 7 * 7 }}<!--"


def parsed(page: bytes) -> BeautifulSoup:
    return BeautifulSoup(page, "html.parser")


def fetched(page: dict[str, bytes]) -> list[str]:
    """Return what a browser would fetch or run: elements, addresses other than links to files, and styles."""
    content = parsed(page["index.html"])
    found = [tag.name for tag in content.find_all(["iframe", "object", "embed", "base", "form", "script"])]
    for tag in content.find_all(True):
        for name in ("src", "href", "srcset", "action", "poster", "data"):
            address = tag.get(name, "#")
            if not (address.startswith(("data:", "#")) or (tag.name == "a" and address in page)):
                found.append(address)
        found += [name for name in tag.attrs if name.startswith("on")]
    styles = [*(tag["style"] for tag in content.find_all(style=True)), *(tag.get_text() for tag in content("style"))]
    return found + [style for style in styles if "url(" in style or "@import" in style]


def test_page_fetches_nothing_and_runs_no_script(page: dict[str, bytes]) -> None:
    assert fetched(page) == []
    beacon = page["index.html"].replace(b"</body>", b"<img src='http://localhost:1/x.png' onerror='f()'></body>")
    assert fetched({**page, "index.html": beacon}) == ["http://localhost:1/x.png", "onerror"]
    policy = parsed(page["index.html"]).find("meta", {"http-equiv": True})["content"]
    assert "default-src 'none'" in policy
    assert not [word for word in ("connect-src", "script-src", "http") if word in policy]


def test_hostile_names_stay_text() -> None:
    """The name of the run tries to leave every context that it is written into."""
    files = report_files(made_up_results(40, name=HOSTILE))
    assert parsed(files["index.html"]).h1.get_text() == HOSTILE
    assert fetched(files) == []
    assert b"</script>" not in files["index.html"]


def test_is_readable_without_seeing_it(page: dict[str, bytes]) -> None:
    content = parsed(page["index.html"])
    assert [heading.get_text() for heading in content.find_all("h1")] == ["made-up"]
    alts = [picture["alt"] for picture in content.find_all("img")]
    drawn = [content.find(id=chart["aria-labelledby"]) for chart in content.find_all(role="img", id=True)]
    assert len(drawn) == len(figures(made_up_results(40)))
    assert all(len(caption.get_text()) > 60 for caption in drawn)
    assert sum(alt.startswith("Image ") for alt in alts) == 3 * len(made_up_results(40).worst)
    assert all(alts)
    assert content.html["lang"] == "en"


def test_report_uses_given_names(results: RunResults) -> None:
    cat, names = ("airplane", "car", "bird", "cat", *"efghij"), {"std": "ConvNeXt", "mixed": "MixedNUTS"}
    named = report_files(dataclasses.replace(results, class_names=cat, names=names))
    first = [row.find(["td", "th"]).get_text() for row in parsed(named["index.html"]).find_all("tr")]
    assert [name for name in first if name in names.values()] == ["ConvNeXt", "MixedNUTS"]
    assert f"class {cat[results.worst[0].label]}" in named["index.html"].decode()
    assert "std = ConvNeXt, py:zoo.py:std_c10_resnet18" in named["index.html"].decode()
    assert "ConvNeXt &" in named["table.tex"].decode()
    assert "adaptive AutoAttack for mixed" in named["table.tex"].decode()
    figure = named["tradeoff.svg"].decode()
    assert ">ConvNeXt</text>" in figure
    assert not [name for name in names if f">{name}</text>" in figure]


def test_every_file_is_linked(page: dict[str, bytes]) -> None:
    links = {link["href"] for link in parsed(page["index.html"]).find_all("a")}
    assert set(page) - {"index.html"} <= links
