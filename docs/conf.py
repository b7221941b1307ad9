"""The site: `uv run sphinx-build -W docs site`; with `MIXEDNUTS_DEMO=RUN`, a folder or URI, that run is part of it."""

import html
import json
import os
import re
from pathlib import Path
from typing import Any

import click
import fsspec

import mixednuts_dist
from mixednuts_dist.cli import main
from mixednuts_dist.config.register import STUDIES

project, version, author = "mixednuts_dist", mixednuts_dist.__version__, "The mixednuts_dist authors"
project_copyright = f"{author}, MIT license"
smartquotes = False  # `--rob` outside of code is not a dash
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]
html_theme, html_title, html_copy_source = "furo", f"mixednuts_dist {version}", False
html_static_path: list[str] = []
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]
autodoc_typehints, autodoc_member_order, add_module_names = "signature", "bysource", False
python_use_unqualified_type_names = True

RUN = os.environ.get("MIXEDNUTS_DEMO")
myst_enable_extensions = ["substitution"]
myst_substitutions = {
    "demo": '<a href="demo-run/index.html">Open the page of the run</a>'
    if RUN
    else "This copy of the documentation does not include an example report."
}


def as_restructured_text(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are read as text: code in single backticks, and |v| and x* mean themselves."""
    for i, line in enumerate(lines):
        if not re.match(r"\s*(>>>|\.\.\.|:|\.\. )", line):
            parts = re.split(r"(?<!`)`([^`]+)`(?!`)", line)
            parts[::2] = [re.sub(r"(?<!\\)([*|])|(?<=\w)(_)(?=\W|$)", r"\\\1\2", part) for part in parts[::2]]
            lines[i] = "".join(f"``{part}``" if k % 2 else part for k, part in enumerate(parts))


def fill_the_gallery(_app: Any, page: str, source: list[str]) -> None:
    """Append a section per study to the page of studies, with the run's figure and findings, and the commands."""
    if page == "cli":
        source[0] += "".join(command_section(name, command) for name, command in sorted(main.commands.items()))
    if page == "studies":
        source[0] += "".join(section(name, entry) for name, entry in STUDIES.entries().items())


def command_section(name: str, command: click.Command) -> str:
    """Return a Markdown section with the help of a command."""
    context = click.Context(command, info_name=f"mixednuts {name}")
    return f"\n## {name}\n\n```text\n{command.get_help(context)}\n```\n"


def section(name: str, entry: Any) -> str:
    """Return a Markdown section with a study's question, command, and, if the run has them, figure and findings."""
    paper = entry.facts.get("section", "not in the paper")
    options = " --rob URI" if "--rob" in entry.describes else ""
    end = "" if entry.describes.endswith("?") else "."
    head = f"\n### {name}\n\n{entry.describes}{end} Section: {paper}."
    text = f"{head}\n\n```sh\nmixednuts study {name} CONFIG{options}\n```\n\n"
    study = study_of_the_run(name)
    if study is None:
        return text + "The run that this site was built with has no picture of it.\n"
    alt, figure = html.escape(study["title"], quote=True), f"demo-studies/{name}/figure"
    links = " ".join(f'<a href="demo-studies/{name}/{file}">{file}</a>' for file in ("table.csv", "table.tex"))
    return (
        f'{text}<div class="study">'
        f'<a href="{figure}.svg"><img loading="lazy" src="{figure}.svg" alt="{alt}"></a>'
        "</div>\n\n"
        + "".join(f"<p>{html.escape(sentence)}</p>\n" for sentence in study["findings"][:3])
        + f"<p>{links}</p>\n"
    )


def study_of_the_run(name: str) -> dict[str, Any] | None:
    if not RUN:
        return None
    storage, path = fsspec.core.url_to_fs(f"{RUN}/studies/{name}/study.json")
    return dict(json.loads(storage.cat_file(path))) if storage.exists(path) else None


def copy_the_run(app: Any, error: Exception | None) -> None:
    for part, name in (("report", "demo-run"), ("studies", "demo-studies")):
        if RUN and not error:
            storage, folder = fsspec.core.url_to_fs(f"{RUN}/{part}")
            if storage.exists(folder):
                storage.get(folder, str(Path(app.outdir) / name), recursive=True)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)
    app.connect("source-read", fill_the_gallery)
    app.connect("build-finished", copy_the_run)
