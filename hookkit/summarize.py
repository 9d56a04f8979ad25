"""`python -m hookkit.summarize module:factory --input 1,3,224,224`: a summary from the shell.

`python -m hookkit` is the same.
Exit codes: 0 a summary was printed, 1 the model could not be made or run, 2 the arguments are bad.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from hookkit.errors import HookkitError, nearest
from hookkit.summaries import Summary, summary
from hookkit.summaries.texttable import COLUMNS


class _Parser(argparse.ArgumentParser):
    """One clear line and exit code 2, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def _parser(prog: str) -> argparse.ArgumentParser:
    p = _Parser(prog=prog, description="What a model is made of and does.")
    p.add_argument("model", help="module:factory, a function that makes the model, or the model")
    shape = "shape of an input, with :int64 for ids; again for a second input"
    p.add_argument("--input", action="append", default=[], type=_input, metavar="N,...", help=shape)
    p.add_argument("--depth", type=_whole, help="show modules down to this depth")
    p.add_argument("--columns", type=_columns, help=f"out of {', '.join(COLUMNS)}")
    p.add_argument("--no-fold", action="store_true", help="show equal siblings one by one")
    p.add_argument("--width", type=_width, help="columns of text (default: the terminal's)")
    p.add_argument("--eval", action="store_true", help="in evaluation mode")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--html", type=Path, metavar="FILE", help="write HTML to a new file")
    return p


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _width(text: str) -> int:
    n = _whole(text)
    if not n:
        raise argparse.ArgumentTypeError("0 columns hold no text")
    return n


def _input(text: str) -> torch.Tensor:
    """A tensor of the shape and type that `text` asks for: `1,128:int64`."""
    sizes, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{kind!r} is not a dtype, such as float32 or int64")
    if not all(part.strip().isdecimal() and int(part) for part in sizes.split(",")):
        raise argparse.ArgumentTypeError(f"{sizes!r} is not a shape, such as 1,3,224,224")
    shape = [int(part) for part in sizes.split(",")]
    mine = torch.Generator("cpu").manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=mine, device="cpu").to(dtype)
    return torch.zeros(shape, dtype=dtype, device="cpu")  # ids that every vocabulary has


def _columns(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    wrong = [name for name in names if name not in COLUMNS]
    if wrong:
        raise argparse.ArgumentTypeError(f"no column {wrong[0]!r}: there are {', '.join(COLUMNS)}")
    return names


def _load(parser: argparse.ArgumentParser, spec: str) -> nn.Module:
    """The model that `module:factory` names; the folder one stands in is looked in first."""
    where, _, name = spec.partition(":")
    if not all(where.split(".")) or not all(name.split(".")):
        parser.error(f"argument model: {spec!r} is not of the form module:factory")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        home = importlib.import_module(where)
    except ModuleNotFoundError as e:
        if e.name is None or not (where + ".").startswith(e.name + "."):
            raise  # the module is there and lacks something itself
        parser.error(f"argument model: no module {where!r} here or among the installed ones")
    made: Any = home
    for part in name.split("."):
        if not hasattr(made, part):
            near = nearest(part, dir(made), n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            parser.error(f"argument model: {where!r} has no {part!r}{hint}")
        made = getattr(made, part)
    made = made if isinstance(made, nn.Module) or not callable(made) else made()
    if not isinstance(made, nn.Module):
        parser.error(f"argument model: {spec!r} is of type {type(made).__name__}, not an nn.Module")
    return made


def _made(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Summary:
    model = _load(parser, args.model)
    if args.eval:
        model.eval()
    return summary(
        model, *args.input, fold=not args.no_fold, depth=args.depth, columns=args.columns
    )


def _page(made: Summary) -> str:
    """The summary as a document of its own: as wide as the screen, light or dark as the reader."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(made.rows[0].type)}</title>\n</head>\n"
        f"<body>\n{made.html()}\n</body>\n</html>\n"
    )


def main(argv: Sequence[str] | None = None, prog: str = "python -m hookkit.summarize") -> int:
    """Prints the summary that the command line asks for; returns the exit code."""
    parser = _parser(prog)
    args = parser.parse_args(argv)
    if args.html and os.path.exists(args.html):  # false for a name that no disk takes
        parser.error(f"argument --html: {args.html} exists: name a new file")
    if args.html and not args.html.parent.is_dir():
        parser.error(f"argument --html: there is no folder {args.html.parent}: make it first")
    try:
        made = _made(parser, args)
    except Exception as e:
        table = "".join(f"{note.strip()}\n" for note in getattr(e, "__notes__", []))
        kind = "" if isinstance(e, HookkitError) else f"{type(e).__name__}: "
        sys.stderr.write(f"{table}{parser.prog}: {kind}{e}\n")
        return 1
    if args.html:
        try:
            args.html.write_text(_page(made), encoding="utf-8")
        except OSError as e:
            parser.error(f"argument --html: cannot write {args.html}: {e.strerror}")
    sys.stdout.write(f"{made.to_json(2) if args.json else made.text(width=args.width)}\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
