"""`python -m hookkit compare a.safetensors b.safetensors`: two saved captures, from the shell.

Exit codes: 0 they agree, 1 they differ or have no name in common, 2 they cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hookkit.comparing.running import compare_models
from hookkit.errors import HookkitError, SelectionError


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison of the two files in `argv`; returns the exit code."""
    p = argparse.ArgumentParser(
        prog="python -m hookkit compare", description="Two captures that Hooks.save wrote."
    )
    p.add_argument("a", help="the expected one")
    p.add_argument("b", help="the other one")
    p.add_argument("--rtol", type=float, help="relative tolerance (default: of the dtypes)")
    p.add_argument("--atol", type=float, help="absolute tolerance (default: of the dtypes)")
    args = p.parse_args(argv)
    try:
        found = compare_models(args.a, args.b, rtol=args.rtol, atol=args.atol)
    except HookkitError as error:
        sys.stderr.write(f"{p.prog}: {error}\n")
        return 1 if isinstance(error, SelectionError) else 2
    sys.stdout.write(f"{found}\n")
    return int(found.first is not None)
