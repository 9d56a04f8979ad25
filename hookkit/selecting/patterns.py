"""What selectors of text say: globs over module names, and paths into a module's output.

A glob is matched part by part along the model's tree, with the set of positions in the pattern that
have been reached. So it costs a walk over the part of the tree that it can reach; to match all full
names would cost more, and a model of shared modules has exponentially many. Builds on `modules`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate

from torch import nn

from hookkit.modules import is_parametrization, join, submodules, unwrap

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
