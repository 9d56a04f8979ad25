"""Every name that users can import from `hookkit`: the twenty-five, and those of its modules."""

import inspect
from typing import Any

import hookkit


def names() -> dict[str, Any]:
    """What can be imported, by name, in their order."""
    found = {n: v for n, v in vars(hookkit).items() if n[0] != "_" and not inspect.ismodule(v)}
    return {n: v for n, v in sorted(found.items()) if v.__module__.startswith("hookkit")}
