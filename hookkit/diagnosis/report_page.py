"""`report(run, "run.html")`: write one self-contained HTML page of a run, findings first.

The page names the data that were not recorded, and says why a picture could not be drawn. It shows
no name of the machine or the user, and no path. The file is not in `plotting`, which cannot be
imported without matplotlib.
"""

from __future__ import annotations

import platform
from base64 import b64encode
from collections.abc import Callable, Iterator
from html import escape
from io import BytesIO
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookkit._core import __version__
from hookkit._core.checks import check_path
from hookkit._core.files import atomic_write
from hookkit._core.html import STYLE, details, table, terms
from hookkit.diagnosis import diagnose
from hookkit.errors import HookkitError, OptionError
from hookkit.records import Run, as_run

GENERATOR = '<meta name="generator" content="hookkit">'
"""The line that marks a file as a report, which may be overwritten."""

_SHOWN = ("mean", "std", "rms", "near_zero", "nonfinite", "dead", "update_ratio", "grad_norm")
"""Statistics in the table of layers."""

# On a narrow page, a picture keeps a readable size and scrolls.
LAYOUT = """:root{color-scheme:light dark;--ink:#1d2229;--paper:#fff}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e6e9ee;--paper:#16191d}}
body.hk{margin:0 auto;max-width:66rem;padding:.6rem;color:var(--ink);background:var(--paper);
overflow-wrap:break-word}
h2{margin-top:2rem;border-bottom:1px solid var(--line)} pre{overflow-x:auto}
figure{margin:1rem 0;overflow-x:auto} img{width:100%;min-width:44rem}"""


def report(
    run: Any, path: str | Path | None = None, *, summary: Any = None, title: str | None = None
) -> Path:
    """Write one HTML page of a run: findings, pictures, loss, layers, model, environment.

    The page needs no network and no script. It is written atomically, and missing parent folders
    are made. An earlier report at `path` is replaced; any other file is not.

    Args:
        run: a `Run`, a `Record`, a recorder, a Watcher or a Learner.
        path: the file to write; default `report.html` in the current folder.
        summary: a `Summary` (or a text) of the model; default: a Learner's own summary.
        title: the heading of the page.

    Returns:
        The path of the page.

    Raises:
        OptionError: `path` is a folder, or a file that is not a report of hookkit's.
        ArgumentError: `run` holds no records, or `path` is not a path.

    Example:
        >>> import tempfile
        >>> falling = 2.3 * np.exp(-np.arange(300) / 80)
        >>> page = report(Run(losses=falling), Path(tempfile.mkdtemp()) / "run.html")
        >>> page.name
        'run.html'
    """
    target = check_path("report", "report.html" if path is None else path)
    if target.is_dir() or (target.exists() and GENERATOR.encode() not in target.read_bytes()[:999]):
        raise OptionError(
            f'"{target}" is a folder, or a file that is no report of hookkit\'s, so it is not '
            f'overwritten. Give another name, such as "{target.with_suffix("")}/report.html".'
        )
    record = as_run(run)
    found = diagnose(record)
    title = escape(title or f"Training of {record.info.get('model') or 'a model'}")
    incidents = escape("\n\n".join(map(str, record.incidents)))
    flight = f"<h3>Flight recorder</h3><pre>{incidents}</pre>" if incidents else ""
    head = list(dict.fromkeys(key for row in record.valid for key in row))
    cells = [[_cell(row.get(key)) for key in head] for row in record.valid]
    python = platform.python_version()
    facts = {"hookkit": __version__, "torch": torch.__version__, "Python": python}
    for name, fact in record.info.items():
        if isinstance(fact, (str, bool, int, float)):
            facts.setdefault(name.replace("_", " "), _cell(fact))
    facts = {k: v for k, v in facts.items() if not set(v) & set("/\\~@")}  # those hold paths
    losses = picture(methodcaller("plot_loss", record), "Loss by step")
    drawn = picture(methodcaller("plot_run", record, findings=found), "Layers by steps")
    sections = {
        "Findings": found._repr_html_() + flight,
        "The whole run": drawn,
        "Loss and metrics": losses + (table("Each epoch", head, cells) if head else ""),
        "Layers": "".join(_layers(record)),
        "Model": _model(summary, run),
        "Environment": terms(facts.items()),
    }
    body = "\n".join(f"<section><h2>{head}</h2>{html}</section>" for head, html in sections.items())
    with atomic_write(target, text=True) as file:
        file.write(
            f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title>{STYLE}<style>{LAYOUT}</style></head>\n"
            f'<body class="hk"><h1>{title}</h1>\n{body}\n</body></html>\n'
        )
    return target


