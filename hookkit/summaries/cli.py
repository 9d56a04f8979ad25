"""`python -m hookkit module:factory --input 1,3,224,224`: a summary from the shell.

Builds on `making`. Exit codes: 0 a summary was printed, 1 the model could not be made or run, 2 the
arguments are bad, 130 it was interrupted. Each error is one line, after the table so far if the
model failed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch
from torch import nn

from hookkit.errors import HookkitError, ModelRunError, OptionError, nearest
from hookkit.files import atomic_write
from hookkit.summaries.columns import COLUMNS, as_columns
from hookkit.summaries.making import summary
from hookkit.summaries.result import Summary
from hookkit.texts import harmless


class _Parser(argparse.ArgumentParser):
    """One clear line and exit code 2, without the usage text."""

    def error(self, message: str) -> NoReturn:
        _write(sys.stderr, f"{self.prog}: {harmless(message, 1000)}\n")
        self.exit(2)


def _parser() -> argparse.ArgumentParser:
    p = _Parser(prog="python -m hookkit", description="What a model is made of and does.")
    p.add_argument("model", help="module:factory, a function that makes the model, or the model")
    shape = "shape of an input, with :int64 for ids; again for a second input"
    p.add_argument("--input", action="append", default=[], type=_input, metavar="N,...", help=shape)
    p.add_argument("--depth", type=_whole(0), help="show modules down to this depth")
    p.add_argument("--columns", type=_columns, help=f"out of {', '.join(COLUMNS)}")
    p.add_argument("--no-fold", action="store_true", help="show equal siblings one by one")
    p.add_argument("--no-macs", action="store_true", help="do not count multiply-accumulates")
    p.add_argument("--width", type=_whole(1), help="columns of text (default: the terminal's)")
    p.add_argument("--eval", action="store_true", help="in evaluation mode")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.add_argument("--html", type=Path, metavar="FILE", help="write HTML to a new file")
    return p


def _whole(least: int) -> Callable[[str], int]:
    """Reads a whole number from `least`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return read


def _input(text: str) -> torch.Tensor:
    """A tensor of the shape and dtype in `text`: `1,128:int64`."""
    sizes, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{kind!r} is not a dtype, such as float32 or int64")
    if not all(part.strip().isdecimal() and int(part) for part in sizes.split(",")):
        raise argparse.ArgumentTypeError(f"{sizes!r} is not a shape, such as 1,3,224,224")
    shape = [int(part) for part in sizes.split(",")]
    try:
        if dtype.is_floating_point or dtype.is_complex:
            generator = torch.Generator("cpu").manual_seed(0)
            return torch.randn(shape, generator=generator, device="cpu").to(dtype)
        return torch.zeros(shape, dtype=dtype, device="cpu")  # ids in every vocabulary
    except (RuntimeError, MemoryError, OverflowError, TypeError) as e:
        why = harmless(" ".join(str(e).split()), 200)
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made: {why}") from None


def _one_line(e: BaseException) -> str:
    """The text of an error on one line; its class if it has none."""
    return harmless(" ".join(str(e).split()), 1000) or type(e).__name__


def _columns(text: str) -> tuple[str, ...] | None:
    try:
        return as_columns(part.strip() for part in text.split(","))
    except OptionError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _load(parser: argparse.ArgumentParser, spec: str) -> nn.Module:
    """The model that `module:factory` names; the working directory is searched first."""
    where, _, name = spec.partition(":")
    if not all(where.split(".")) or not all(name.split(".")):
        parser.error(f"argument model: {spec!r} is not of the form module:factory")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        home = _within(f"importing {where}", importlib.import_module, where)
    except ModuleNotFoundError as e:
        if e.name is None or not (where + ".").startswith(e.name + "."):
            raise  # the module is there and lacks something itself
        hint = ": name a module, as in Python's import" if "/" in where else ""
        parser.error(f"argument model: no module {where!r} here or among the installed ones{hint}")
    made: Any = home
    for part in name.split("."):
        if not hasattr(made, part):
            near = nearest(part, dir(made), n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            parser.error(f"argument model: {where!r} has no {part!r}{hint}")
        made = getattr(made, part)
    if not isinstance(made, nn.Module) and callable(made):
        made = _within(f"calling {name}", made)
    if not isinstance(made, nn.Module):
        parser.error(f"argument model: {spec!r} is of type {type(made).__name__}, not an nn.Module")
    return made


def _within(what: str, f: Callable[..., Any], *args: Any) -> Any:
    """`f(*args)`; a `sys.exit` in it becomes a ModelRunError."""
    try:
        return f(*args)
    except SystemExit as e:
        raise ModelRunError(
            f"{what} ended by sys.exit({e.code!r}). Call sys.exit only if the file runs as a script"
        ) from e


def _page(made: Summary) -> str:
    """The summary as an HTML document, light or dark as the reader's system is."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape(harmless(made.rows[0].type))}</title>\n</head>\n"
        f"<body>\n{made.html()}\n</body>\n</html>\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the summary of the model in `argv`; returns the exit code."""
    parser = _parser()
    try:
        return _main(parser, argv)
    except KeyboardInterrupt:
        _write(sys.stderr, f"{parser.prog}: interrupted\n")
        return 130
    except BrokenPipeError:  # a reader such as head has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as e:
        _write(sys.stderr, f"{parser.prog}: cannot write the summary: {_one_line(e)}\n")
        return 1


def _main(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    args = parser.parse_args(argv)
    if args.no_macs and "macs" in (args.columns or ()):
        parser.error("argument --no-macs: --columns has macs: leave one of them out")
    if args.html and os.path.lexists(args.html):  # false for a name that no file can have
        parser.error(f"argument --html: {args.html} exists: name a new file")
    if args.html and not os.path.isdir(args.html.parent):
        parser.error(f"argument --html: there is no folder {args.html.parent}: make it first")
    try:
        model = _load(parser, args.model)
        model = model.eval() if args.eval else model
        fold, depth, macs = not args.no_fold, args.depth, not args.no_macs
        made = summary(model, *args.input, fold=fold, depth=depth, columns=args.columns, macs=macs)
    except Exception as e:
        table = "".join(f"{note.strip()}\n" for note in getattr(e, "__notes__", []))
        kind = "" if isinstance(e, HookkitError) else f"{type(e).__name__}: "
        _write(sys.stderr, f"{table}{parser.prog}: {kind}{_one_line(e)}\n")
        return 1
    if args.html:
        try:
            with atomic_write(args.html, text=True) as file:
                file.write(_page(made))
        except (OSError, ValueError) as e:  # ValueError: a name with a null character
            why = getattr(e, "strerror", None) or _one_line(e)
            parser.error(f"argument --html: cannot write {args.html}: {why}")
    _write(sys.stdout, f"{made.to_json(2) if args.json else made.text(width=args.width)}\n")
    return 0


def _write(file: TextIO, text: str) -> None:
    """Writes `text`; a character that the file's encoding lacks as its escape."""
    encoding = getattr(file, "encoding", None) or "utf-8"
    file.write(text.encode(encoding, "backslashreplace").decode(encoding))
    file.flush()
