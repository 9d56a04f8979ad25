"""Globs of dotted names: the one pattern language of `select`, `names=` and `log_to`."""

from __future__ import annotations

import re
from functools import lru_cache

from hookkit.errors import SelectionError

_BRACES = re.compile(r"\{([^{}]*)\}")
# `**.` at the start of a part, `.**` at the end, `*` and `?`, `[0-3]`, `{q,k}`
_WILDCARD = re.compile(r"(?:^|(?<=\.))\*\*\.|\.\*\*$|\*+|\?|\[!?[^]]+\]|\{[^{}]*\}")


def expand(pattern: str) -> list[str]:
    """Return the patterns that `pattern` stands for, with its braces expanded.

    >>> expand("attn.{q,k}_proj")
    ['attn.q_proj', 'attn.k_proj']
    """
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    head, tail = pattern[: found.start()], pattern[found.end() :]
    return [text for mid in found[1].split(",") for text in expand(head + mid + tail)]


@lru_cache(256)
def compile_glob(pattern: str) -> re.Pattern[str]:
    """Compile a glob of module names to a regex, with one group for each of its wildcards.

    Match whole names with it: `compile_glob(…).fullmatch(name)`. The group of a `**` that matches
    no part is None.

    Args:
        pattern: as for `select`: `*` and `?` match inside one part of a name, `**` any number of
            parts, also none, `[0-3]` one character, `{q,k}` one of several texts.

    >>> compile_glob("layers.*.{q,k}_proj").fullmatch("layers.12.k_proj").groups()
    ('12', 'k')
    >>> glob = compile_glob("**.conv?")
    >>> glob.fullmatch("a.b.conv1").groups(), glob.fullmatch("conv2").groups()
    (('a.b', '1'), (None, '2'))
    """
    try:
        return re.compile(_regex_of(pattern))
    except re.error as e:
        raise SelectionError(
            f'the glob "{pattern}" cannot be read: {e}. Write a range as in "[0-3]".'
        ) from None


def _regex_of(glob: str, group: str = "(") -> str:
    """Return a glob as the text of a regex, in which `group` opens the group of each wildcard."""
    if glob == "**":
        return f"{group}.*)"
    regex, end = "", 0
    for found in _WILDCARD.finditer(glob):
        regex += re.escape(glob[end : found.start()])
        text, end = found[0], found.end()
        if text == "**.":
            regex += rf"(?:{group}.+)\.)?"
        elif text == ".**":
            regex += rf"(?:\.{group}.+))?"
        elif text[0] == "*":
            regex += f"{group}[^.]*)"
        elif text == "?":
            regex += f"{group}[^.])"
        elif text[0] == "[":
            none_of = text[1] == "!" and len(text) > 3
            chars = re.sub(r"([\\\[^&~|])", r"\\\1", text[1 + none_of : -1])
            regex += f"{group}[{'^' * none_of}{chars}])"
        else:  # wildcards inside braces have no groups of their own
            either = [_regex_of(part, "(?:") for part in text[1:-1].split(",")]
            regex += f"{group}{'|'.join(either)})"
    return regex + re.escape(glob[end:])
