"""The frame of a self-contained page: head, navigation, sections, pictures inside the file.

Builds on `markup`, whose style sheet it extends by a layout. No network, no script: a content
security policy in the page forbids both. Light and dark follow the reader's system, also in the
pictures (see `plotting.svg`). Printing is always light.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from hookkit.markup import STYLE

GENERATOR = '<meta name="generator" content="hookkit">'
"""By this line a report is recognised, so that no other file is overwritten."""

LAYOUT = """
:root{color-scheme:light dark;--ink:#1d2229;--paper:#fff;--card:#f6f7f9}
@media screen and (prefers-color-scheme:dark){:root{--ink:#e6e9ee;--paper:#16191d;--card:#1f2329}}
*{box-sizing:border-box}
body.hk{margin:0 auto;max-width:68rem;padding:1rem 1.2rem 4rem;background:var(--paper);
color:var(--ink);font-size:16px;overflow-wrap:break-word}
h1{font-size:1.6rem;margin:.6rem 0 .2rem}h2{font-size:1.25rem;margin:2.4rem 0 .6rem;
border-bottom:1px solid var(--line);padding-bottom:.25rem}
h3{font-size:1.05rem;margin:1.2rem 0 .4rem}
a{color:var(--note)}a:focus-visible,summary:focus-visible,[tabindex]:focus-visible{
outline:3px solid var(--note);outline-offset:2px}
.skip{position:absolute;left:-99rem}
.skip:focus{left:1rem;top:.5rem;background:var(--paper);padding:.4rem}
nav ul{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;margin:.6rem 0}
.verdict{font-size:1.1rem;font-weight:600;color:var(--tone)}footer,figcaption{color:var(--soft)}
body.hk .finding{max-width:none;background:var(--card)}figure{margin:1rem 0;break-inside:avoid}
figure svg{max-width:100%;height:auto;display:block;stroke-linejoin:round;
font-family:"DejaVu Sans",Verdana,sans-serif}
figcaption{font-size:.9rem;padding:.3rem 0}
pre{overflow-x:auto;font-size:.85rem;line-height:1.35}
.missing{border-left:3px solid var(--line);padding-left:.8rem;color:var(--soft)}
@media (max-width:34rem){body.hk{padding:.6rem .7rem 3rem}}
@media (max-width:64rem){figure .wide{margin:0;cursor:zoom-in}
figcaption::after{content:" (Tap or click on the picture to enlarge it.)"}
figure .wide:focus{cursor:auto}figure .wide:focus svg{max-width:none}}
@media print{nav,.skip{display:none}body.hk{max-width:none;font-size:11pt}h2{break-after:avoid}}
"""
"""What a whole page adds to the style sheet of `markup`."""


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
        f"<title>{escape(title)}</title>\n{STYLE}\n<style>{LAYOUT}</style>\n</head>\n"
        '<body class="hk">\n'
        '<a class="skip" href="#main">Skip to the findings</a>\n'
        f"<header><h1>{escape(title)}</h1>{top}</header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f'<main id="main">\n{body}</main>\n'
        "<footer>Written by hookkit. It loads nothing from the network.</footer>\n"
        "</body>\n</html>\n"
    )


def figure(svg: str, caption: str) -> str:
    """A picture inside the page: an SVG element, with its caption.

    Where the page is narrow it fits in, and while it has the focus it has its full size and scrolls
    by itself: a tap or a click does it, for the page has no script.
    """
    return (
        f'<figure><div class="wide" tabindex="0" role="group" aria-label="{escape(caption)}">'
        f"{svg}</div><figcaption>{escape(caption)}</figcaption></figure>"
    )


def missing(text: str) -> str:
    """A line that says what is missing, and how to get it."""
    return f'<p class="missing">{escape(text)}</p>'
