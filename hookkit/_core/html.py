"""HTML for notebooks and pages: one style sheet, and the few elements that are used everywhere.

All HTML of hookkit is inside an element of class `hk`, and every rule of the style sheet begins
with `.hk`, so it changes nothing else in a notebook. Grey tones and the four colours of severities
are mixed with the text colour of the page around it, so that light and dark need no switch: a
notebook's theme is often not that of the reader's system. There is no script and no outside file.
Text is escaped here; `html` arguments are not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

# The one-letter classes are those of a summary's tree, whose HTML has thousands of such cells:
# g grid row, h heading, l label, n number, s soft, b badge, x failure.
STYLE = """<style>
.hk{--soft:color-mix(in srgb,currentColor 70%,transparent);
--line:color-mix(in srgb,currentColor 14%,transparent);
--error:color-mix(in srgb,#f4554a 55%,currentColor);
--warning:color-mix(in srgb,#e08a00 55%,currentColor);
--note:color-mix(in srgb,#2f80ff 55%,currentColor);
--healthy:color-mix(in srgb,#1fa854 55%,currentColor);
font:14px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
div.hk{max-width:100%;overflow-x:auto}
.hk .error{--tone:var(--error)} .hk .warning{--tone:var(--warning)}
.hk .note{--tone:var(--note)} .hk .healthy{--tone:var(--healthy)}
.hk .finding{border:1px solid var(--line);border-left:4px solid var(--tone);border-radius:5px;
margin:.5em 0;padding:.3em .9em;max-width:62em;break-inside:avoid}
.hk .tone{color:var(--tone);font-weight:700}
.hk p{margin:.5em 0} .hk summary{cursor:pointer}
.hk dl{display:grid;grid-template-columns:minmax(6em,max-content) 1fr;gap:.15em .9em;margin:.4em 0}
.hk dt{color:var(--soft)} .hk dd{margin:0}
@media (max-width:34rem){.hk dl{grid-template-columns:1fr;gap:0} .hk dd{margin:0 0 .5em}}
.hk .wide{overflow-x:auto;margin:.8em 0}
.hk table{border-collapse:collapse;font-size:.9em;font-variant-numeric:tabular-nums}
.hk caption{color:var(--soft);text-align:left;padding:.3em 0}
.hk th,.hk td{padding:.2em .7em;border-bottom:1px solid var(--line);text-align:right;
white-space:nowrap}
.hk th[scope=row],.hk thead th:first-child{text-align:left;font-weight:600}
.hk .words{text-align:left}
.hk .tree{font-size:13px}
.hk .g{display:grid;column-gap:.9em;grid-template-columns:var(--cols);
align-items:baseline;padding:.1em .3em;border-bottom:1px solid var(--line)}
.hk .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.hk .s{color:var(--soft)}
.hk .b{border:1px solid var(--line);border-radius:.6em;padding:0 .45em;font-size:.85em;
color:var(--soft);box-decoration-break:clone;-webkit-box-decoration-break:clone}
.hk .x{color:var(--error);font-weight:600}
.hk summary.g{list-style:none} .hk summary.g::-webkit-details-marker{display:none}
.hk summary .l::before{content:"▸";display:inline-block;width:1em;margin-left:-1em;
color:var(--soft)}
.hk details[open]>summary .l::before{content:"▾"}
.hk .l{padding-left:calc(1em + var(--d)*1.1em)}
.hk summary.g:hover,.hk .r:hover{background:color-mix(in srgb,currentColor 6%,transparent)}
.hk .h{color:var(--soft);border-bottom-color:var(--soft)}
</style>"""
"""The style sheet, in its element."""


def fragment(html: str) -> str:
    """Return `html` in an element of its own with the style sheet, for a notebook."""
    return f'{STYLE}<div class="hk">{html}</div>'


def details(head: str, html: str, *, kind: str = "", is_open: bool = False) -> str:
    """Return `html` as an element that opens under its first line, `head`, which is HTML too.

    Args:
        kind: classes of the element: `"finding error"`.
        is_open: whether it is open at first.

    >>> details("2 rules", "<p>why</p>")
    '<details><summary>2 rules</summary><p>why</p></details>'
    """
    opening = f'<details class="{kind}"' if kind else "<details"
    return f"{opening}{' open' * is_open}><summary>{head}</summary>{html}</details>"


def terms(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms, each with its description, as HTML.

    >>> terms([("fix", "lr < 0.1")])
    '<dl><dt>fix</dt><dd>lr &lt; 0.1</dd></dl>'
    """
    return f"<dl>{''.join(f'<dt>{escape(k)}</dt><dd>{escape(v)}</dd>' for k, v in pairs)}</dl>"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as HTML, whose first column names the rows.

    It scrolls by itself where the page is narrow. Numbers are aligned on the right, words on the
    left. An empty `caption` is left out.
    """
    rows = list(rows)
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    side = [' class="words"' if any(map(_is_words, column)) else "" for column in columns]
    top = "".join(
        f'<th scope="col"{at}>{escape(cell)}</th>' for cell, at in zip(head, side, strict=True)
    )
    body = "".join(f"<tr>{_row(row, side)}</tr>" for row in rows)
    label = f' role="region" aria-label="{escape(caption)}"' if caption else ""
    name = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide" tabindex="0"{label}><table>{name}<thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _row(cells: Sequence[str], side: Sequence[str]) -> str:
    rest = zip(cells[1:], side[1:], strict=True)
    cells_html = "".join(f"<td{at}>{escape(cell)}</td>" for cell, at in rest)
    return f'<th scope="row">{escape(cells[0])}</th>{cells_html}'


def _is_words(cell: str) -> bool:
    """Return whether a cell is text: no number, such as 4.1 k, and no mark of a missing one."""
    try:
        float(cell.replace(",", "").rstrip(" kMGT"))
    except ValueError:
        return cell not in ("–", "NaN", "")
    return False


class Output:
    """Draws one output of a notebook's cell, again and again in the same place."""

    _handle: Any = None

    def show(self, html: str, text: str) -> None:
        """Show `html` in place of the last output; `text` where a front end shows no HTML."""
        from IPython.display import display

        data = {"text/html": html, "text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def in_notebook() -> bool:
    """Return whether this runs in a Jupyter kernel, without importing IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config
