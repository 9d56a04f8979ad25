"""From a selector to modules: `Resolver`, with a method for each kind of selector.

Builds on `patterns` (names and globs) and on `suggestions` (messages if nothing matches).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from hookkit.checks import check_function, kind_of, shown
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.modules import can_run, children, find, unwrap
from hookkit.selecting import suggestions
from hookkit.selecting.patterns import ModelNames, Pick, expand, is_glob, running, splits

Selector = (
    str
    | re.Pattern[str]
    | type
    | nn.Module
    | Callable[..., bool]
    | Mapping[Any, str]
    | Iterable[Any]
)

_CALLED_WITH = "(name, module), or with the module if it takes one argument"


def may_return(module: nn.Module, leaf: str) -> bool:
    """False where `.leaf` is more likely a wrong name than an attribute of the module's output.

    That is: next to a child's or parameter's name, on a module that never runs, or on a plain
    layer of PyTorch, whose output is a tensor or a tuple.
    """
    word = re.split(r"[.\[]", leaf)[1]
    own = dict(children(module))
    if get_close_matches(word, own, n=1):
        return False
    if isinstance(module, nn.Sequential) and own:
        return may_return([*own.values()][-1], leaf)
    plain = type(module).__module__.startswith("torch.nn.modules") and not own
    plain &= not isinstance(module, nn.AdaptiveLogSoftmaxWithLoss)
    return not plain and can_run(module) and word not in suggestions.tensors_of(module)


def _by_names(picks: list[Pick]) -> list[tuple[str | None, Pick]]:
    return [(pick.name + pick.leaf, pick) for pick in picks]


def _named_if_literal(text: str, picks: list[Pick]) -> list[tuple[str | None, Pick]]:
    """The picks of `text`: by their names if it is a name, or names in braces: `{q,k}_proj`."""
    if any(is_glob(name) for name in expand(text)):
        return [(None, pick) for pick in picks]
    return _by_names(picks)


class Resolver(ModelNames):
    """Finds the modules of one model: a method for each kind of selector."""

    def of(self, what: Any) -> Iterator[tuple[str | None, Pick]]:
        """`(new name or None, pick)` of each module that one selector matches."""
        if isinstance(picks := getattr(what, "picks", None), dict):  # a Selection
            for new, pick in picks.items():
                if id(pick.module) not in self.names:
                    self.by_module(pick.module)  # raises if it is in another model
                yield new, pick
        elif isinstance(what, Mapping):
            for key, new in what.items():
                yield self.renamed(key, new)
        elif isinstance(what, str):
            yield from self.by_text(what)
        elif (found := self.found_by(what)) is not None:
            yield from ((None, pick) for pick in found)
        elif isinstance(what, Iterable) and not isinstance(what, bytes | Tensor):
            for each in what:
                yield from self.of(each)
        else:
            raise ArgumentError(
                f"select: {shown(what)} selects nothing. Give a name, a "
                f"glob, a compiled regex, a class, a predicate of (name, module) or of the module, "
                f"a module, or a list or dict of these."
            )

    def found_by(self, what: Any) -> list[Pick] | None:
        """The picks of a module, regex, class or predicate; None for any other selector."""
        if isinstance(what, nn.Module):
            return None if isinstance(what, nn.ModuleList) else [self.by_module(what)]
        if isinstance(what, re.Pattern) and isinstance(what.pattern, str):
            return self.by_regex(what)
        if isinstance(what, type):
            return self.by_type(what)
        if callable(what) and not isinstance(what, Iterable):
            return self.by_predicate(what)
        return None

    def renamed(self, key: Any, new: Any) -> tuple[str, Pick]:
        """A dict's entry: the one module that `key` matches, under the name `new`."""
        if not isinstance(new, str):
            raise ArgumentError(
                f"select: a dict renames, {{selector: new name}}, and the new name of {key!r} is "
                f'{kind_of(new)}. Give text, as in {{"layer2": "h"}}.'
            )
        try:
            picks = [pick for _, pick in self.of(key)]
        except SelectionError as e:
            if find(self.root, new) is None:
                raise
            raise SelectionError(
                f'{e} "{new}" is a module: a dict in select is {{selector: new name}}, so write '
                f"{{{new!r}: {key!r}}}."
            ) from None
        if len(picks) != 1:
            raise OptionError(
                f'select: a dict gives the name "{new}" to one module, and {key!r} matches '
                f"{len(picks)}. Select one, or keep the names: select(model, {key!r})."
            )
        return new, picks[0]

    def by_module(self, module: nn.Module) -> Pick:
        """A module of the model under its first name, a wrapper as what it wraps."""
        inner = unwrap(module)
        name = self.names.get(id(inner))
        if name is None:
            places = self.root.named_modules()
            name = next((n for n, m in places if m is module or m is inner), None)
        if name is None:
            raise SelectionError(
                f"the {type(inner).__name__} given is no module of this "
                f"{type(self.root).__name__}. A copied, pickled or converted model has modules of "
                f"its own: select by name, select(model) lists all {self.n_names}."
            )
        return Pick(name, inner)

    def by_regex(self, pattern: re.Pattern[str]) -> list[Pick]:
        """The modules with a name, also a second one, in which the regex finds something."""
        hits = [Pick(n, m) for n, m, _ in self.places if n and pattern.search(n)]
        if not hits:
            raise SelectionError(
                f'no name has a match of the regex "{pattern.pattern}" (tried with search). '
                f"{suggestions.listing(self)}"
            )
        return running(hits)

    def by_type(self, kind: type) -> list[Pick]:
        """The modules of a class, each once, the root included."""
        hits = [Pick(n, m) for n, m, first in self.places if first and isinstance(m, kind)]
        if not hits:
            kinds = Counter(type(m).__name__ for _, m, first in self.places if first)
            found = ", ".join(f"{k} ({n})" for k, n in kinds.most_common(6))
            rest = f" and {len(kinds) - 6} more classes" if len(kinds) > 6 else ""
            raise SelectionError(
                f"no module is a {kind.__name__}. There are {found}{rest}. Select one of these, "
                f"or by name: select(model) lists all {self.n_names}."
            )
        return running(hits)

    def by_predicate(self, wanted: Callable[..., bool]) -> list[Pick]:
        """The modules for which `wanted(name, module)` or `wanted(module)` is true.

        Each module is given once, the root included.
        """
        test = check_function("select", wanted, "name", "module", name="predicate")
        try:
            hits = [Pick(n, m) for n, m, first in self.places if first and test(n, m)]
        except Exception as e:
            e.add_note(f"raised in a predicate of select, which is called with {_CALLED_WITH}")
            raise
        if not hits:
            name = getattr(wanted, "__name__", repr(wanted))
            raise SelectionError(
                f"the predicate {name} is true for none of the {self.n_names} modules. It is "
                f"called with {_CALLED_WITH}. {suggestions.listing(self)}"
            )
        return running(hits)

    def by_text(self, text: str) -> list[tuple[str | None, Pick]]:
        """`(name or None, pick)` of a name or glob, with its leaf path if it has one.

        A module selected by a name is given under that name, also where it was selected by another
        name before; a glob finds each module once.
        """
        if (found := find(self.root, text)) is not None:
            return _by_names([Pick(*found)])
        ways = list(splits(text))
        for name, leaf in ways:
            if leaf[0] == "[" and (modules := self.named(name)):
                if not any(can_run(m) for _, m in modules):
                    raise SelectionError(
                        f'no module matches "{text}": "{name}" is a '
                        f"{type(modules[0][1]).__name__}, which is never called and has no "
                        f'output. Its entries are modules: "{name}.{leaf.strip("[]")}".'
                    )
                return _named_if_literal(name, running([Pick(n, m, leaf) for n, m in modules]))
        if modules := self.named(text):
            return _named_if_literal(text, running([Pick(n, m) for n, m in modules]))
        for name, leaf in ways:
            if leaf[0] == "." and (modules := self.named(name)):
                picks = [Pick(n, m, leaf) for n, m in modules if not name or may_return(m, leaf)]
                if picks:
                    return _named_if_literal(name, picks)
                break
        raise SelectionError(suggestions.unknown(self, text))
