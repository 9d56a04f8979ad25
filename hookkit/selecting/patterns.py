"""Names of modules: globs over them, paths into outputs, and all names of one model.

A glob is matched part by part along the model's tree, with the set of positions in the pattern that
have been reached. So it costs a walk over the part of the tree that it can reach; to match all full
names would cost more, and a model of shared modules has exponentially many. Builds on `modules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property

from torch import nn

from hookkit.modules import can_run, find, is_parametrization, join, submodules, unwrap, walk

_BRACES = re.compile(r"\{([^{}]*)\}")
_PARTS = re.compile(r"(?:\[[^\]]*\]|[^.\[]|\[)+")
_LEAF = re.compile(r"""(?:\.[A-Za-z_]\w*|\[-?\d+\]|\['[^']*'\]|\["[^"]*"\])+""")


def is_glob(text: str) -> bool:
    """True if `text` has a character with a meaning in globs."""
    return any(c in text for c in "*?[{")


def expand(pattern: str) -> list[str]:
    """The patterns that `pattern` means, its braces expanded.

    >>> expand("attn.{q,k}_proj")
    ['attn.q_proj', 'attn.k_proj']
    """
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [text for mid in found[1].split(",") for text in expand(head + mid + tail)]


def parts(pattern: str) -> list[str]:
    """The pattern's parts between dots, but for dots inside brackets.

    >>> parts("blocks.[0-3].**")
    ['blocks', '[0-3]', '**']
    """
    return _PARTS.findall(pattern)


def glob(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """`(name, module)` of each module below the root that `pattern` matches, in walking order.

    Each module comes once, under the first name that matches, also one inside a shared module.
    `**` matches any number of parts, also none. Parametrizations are found only by a pattern that
    spells them out.
    """
    words = parts(pattern)
    tests = [re.compile(translate(word)).fullmatch for word in words]

    def after(positions: set[int], key: str) -> set[int]:
        """The positions in the pattern, from `positions`, when the name goes on with `key`."""
        waiting = {i for i in positions if i < len(words)}
        stay = {i for i in waiting if words[i] == "**"}
        return opened(stay | {i + 1 for i in waiting - stay if tests[i](key)})

    def opened(positions: set[int]) -> set[int]:
        """With the positions behind a `**` that matches no part."""
        for i, word in enumerate(words):
            if i in positions and word == "**":
                positions.add(i + 1)
        return positions

    root = unwrap(model)
    reached: dict[int, set[int]] = {}  # by a module's id: no position is followed twice
    stack = [("", root, opened({0}))]
    while stack:
        name, module, positions = stack.pop()
        new = positions - reached.setdefault(id(module), set())
        reached[id(module)] |= new
        if len(words) in new and module is not root:
            yield name, module
        below = []
        for key, child in submodules(module).items() if new else ():
            ahead = after(new, key)
            if ahead and (key in words or not is_parametrization(key, child)):
                below.append((join(name, key), unwrap(child), ahead))
        stack += below[::-1]


def splits(text: str) -> Iterator[tuple[str, str]]:
    """Each way to read `text` as a name and a path into an output, the longest name first.

    >>> list(splits("enc.attn[0]"))
    [('enc.attn', '[0]'), ('enc', '.attn[0]')]
    """
    for i in range(len(text) - 1, -1, -1):
        if text[i] in ".[" and text[i - 1 : i] != "." and _LEAF.fullmatch(text[i:]):
            yield text[:i], text[i:].replace('"', "'")


@dataclass(frozen=True)
class Pick:
    """One selected thing: a module, its name in the model, and a path into its output or ""."""

    name: str
    module: nn.Module
    leaf: str = ""


def running(picks: list[Pick]) -> list[Pick]:
    """Those whose module can run; all if none can (a selector of containers only)."""
    return [pick for pick in picks if can_run(pick.module)] or picks


class ModelNames:
    """The modules of one model by name; it is walked once at most, and only if necessary."""

    def __init__(self, root: nn.Module):
        self.root = root

    @cached_property
    def places(self) -> list[tuple[str, nn.Module, bool]]:
        """Each place of a module, as `walk` gives them."""
        return list(walk(self.root))

    @cached_property
    def names(self) -> dict[int, str]:
        """The first name of each module, by the module's id."""
        return {id(m): name for name, m, first in self.places if first}

    @property
    def n_names(self) -> int:
        """How many modules `select(model)` lists."""
        return sum(1 for _ in self.everything())

    def everything(self) -> Iterator[tuple[str | None, Pick]]:
        """Each module that runs, without the root unless there is no other."""
        below = [Pick(n, m) for n, m, first in self.places if first and n]
        yield from ((None, pick) for pick in running(below) or [Pick("", self.root)])

    def named(self, text: str) -> list[tuple[str, nn.Module]]:
        """`(name, module)` of a dotted name or a glob without leaf path, braces expanded."""
        if not is_glob(text):
            found = find(self.root, text)
            return [] if found is None else [found]
        return [hit for pattern in expand(text) for hit in glob(self.root, pattern)]