def picture(draw: Callable[[Any], Any], caption: str) -> str:
    """Return an HTML image of what `draw(hookkit.plotting)` draws, or a line with the error."""
    try:
        from PIL import Image  # matplotlib needs it, too

        from hookkit import plotting

        with plotting.offscreen():
            drawn = Image.open(BytesIO(plotting.png(draw(plotting))))
    except Exception as why:  # without a picture there is still a page
        kind = "" if isinstance(why, HookkitError) else f"{type(why).__name__}: "
        return f"<p>{escape(f'{caption}: no picture. {kind}{why}')}</p>"
    small, alt = BytesIO(), escape(caption)
    drawn.convert("RGB").quantize(256).save(small, "png", optimize=True)  # a third of the bytes
    data = b64encode(small.getvalue()).decode()
    return f'<figure><img alt="{alt}" src="data:image/png;base64,{data}"></figure>'


def _layers(run: Run) -> Iterator[str]:
    """Yield the HTML of the layers' pictures and tables, and a line of what was not recorded."""
    for record in (run.activations, run.gradients):
        if record is None or not len(record):
            continue
        kind = f"{record.kind}s"
        pictures = {"plot_stats": f"Means and standard deviations of {kind}"}
        if record.kind == "activation":
            pictures["plot_dead"] = "Dead units, or values near zero"
        if record.hist is None:
            yield f"<p>No histograms of {kind} were recorded: use with_hist=True to have them.</p>"
        else:
            pictures["plot_density"] = f"Spread of {kind} at the last step"
            pictures["color_dim"] = f"Spread of {kind} over steps, the first 24 layers"
        for name, caption in pictures.items():
            yield picture(methodcaller(name, record), caption)
    yield picture(methodcaller("plot_depth", run), "RMS by depth")
    if run.params is not None and len(run.params):
        yield picture(methodcaller("plot_updates", run), "Update : weight of matrices")
    for record in run.records:
        keys = [key for key in _SHOWN if key in record.values]
        rows = []
        for i, name in enumerate(record.labels):
            seen = [row[~np.isnan(row)][-1:] for row in (record.values[key][i] for key in keys)]
            rows.append([name, *(_cell(last[0]) if len(last) else "–" for last in seen)])
        what = f"{record.kind}s at the last step that each was seen".capitalize()
        yield details(f"{what}: {len(rows)} rows", table(what, ["layer", *keys], rows))
    names = {"activations": "ActivationStats", "gradients": "GradientStats", "params": "ParamStats"}
    absent = [f"{k} ({recorder}())" for k, recorder in names.items() if getattr(run, k) is None]
    yield f"<p>Not recorded: {', '.join(absent)}.</p>" if absent else ""


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)


def _model(summary: Any, run: Any) -> str:
    """Return the summary, or the one that `run` can make, as HTML or as text."""
    make = getattr(run, "summary", None)
    if summary is None and callable(make):
        try:
            summary = make()
        except HookkitError as why:
            summary = f"There is no summary: {why}"
    if summary is None:
        return "<p>No summary was given: report(…, summary=summary(model, x)).</p>"
    html = getattr(summary, "_repr_html_", lambda: None)()
    return html if html else f"<pre>{escape(str(summary))}</pre>"
