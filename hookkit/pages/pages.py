"""`report(run, "run.html")`: one self-contained page of a run, the findings first.

What was not recorded is named, with the recorder for it; a picture that cannot be drawn is replaced
by the reason. No name of the machine or the user, and no path, is written into the page.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from html import escape
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hookkit import health
from hookkit.checks import kind_of, shown
from hookkit.devices import accelerator
from hookkit.errors import ArgumentError, HookkitError, OptionError
from hookkit.files import atomic_write
from hookkit.markup import details, prose, table, terms
from hookkit.pages import captions
from hookkit.pages.webpage import GENERATOR, figure, missing, page
from hookkit.records import Record, Run, as_run, in_order
from hookkit.version import __version__

DPI = 100
"""Of what is pixels in a picture: one to a pixel of the page; 130 would be a fifth more bytes."""

UNFOLDED = 24
"""Rows up to which the table of layers is shown unfolded."""


def report(
    run: Any, path: str | Path | None = None, *, summary: Any = None, title: str | None = None
) -> Path:
    """Writes one HTML page of a run: findings, pictures, loss, layers, model, environment.

    The page needs no network and no script. It is written whole or not at all; missing parent
    folders are made; an earlier report at `path` is replaced, any other file is not.

    Args:
        run: a `Run`, a `Record`, a recorder, a Watcher or a Learner.
        path: where to; default `report.html` in the current folder.
        summary: a `Summary` (or a text) of the model; a Learner's own is taken by default.
        title: heading of the page.

    Returns:
        The path of the page.

    Raises:
        OptionError: `path` is a folder, or a file that is not a report of hookkit's.
        ArgumentError: `run` holds no run, or `path` or `title` is no text.

    Example:
        >>> import tempfile
        >>> falling = 2.3 * np.exp(-np.arange(300) / 80)
        >>> page = report(Run(losses=falling), Path(tempfile.mkdtemp()) / "run.html")
        >>> page.name
        'run.html'
    """
    for name, value in (("path", path), ("title", title)):
        if value is not None and not isinstance(value, (str, Path)):
            raise ArgumentError(
                f"report({name}={shown(value)}): expected text, found {kind_of(value)}. "
                f'Write report(run, "run.html", title="My run").'
            )
    target = _writable(Path("report.html" if path is None else path))
    record = in_order(as_run(run))
    model = str(record.info.get("model") or "")
    title = str(title or "") or (f"Training of {model}" if model else "A training run")
    diagnosis = health.diagnose(record)
    worst = diagnosis[0].severity if diagnosis.alarms else "healthy"
    top = f'<p class="verdict {worst}">{escape(diagnosis.headline)}</p>'
    sections = [
        ("findings", "Findings", _findings(diagnosis, record)),
        ("run", "The whole run", "".join(_whole(record, diagnosis))),
        ("loss", "Loss and metrics", "".join(_loss(record))),
        ("layers", "Layers", "".join(_layers(record))),
        ("model", "Model", _model(summary, run)),
        ("environment", "Environment", _environment(record)),
    ]
    with atomic_write(target, text=True) as file:
        file.write(page(title, top, sections))
    return target


def _writable(path: Path) -> Path:
    if path.is_dir():
        raise OptionError(f'"{path}" is a folder. Name a file in it, such as "{path}/report.html".')
    if path.exists() and GENERATOR.encode() not in path.read_bytes()[:1000]:
        raise OptionError(
            f'"{path}" exists and is no report written by hookkit, so it is not overwritten. '
            "Choose another name, or remove the file."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _findings(diagnosis: health.Diagnosis, run: Run) -> str:
    parts = [_finding(i, finding) for i, finding in enumerate(diagnosis, 1)]
    parts = parts or [f"<p>No rule found anything: {escape(diagnosis.headline)}.</p>"]
    if run.incidents:
        texts = "\n\n".join(str(incident) for incident in run.incidents)
        parts.append(f"<h3>Flight recorder</h3><pre>{escape(texts)}</pre>")
    if diagnosis.not_judged:
        known = [(what, ", ".join(rules)) for what, rules in diagnosis.not_judged.items()]
        parts.append(details("not judged, for lack of data", terms(known)))
    return "".join(parts)


def _finding(number: int, f: health.Finding) -> str:
    head = f'<span class="tone">{escape(f.severity)}</span> {number}. {escape(f.rule)}'
    names = f"<p>{escape(', '.join(f.layers))}</p>"
    layers = details(f"All {len(f.layers)} layers", names) if len(f.layers) > 3 else ""
    return (
        f'<article class="finding {escape(f.severity)}"><h3>{head}</h3>'
        f"{prose([f.evidence, f.cause, f.fix], small=f.where)}{layers}</article>"
    )


def _whole(run: Run, findings: Any) -> Iterator[str]:
    names = {"activations": "ActivationStats", "gradients": "GradientStats", "params": "ParamStats"}
    absent = [f"{k} ({r}())" for k, r in names.items() if getattr(run, k) is None]
    if run.records:
        text = "; ".join(captions.in_words(record) for record in run.records)
        alt = f"Layer by step heat-maps. {text}."
        caption = captions.of_run(run, findings)
        yield _picture(lambda p: p.plot_run(run, findings=findings), alt, caption)
    if absent:
        yield missing(f"Not recorded: {', '.join(absent)}.")


def _loss(run: Run) -> Iterator[str]:
    losses = np.zeros(0) if run.losses is None else np.asarray(run.losses, dtype=np.float64)
    fine = losses[np.isfinite(losses)]
    if caption := captions.of_loss(run):
        alt = caption
        if len(fine):
            ends = f"from {fine[0]:.3g} to {fine[-1]:.3g}, least {min(fine):.3g}"
            alt = f"Training loss over {len(losses)} steps, {ends}."
        yield _picture(lambda p: p.plot_loss(run), alt, caption)
    else:
        yield missing("No loss was recorded.")
    if rows := list(run.valid):
        head = list(dict.fromkeys(key for row in rows for key in row))
        cells = ([_cell(row.get(key)) for key in head] for row in rows)
        yield table("Each epoch", head, cells)
    else:
        yield missing("No epochs with validation were recorded.")


def _layers(run: Run) -> Iterator[str]:
    for record in (run.activations, run.gradients):
        if record is not None and len(record):
            yield from _pictures_of(record)
    if run.activations is not None or run.gradients is not None:
        alt = (
            "RMS by depth, forward and backward, at several steps. The table below has the numbers."
        )
        caption = "Through the depth of the net: a slope is a signal that vanishes or explodes."
        yield _picture(lambda p: p.plot_depth(run), alt, caption)
    if run.params is not None and len(run.params):
        alt = f"log10 of update:weight of matrices over steps. {captions.in_words(run.params)}."
        yield _picture(lambda p: p.plot_updates(run), alt, captions.of_updates(run.params))
    yield from map(_layer_table, run.records)
    if not run.records:
        yield missing("No layer was recorded: train with ActivationStats().")


def _pictures_of(record: Record) -> Iterator[str]:
    kind, text = f"{record.kind}s", captions.in_words(record)
    pictures = [("plot_stats", captions.of_lines(record))]
    if record.kind == "activation":
        pictures += [("plot_dead", captions.of_dead(record))]
    if record.hist is not None:
        when = "at the last step at which most layers had finite values"
        pictures += [("plot_density", f"How {kind} were spread {when}, a line a layer.")]
    yield f"<h3>{kind.capitalize()}</h3>"
    for name, what in pictures:
        yield _picture(methodcaller(name, record), f"{what} {text}.", what)
    if record.hist is None:
        yield missing(f"No histograms of {kind} were recorded: use with_hist=True to have them.")
    else:
        yield from _spreads(record)


def _spreads(record: Record) -> Iterator[str]:
    """How values are spread in each layer, step by step; all pages but the first are folded."""
    what = f"How {record.kind}s are spread, step by step, a panel a layer"
    pages = _pages(len(record.names))
    for number, (first, last) in enumerate(pages, 1):
        which = f"layers {first + 1} to {last + 1} of {len(record.names)}"
        ends = f"{record.labels[first]} to {record.labels[last]}"
        caption = f"{what}: {which}." if len(pages) > 1 else f"{what}."
        alt = f"{caption} From {ends}. {captions.in_words(record)}."
        picture = _picture(methodcaller("color_dim", record, page=number), alt, caption)
        head = f"{which.capitalize()}: {ends}"
        yield details(escape(head), picture) if number > 1 else picture


def _pages(n: int) -> list[tuple[int, int]]:
    """First and last row of each page of `n` layers; one page without matplotlib: no picture."""
    try:
        from hookkit.plotting.histograms import PAGE
    except HookkitError:
        PAGE = max(1, n)
    return [(i, min(n, i + PAGE) - 1) for i in range(0, n, PAGE)]


def _layer_table(record: Record) -> str:
    wanted = ("mean", "std", "rms", "near_zero", "nonfinite", "dead", "update_ratio", "grad_norm")
    keys = [key for key in wanted if key in record.values]
    head = ["layer", "type", *(key.replace("_", " ") for key in keys)]
    last = {key: [captions.last(row) for row in record.values[key]] for key in keys}
    rows = [
        [name or "(model)", kind, *(_cell(last[key][i], key) for key in keys)]
        for i, (name, kind) in enumerate(zip(record.names, record.types, strict=True))
    ]
    what = "Parameters" if record.kind == "param" else f"{record.kind.capitalize()}s"
    html = table(f"{what} at the last step that each was seen", head, rows)
    folded = details(f"{what}: the numbers of {len(rows)} rows", html)
    return folded if len(rows) > UNFOLDED else html


def _cell(value: Any, key: str = "") -> str:
    """A value as text; of a statistic, `key`, NaN says that it is not known."""
    if value is None or (key and isinstance(value, float) and np.isnan(value)):
        return "–"
    if isinstance(value, float) and np.isnan(value):
        return "NaN"
    if key == "nonfinite":
        return f"{value:,.0f}"
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)


def _picture(draw: Callable[[Any], Any], alt: str, caption: str) -> str:
    """A figure, or a line that says why there is none: without it there is still a page."""
    try:
        from hookkit import plotting
        from hookkit.plotting.svg import svg

        with plotting.offscreen():
            return figure(svg(draw(plotting), alt, DPI), caption)
    except HookkitError as why:
        return missing(f"{alt} No picture: {why}")
    except Exception as error:
        return missing(f"{caption} Could not be drawn: {type(error).__name__}: {error}")


def _model(summary: Any, run: Any) -> str:
    """The summary as HTML or as text; without one that of `run`, where it can make one."""
    if summary is None and callable(make := getattr(run, "summary", None)):
        try:
            summary = make()
        except HookkitError as why:
            summary = f"There is no summary: {why}"
    if summary is None:
        return missing("No summary was given: report(…, summary=summary(model, x)).")
    html = getattr(summary, "_repr_html_", lambda: None)()
    return html if html else f'<pre tabindex="0">{escape(str(summary))}</pre>'


def _environment(run: Run) -> str:
    module = torch.get_device_module(kind := accelerator())
    device = getattr(module, "get_device_name", lambda: kind)() if kind != "cpu" else "none"
    known = [("hookkit", __version__), ("torch", torch.__version__), ("Accelerator", device)]
    known += [("Python", platform.python_version()), ("System", platform.system())]
    facts = [(key.replace("_", " "), _fact(run.info[key])) for key in run.info if key != "torch"]
    return terms([*known, *((key, fact) for key, fact in facts if fact)])


def _fact(value: Any) -> str:
    """A plain value as text; "" for what could hold a path, or is no plain value."""
    if isinstance(value, (list, tuple)):
        return ", ".join(filter(None, map(_fact, value[:8]))) + (", …" if len(value) > 8 else "")
    if isinstance(value, str):
        return "" if set(value) & set("/\\~@") else value
    return _cell(value) if isinstance(value, (bool, int, float, np.number)) else ""
