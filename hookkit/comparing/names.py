"""Which name in the second model a name in the first one stands for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from hookkit.errors import OptionError, SelectionError, nearest


class Names:
    """Names of one model in another, by patterns: `*` is one part of a name.

    A pattern stands for all names below it too, `""` for all names. Of those that fit, the one
    with the most parts and the fewest stars counts, and the parts that its stars stand for are put
    in the place of the stars of the other.

    >>> names = Names({"encoder.layers.*": "h.*", "encoder.layers.*.linear1": "h.*.mlp.fc"})
    >>> names.of("encoder.layers.3.norm1"), names.of("encoder.layers.3.linear1"), names.of("head")
    ('h.3.norm1', 'h.3.mlp.fc', 'head')
    >>> Names({"": "model"}).of("head"), Names({"model": ""}).of("model.head")
    ('model.head', 'head')
    """

    def __init__(self, patterns: Any) -> None:
        if not isinstance(patterns or {}, Mapping):
            raise OptionError(
                f"compare_models: names={patterns!r:.60} is no dict. Give names of the first model "
                'and those of the second: {"encoder.layers.*": "transformer.h.*"}.'
            )
        self.rules = [(p, _pattern(p), str(other)) for p, other in (patterns or {}).items()]
        self.rules.sort(key=lambda rule: (-_dotted(rule[0]).count("."), rule[0].count("*")))
        for p, _, other in self.rules:
            if p.count("*") != other.count("*"):
                raise OptionError(
                    f'compare_models: names={{"{p}": "{other}"}}: each * stands for one part of '
                    "the name, so that both need as many of them."
                )

    def of(self, name: str) -> str:
        """The name in the second model."""
        dotted = _dotted(name)
        for _, pattern, other in self.rules:
            if found := pattern.match(dotted):
                there = _dotted(other)
                for part in found.groups():
                    there = there.replace("*", part, 1)
                return (there + dotted[found.end() :]).removeprefix(".")
        return name

    def check(self, first: Iterable[str], second: Iterable[str]) -> None:
        """Raises if a pattern fits none of the names in its model.

        Raises:
            SelectionError: so it is.
        """
        for text, pattern, other in self.rules:
            _check("first", text, pattern, list(first))
            _check("second", other, _pattern(other), list(second))


def _check(which: str, text: str, pattern: re.Pattern[str], known: list[str]) -> None:
    if not any(map(pattern.match, map(_dotted, known))):
        near = nearest(text, known) or known[:3]
        raise SelectionError(
            f'compare_models: names: no module of the {which} model is called "{text}". '
            f"Nearest: {', '.join(map(repr, near)) or 'there are none'}. Give names of the first "
            "model and those of the second."
        )


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(re.escape(_dotted(text)).replace(r"\*", "([^.]+)") + r"(?=\.|$|\[)")


def _dotted(name: str) -> str:
    """`name` with a dot before each part, so that the root's, `""`, is the beginning of all."""
    return f".{name}" if name and name[0] != "[" else name
