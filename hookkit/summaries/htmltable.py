"""A summary as HTML that folds, for notebooks: no script, no outside file, light and dark.

Closed, a container shows the totals of all inside it (of all siblings folded into it); open, its
own share and below it what one of them holds. Colours are mixed from the page's own text colour,
so that light and dark need no switch.
"""

from __future__ import annotations

from html import escape

from hookkit.errors import OptionError
from hookkit.layout import nbytes, percent, si
from hookkit.summaries.folding import Node, tree
from hookkit.summaries.outline import Row, Summary, Totals, View
from hookkit.summaries.texttable import footer_parts

BARS = {"params": "n_params", "macs": "macs", "kept": "kept_bytes"}
_OPEN_ROWS = 24  # containers start open, level by level, until this many rows are in sight

_STYLE = """<style>
.hk{font:13px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
--hk-ink:currentColor;--hk-soft:color-mix(in srgb,currentColor 62%,transparent);
--hk-line:color-mix(in srgb,currentColor 14%,transparent);
--hk-bar:color-mix(in srgb,#3b82f6 75%,transparent);--hk-bad:#c2410c;max-width:100%;overflow-x:auto}
.hk .g{display:grid;column-gap:.9em;
grid-template-columns:minmax(13em,2.2fr) minmax(7em,1.6fr) 9em 4.6em 5.4em 5.4em;
align-items:baseline;padding:.1em .3em;border-bottom:1px solid var(--hk-line)}
.hk .g>*{min-width:0;overflow-wrap:anywhere}
.hk .n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.hk .s{color:var(--hk-soft)} .hk i{color:var(--hk-soft);font-style:normal}
.hk .b{border:1px solid var(--hk-line);border-radius:.6em;padding:0 .45em;font-size:.85em;
white-space:nowrap;color:var(--hk-soft)} .hk .x{color:var(--hk-bad);font-weight:600}
.hk .w{display:block;background:linear-gradient(var(--hk-bar),var(--hk-bar)) right bottom/var(--w)
4px no-repeat}
.hk summary{cursor:pointer;list-style:none} .hk summary::-webkit-details-marker{display:none}
.hk summary .l::before{content:"▸";display:inline-block;width:1em;color:var(--hk-soft)}
.hk details[open]>summary .l::before{content:"▾"}
.hk .l{padding-left:calc(var(--d)*1.1em)}
.hk .r .l::before{content:"";display:inline-block;width:1em}
.hk details[open]>summary .c{display:none} .hk details:not([open])>summary .o{display:none}
.hk summary:hover,.hk .r:hover{background:color-mix(in srgb,currentColor 6%,transparent)}
.hk .h{color:var(--hk-soft);border-bottom-color:var(--hk-soft)} .hk p{margin:.35em .3em}
</style>"""
_HEADS = ("Layer", "Output", "Params", "Train", "MACs", "Kept")


def render(s: Summary, view: View, by: str = "params") -> str:
    """One `div`: the table, then totals, how it was run and warnings."""
    if by not in BARS:
        raise OptionError(f'html(by="{by}"): bars show the share of {", ".join(BARS)}')
    root = tree(s.rows, view.fold)
    heads = "".join(
        f'<span class="{"n" if i in (2, 4, 5) else ""}">{h}</span>' for i, h in enumerate(_HEADS)
    )
    output = escape(s.output or ("✗" if s.failed else "–"))
    flow = f" <i>{escape(s.inputs)} → {output}</i>" if s.run != "none" else ""
    title = f'<p><b>{escape(s.rows[0].type)}</b>{flow}</p><div class="g h">{heads}</div>'
    facts = "".join(f"<p>{escape(' · '.join(part))}</p>" for part in footer_parts(s))
    told = "".join(f'<p class="x">⚠ {escape(w)}</p>' for w in s.warnings)
    drawing = _Drawing(s, root, by, view.depth)
    empty = (
        not any(vars(root.row.own).values()) and root.children and not s.failed and view.depth != 0
    )
    table = "".join(drawing.node(n, 0) for n in root.children) if empty else drawing.node(root, 0)
    return f'{_STYLE}<div class="hk">{title}{table}<div class="s">{facts}</div>{told}</div>'


