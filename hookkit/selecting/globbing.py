"""Globs over module names, matched part by part along the model's tree.

The tree is walked with the set of pattern positions reached so far, as an automaton would be, so a
pattern costs a walk over the part of the tree it can reach, not a match against each full name.
Each module comes out once, under the first name that matches, also one behind a shared module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate

from torch import nn

from hookkit.modules import is_parametrization, join, submodules, unwrap

_BRACES = re.compile(r"\{([^{}]*)\}")
_PARTS = re.compile(r"(?:\[[^\]]*\]|[^.\[]|\[)+")


def is_glob(text: str) -> bool:
    """True if `text` has a character that a glob gives a meaning to."""
    return any(c in text for c in "*?[{")


def expand(pattern: str) -> list[str]:
    """The patterns without braces that `pattern` stands for.

    >>> expand("attn.{q,k}_proj")
    ['attn.q_proj', 'attn.k_proj']
    """
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [text for mid in found[1].split(",") for text in expand(head + mid + tail)]


def parts(pattern: str) -> list[str]:
    """The pattern's parts between dots; a dot inside brackets separates nothing.

    >>> parts("blocks.[0-3].**")
    ['blocks', '[0-3]', '**']
    """
    return _PARTS.findall(pattern)


def glob(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """`(name, module)` of each module below the root that `pattern` matches, in walking order.

    `**` stands for any number of parts, also none. Parametrizations are found only by a pattern
    that spells them out.
    """
    wanted = parts(pattern)
    tests = [None if part == "**" else re.compile(translate(part)).fullmatch for part in wanted]
    end = len(tests)

    def settle(states: set[int]) -> set[int]:
        for i in range(end):
            if i in states and tests[i] is None:
                states.add(i + 1)
        return states

    def after(states: set[int], key: str) -> set[int]:
        new = set()
        for i in states - {end}:
            if (test := tests[i]) is None:
                new.add(i)
            elif test(key):
                new.add(i + 1)
        return settle(new)

    root = unwrap(model)
    reached: dict[int, set[int]] = {}
    stack = [("", root, settle({0}))]
    while stack:
        name, module, states = stack.pop()
        old = reached.setdefault(id(module), set())
        new = states - old
        if end in new and module is not root:
            yield name, module
        old |= new
        below = []
        for key, child in submodules(module).items() if new else ():
            follow = after(new, key)
            if follow and (key in wanted or not is_parametrization(key, child)):
                below.append((join(name, key), unwrap(child), follow))
        stack += below[::-1]
