"""The site: `uv run sphinx-build -W docs site`; with `MIXEDNUTS_DEMO=RUN`, a folder or URI, its page is part of it."""

import os
import re
from pathlib import Path
from typing import Any

import fsspec

import mixednuts_dist

project, version, author = "mixednuts_dist", mixednuts_dist.__version__, "The mixednuts_dist authors"
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
    else "This build was made without a run."
}


def as_restructured_text(_app: Any, _what: str, _name: str, _value: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings are read as text: code in single backticks, and |v| and x* mean themselves."""
    for i, line in enumerate(lines):
        if not re.match(r"\s*(>>>|\.\.\.|:|\.\. )", line):
            parts = re.split(r"(?<!`)`([^`]+)`(?!`)", line)
            parts[::2] = [re.sub(r"(?<!\\)([*|])|(?<=\w)(_)(?=\W|$)", r"\\\1\2", part) for part in parts[::2]]
            lines[i] = "".join(f"``{part}``" if k % 2 else part for k, part in enumerate(parts))


def copy_the_run(app: Any, error: Exception | None) -> None:
    if RUN and not error:
        storage, folder = fsspec.core.url_to_fs(f"{RUN}/report")
        storage.get(folder, str(Path(app.outdir) / "demo-run"), recursive=True)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)
    app.connect("build-finished", copy_the_run)