def _open_first(root: Node) -> set[int]:
    """Ids of the containers that start open: level by level, folded ones never."""
    found, level, rows = {id(root)}, root.children, len(root.children)
    while level:
        able = [n for n in level if n.children and n.fold == 1]
        rows += sum(len(n.children) for n in able)
        if rows > _OPEN_ROWS:
            break
        found |= {id(n) for n in able}
        level = [child for n in able for child in n.children]
    return found


class _Drawing:
    """One rendering; `times` of folded rows only matter to a person, who sees the badge."""

    def __init__(self, s: Summary, root: Node, by: str, depth: int | None) -> None:
        self.s, self.by, self.depth = s, BARS[by], depth
        self.whole = getattr(s.total, self.by)
        self.open = _open_first(root)

    def node(self, node: Node, depth: int) -> str:
        """A row, or a container with the rows inside it."""
        row, inside = node.row, node.children
        if not inside or (self.depth is not None and depth >= self.depth):
            shown = row.total if inside else row.own
            return f'<div class="g r">{self.cells(node, depth, shown)}</div>'
        failed = self.s.failed and row.name in self.s.failed
        state = " open" if failed or id(node) in self.open else ""
        below = "".join(self.node(child, depth + 1) for child in inside)
        head = self.cells(node, depth, row.own, row.total)
        return f'<details{state}><summary class="g">{head}</summary>{below}</details>'

    def cells(self, node: Node, depth: int, own: Totals, total: Totals | None = None) -> str:
        """The columns of one row; with `total` both the open and the closed numbers."""
        row = node.row
        name = escape(node.label or "(model)")
        hover = escape(f"{row.name or row.type} {row.extra}".strip(), quote=True)
        label = f'<span class="l" style="--d:{depth}" title="{hover}">{name}'
        label += f" <i>{escape(row.type)}</i>{self.badges(node)}</span>"
        shape = f'<span class="s">{escape(" | ".join(row.outputs[:3]))}</span>'
        return label + shape + self.numbers(own, row, node.fold, total)

    def numbers(self, own: Totals, row: Row, fold: int, total: Totals | None) -> str:
        """Params, Train, MACs, Kept; a container has each twice, for when it is open and closed."""
        if total is None:
            cells = self.texts(own, row, fold)
        else:
            pairs = zip(self.texts(own, row, 1), self.texts(total, row, fold, True), strict=True)
            cells = [
                a if a == b else f'<span class="o">{a}</span><span class="c">{b}</span>'
                for a, b in pairs
            ]
        return "".join(
            f"<span>{cell}</span>" if i == 1 else f'<span class="n">{cell}</span>'
            for i, cell in enumerate(cells)
        )

    def texts(self, t: Totals, row: Row, fold: int, closed: bool = False) -> list[str]:
        """Content of the number cells, for `fold` siblings; the chosen one with its bar."""
        n = t.n_params * fold
        cells = {
            "n_params": f"{n:,}" if n or row.tied else "",
            "macs": si(t.macs * fold) if t.macs else "",
            "kept_bytes": nbytes(t.kept_bytes * fold) if t.kept_bytes else "",
        }
        part = getattr(t, self.by) * fold
        if self.whole and part:
            size = f"{100 * part / self.whole:.1f}%"
            cells[self.by] = f'<span class="w" style="--w:{size}">{cells[self.by]}</span>'
        params, macs, kept = cells.values()
        return [params, self.train(t, row, closed), macs, kept]

    @staticmethod
    def train(t: Totals, row: Row, closed: bool) -> str:
        if closed:
            state = t.n_trainable / t.n_params if t.n_params else None
        else:
            state = row.trainable if row.trainable is None else float(row.trainable)
        if state is None:
            return ""
        mark = (
            "✓" if state == 1 else percent(state, 1) if state else '<span class="b">frozen</span>'
        )
        return mark.replace("<1%", "&lt;1%").replace(">99%", "&gt;99%")

    def badges(self, node: Node) -> str:
        """One style for all that is worth a word."""
        row = node.row
        words = [f"×{node.fold}"] if node.fold > 1 else []
        words += row.notes
        if row.dtype and self.s.dtype and row.dtype != self.s.dtype and row.kind != "again":
            words.append(row.dtype)
        out = "".join(f' <span class="b">{escape(w)}</span>' for w in words)
        if self.s.failed and row.kind == "module" and row.name in self.s.failed:
            got = f" got {escape(row.inputs)}" if row.name == self.s.failed[-1] else ""
            out += f' <span class="x">✗{got}</span>'
        return out
