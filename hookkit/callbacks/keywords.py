"""Keyword arguments that a class does not take: an error with the names that it does.

`check_keywords` is called from `__new__`, before Python looks at `__init__`; `InitSignature` keeps
what `inspect.signature` says of such a class.
"""

from __future__ import annotations

import inspect
from typing import Any

from hookkit.errors import ArgumentError, nearest

V1_ARGUMENTS = {
    "callback_fns": "cbs",
    "callbacks": "cbs",
    "data": "dls",
    "do_remove": "remove_end",
    "layer_groups": "splitter",
}
"""fastai v1's names of arguments, and fastai v2's, which hold here."""


def check_keywords(cls: type, kwargs: dict[str, Any]) -> None:
    """An ArgumentError if `cls.__init__` has no argument of one of these names."""
    params = list(_of_init(cls).parameters.values())
    if not kwargs or any(p.kind is p.VAR_KEYWORD for p in params):
        return
    names = [p.name for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for word in kwargs:
        if word not in names:
            if V1_ARGUMENTS.get(word) in names:
                raise ArgumentError(
                    f"{cls.__name__}({word}=…) was given; that is the argument's name in fastai "
                    f"v1. Write {cls.__name__}({V1_ARGUMENTS[word]}=…)."
                )
            near = nearest(word, names)
            raise ArgumentError(
                f"{cls.__name__}({word}=…) was asked for; it has no such argument. "
                + (f"Nearest: {', '.join(near)}. " if near else "")
                + (f"It takes {', '.join(names)}." if names else "It takes none.")
            )


def _of_init(cls: type) -> inspect.Signature:
    init: Any = cls.__init__  # type: ignore[misc]
    mine = inspect.signature(init)
    return mine.replace(parameters=list(mine.parameters.values())[1:])


class InitSignature:
    """`__signature__` of a class whose `__new__` would hide its `__init__`; instances have none."""

    def __get__(self, obj: Any, cls: type) -> inspect.Signature:
        """The signature of the class, as it is called."""
        if obj is not None:
            raise AttributeError("__signature__")
        return _of_init(cls)
