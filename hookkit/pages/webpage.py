"""The frame of a page that stands alone: style sheet, sections, tables, pictures inside the file.

No network, no script: a content security policy in the page forbids both. Light and dark follow the
reader's system, but pictures stay on white, dimmed: inverted colour maps would say something else.
Printing is always light.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape

GENERATOR = '<meta name="generator" content="hookkit">'
"""What tells a report of ours from any other file."""

CSS = """
:root{color-scheme:light dark;--ink:#1d2229;
--soft:#5d6673;--line:#d9dde3;--paper:#fff;
--card:#f6f7f9;
--error:#b3261e;--warning:#8a5a00;--link:#0b57a4;--well:#1b6e3c}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#a3adba;--line:#3b424c;
--paper:#16191d;--card:#1f2329;--error:#ff8a80;--warning:#ffca6b;--link:#8ab8ff;--well:#7fd6a0}
figure img{filter:brightness(.88)}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:68rem;padding:1rem 1.2rem 4rem;
background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;overflow-wrap:break-word}
h1{font-size:1.6rem;margin:.6rem 0 .2rem}h2{font-size:1.25rem;margin:2.4rem 0 .6rem;
border-bottom:1px solid var(--line);padding-bottom:.25rem}
h3{font-size:1.05rem;margin:1.2rem 0 .4rem}
a{color:var(--link)}a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{
outline:3px solid var(--link);outline-offset:2px}
.skip{position:absolute;left:-99rem}.skip:focus{
left:1rem;top:.5rem;background:var(--paper);
padding:.4rem}
nav ul{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.6rem 0}
.verdict{font-size:1.1rem;margin:.2rem 0;
font-weight:600}.soft,figcaption,caption{
color:var(--soft)}
.error{--tone:var(--error)}.warning{--tone:var(--warning)}
.note{--tone:var(--link)}.healthy{--tone:var(--well)}
.verdict,.badge{color:var(--tone,inherit)}
article{border:1px solid var(--line);border-left:5px solid var(--tone);border-radius:6px;
background:var(--card);padding:.2rem 1rem .6rem;margin:.8rem 0;break-inside:avoid}
.badge{font-weight:700}
dl{display:grid;grid-template-columns:8rem 1fr;
gap:.2rem 1rem;margin:.4rem 0}dt{color:var(--soft)}
dd{margin:0}
figure{margin:1rem 0;break-inside:avoid}figure img{max-width:100%;height:auto;background:#fff;
display:block;border-radius:4px}figcaption,caption{
font-size:.9rem;text-align:left;padding:.3rem 0}
.wide{overflow-x:auto;margin:1rem 0}table{border-collapse:collapse;
font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th[scope=row],thead th:first-child{text-align:left;font-weight:600}.words{text-align:left}
pre{overflow-x:auto;font-size:.85rem;line-height:1.35}summary{cursor:pointer;padding:.2rem 0}
p.note{border-left:3px solid var(--line);padding-left:.8rem;color:var(--soft)}
@media (max-width:34rem){dl{grid-template-columns:1fr;
gap:0}dd{margin:0 0 .5rem}body{padding:.6rem .7rem 3rem}
figure .wide{margin:0;cursor:zoom-in}figcaption::after{content:" (Tap to enlarge.)"}
figure .wide:focus{cursor:auto}figure .wide:focus img{max-width:none;width:40rem}}
@media print{nav,.skip{display:none}body{max-width:none;font-size:11pt}h2{break-after:avoid}}
"""


def page(title: str, top: str, sections: Iterable[tuple[str, str, str]]) -> str:
    """A whole HTML document.

    Args:
        title: of the document, unescaped.
        top: HTML under the heading.
        sections: (id, heading, HTML) in reading order; each gets a link in the navigation.
    """
    sections = list(sections)
    links = "".join(f'<li><a href="#{i}">{escape(h)}</a></li>' for i, h, _ in sections)
    body = "".join(
        f'<section id="{i}" aria-labelledby="{i}-h">\n<h2 id="{i}-h">{escape(head)}</h2>'
        f"{html}</section>\n"
        for i, head, html in sections
    )
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{GENERATOR}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the findings</a>\n'
        f"<header><h1>{escape(title)}</h1>{top}</header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f'<main id="main">\n{body}</main>\n'
        '<footer class="soft">Written by hookkit. It loads nothing from the network.</footer>\n'
        "</body>\n</html>\n"
    )


def figure(png: bytes, alt: str, caption: str, dpi: int) -> str:
    """A picture inside the page; `alt` tells its content to those who do not see it.

    Where the page is narrow it fits in, and while it has the focus it is large and scrolls by
    itself: a tap does it, for the page has no script.
    """
    width, height = (int.from_bytes(png[i : i + 4], "big") for i in (16, 20))
    size = f'width="{round(width * 100 / dpi)}" height="{round(height * 100 / dpi)}"'
    source = f"data:image/png;base64,{b64encode(png).decode()}"
    return (
        f'<figure><div class="wide" tabindex="0" role="group" aria-label="{escape(caption)}">'
        f'<img src="{source}" alt="{escape(alt)}" {size}></div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column names the rows; it scrolls by itself where the page is narrow.

    Numbers stand on the right, and words on the left.
    """
    rows = list(rows)
    words = [any(map(_is_words, column)) for column in zip(*rows, strict=True)] or [False] * len(
        head
    )
    side = [' class="words"' if is_words else "" for is_words in words]
    top = "".join(
        f'<th scope="col"{at}>{escape(cell)}</th>' for cell, at in zip(head, side, strict=True)
    )
    body = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(
            f"<td{at}>{escape(cell)}</td>" for cell, at in zip(row[1:], side[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _is_words(cell: str) -> bool:
    try:
        float(cell.replace(",", ""))
    except ValueError:
        return cell != "–"
    return False


def terms(pairs: Iterable[tuple[str, str]]) -> str:
    """A list of terms, each with what is said of it."""
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in pairs)}</dl>"


def note(text: str) -> str:
    """A sentence aside: what is missing, and how to get it."""
    return f'<p class="note">{escape(text)}</p>'
