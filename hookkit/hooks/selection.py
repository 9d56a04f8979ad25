"""`select`: which modules of a model; used by every function that hooks, edits or swaps.

A selector is a name, a glob, a class, a predicate, a module, or a list or dict of these. Names are
tried first, by a look-up for each part; everything else walks the model once and matches the names.
A selector that matches nothing is an error with the names that are near, before anything is hooked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any, NamedTuple

from torch import nn

from hookkit._core.checks import OfLast, check_function, check_module, kind_of, short_repr
from hookkit._core.globs import compile_glob, expand
from hookkit._core.messages import no_such
from hookkit._core.modules import (
    calls_children,
    can_run,
    children,
    find,
    is_observer,
    join,
    unwrap,
    walk,
)
from hookkit._core.pytree import BRACKET, canonical_path
from hookkit.errors import ArgumentError, OptionError, SelectionError
from hookkit.hooks.roles import patterns_of

Selector = str | re.Pattern[str] | type | nn.Module | Callable[..., bool] | Iterable[Any]

__all__ = ["Selection", "Selector", "leaf_modules", "select", "unwrap"]

_WITH_PATH = re.compile(rf"(.*?)((?:{BRACKET})+)", re.DOTALL)
_DOT = re.compile(r"\.(?![^\[]*\])")  # not one inside brackets


class Pick(NamedTuple):
    """Holds one module that a selector matches.

    Attributes:
        name: the module's name in the model.
        path: the path into its output that is meant, or "".
        by_name: selected by its name; else by a pattern, which gives a shared module once.
        new_name: its name in the selection, if a dict renames it.
    """

    name: str
    module: nn.Module
    path: str = ""
    by_name: bool = False
    new_name: str = ""


class Selection(dict[str, nn.Module]):
    """Holds the modules that `select` found: a dict by name, in the order of the selectors.

    Two entries can share a module: when they pick different parts of its output, or when both of
    its names were selected. `print` shows a line for each.

    >>> s = select(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "1", "0")
    >>> s
    Selection(2 modules: '1', '0')
    >>> s["0"]
    Linear(in_features=2, out_features=3, bias=True)
    """

    def __init__(self, picks: Mapping[str, Pick]) -> None:
        super().__init__((name, pick.module) for name, pick in picks.items())
        self._places = {name: (pick.name, pick.path) for name, pick in picks.items()}

    def place(self, name: str) -> tuple[str, str]:
        """Return the module's name in the model, and the path into its output, or ""."""
        return self._places[name]

    def path(self, name: str) -> str:
        """Return the path into the module's output, such as `['logits']`; "" for all of it."""
        return self._places[name][1]

    def __repr__(self) -> str:
        names = [repr(name) for name in self]
        if len(names) > 6:
            names = [*names[:4], "…", names[-1]]
        few = "1 module" if len(self) == 1 else f"{len(self)} modules"
        return f"Selection({few}{': ' if names else ''}{', '.join(names)})"

    def __str__(self) -> str:
        """Return a line for each entry: name, class, and if renamed the name in the model."""
        width = max(map(len, self), default=0)
        lines = []
        for name, module in self.items():
            path = "".join(self._places[name])
            where = "" if path == name else f"  = {path}"
            lines.append(f"{name or '(model)':<{width}}  {type(module).__name__}{where}")
        return "\n".join(lines) or repr(self)


def select(model: nn.Module, *selectors: Selector) -> Selection:
    """Return the modules of `model` that the selectors match, by name, in the selectors' order.

    Each selector is one of

    - a dotted name: `"layer1.0.conv1"`; `""` is the model itself;
    - a glob, matched part by part: `*` (one part, or some letters of one), `**` (any number of
      parts, also none), `?`, `[0-3]`, `[!0]`, `{q,k}`: `"blocks.*.mlp"`, `"**.conv?"`;
    - a role that transformers have under other names in each family, where `hookkit.hooks.ROLES`
      knows it: `"@resid"`, `"@attn.3"`, `"@mlp.*.act"`; names in the result are the model's own;
    - any of them with a path into a structured output: `"attn[0]"`, `"lstm[1][0]"`,
      `"head['logits']"`. A name that exists is always a name, and `"attn[0]"` means a part of the
      output when there is a module `attn`, else the glob for `attn0`;
    - a compiled regex: its `search` is tried on each name, so `^` and `$` are yours to write;
    - a class, by `isinstance`; a predicate `f(name, module)` or `f(module)`; a module of the model;
    - a list, or any iterable, of all these (a ModuleList is its entries, since it never runs);
    - a dict that renames, `{"layer2": "h"}`: a selector, and the name in the result.

    Without a selector it returns every module below the root that runs. Modules that PyTorch never
    calls (a ModuleList, attention's output projection) are found by their name, and by a glob,
    regex, class or predicate only if it matches nothing else.

    Names are those of the model inside compile, DDP, DataParallel and FSDP wrappers. Each name that
    was asked for has its entry, also two names of a shared module; globs, classes and the like find
    it once, under the first name that they match. Modules of `torch.nn.utils.parametrize` are found
    by their whole name only.

    Args:
        model: a model, wrapped or not.
        *selectors: as above.

    Returns:
        A `Selection`: a dict of name → module, which hooks, edits and recorders take.

    Raises:
        SelectionError: nothing matches; the message has the nearest names.
        ArgumentError: a selector is none of the above.
        OptionError: two entries have the same name, or a dict gives one name to several modules.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> list(select(net, nn.Linear))
    ['0', '2']
    >>> list(select(net, {"0": "first"}, "[1-2]"))
    ['first', '1', '2']
    """
    check_module("select", model, "The model comes first: select(model, selector).")
    finder = _Finder(model)
    picks: dict[str, Pick] = {}
    taken: set[tuple[int, str]] = set()
    for pick in finder.of(selectors) if selectors else finder.everything():
        place = id(pick.module), pick.path
        if not pick.by_name and place in taken:  # a second name of a shared module
            continue
        taken.add(place)
        name = pick.new_name or pick.name + pick.path
        other = picks.setdefault(name, pick)
        if (id(other.module), other.path) != place:
            raise OptionError(
                f'select: two modules have the name "{name}", "{other.name}" and "{pick.name}". '
                "Give one of them another name."
            )
    return Selection(picks)


def leaf_modules(model: nn.Module) -> Selection:
    """Return the modules that run and hold no other module that runs, in the model's order.

    A shared module is listed once. Left out are parametrizations, containers that are never called,
    the insides of `nn.MultiheadAttention`, which calls no module, and observers of quantization: a
    layer that holds some is a leaf. A model without children is its own leaf, `""`.

    Args:
        model: a model, wrapped or not.

    Returns:
        The modules by name.

    Raises:
        ArgumentError: `model` is no module.

    >>> list(leaf_modules(nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.ReLU()]))))
    ['0', '1.0']
    """
    check_module("leaf_modules", model, "Write leaf_modules(model).")
    run = [(name, m, first) for name, m, first in walk(model, calls_children) if can_run(m)]
    run = [place for place in run if not place[0] or not is_observer(place[1])]
    parts = [name.split(".") if name else [] for name, _, _ in run]
    around = {".".join(keys[:i]) for keys in parts for i in range(len(keys))}
    return Selection({n: Pick(n, m) for n, m, first in run if first and n not in around})


def _globbed(root: nn.Module, pattern: str) -> Iterator[Pick]:
    """Yield the modules below `root` whose names match a glob without braces.

    The glob is matched part by part on the way down. A module that is reached again with the same
    rest of the glob is not walked again, as it would give the same modules: a chain of shared
    modules has 2^depth names.
    """
    words = _DOT.split(pattern)
    matches = [compile_glob(word).fullmatch for word in words]  # `**` is any key too
    seen = set[tuple[int, frozenset[int]]]()

    def reached(at: set[int]) -> frozenset[int]:
        """Add to the numbers of matched words those after a `**` that matches no key."""
        for i, word in enumerate(words):
            if i in at and word == "**":
                at.add(i + 1)
        return frozenset(at)

    def below(module: nn.Module, name: str, at: frozenset[int]) -> Iterator[Pick]:
        if (id(module), at) in seen:
            return
        seen.add((id(module), at))
        for key, child in children(module):
            hits = [i for i in at if i < len(words) and matches[i](key)]
            now, path = reached({i + (words[i] != "**") for i in hits}), join(name, key)
            if len(words) in now:
                yield Pick(path, child)
            if now:
                yield from below(child, path, now)

    return below(root, "", reached({0}))


def _places(module: nn.Module, name: str = "", around: tuple[int, ...] = ()) -> Iterator[Pick]:
    """Yield every name of every module, also the names inside shared modules."""
    yield Pick(name, module)
    if id(module) not in around:  # a child can hold its parent
        for key, child in children(module):
            yield from _places(child, join(name, key), (*around, id(module)))


class _Finder:
    """Finds the modules of one model that selectors match; walks the model only where it must."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.root = model, unwrap(model)

    @cached_property
    def places(self) -> list[Pick]:
        """List every name of every module; a shared module that holds shared ones has many."""
        return list(_places(self.root))

    @cached_property
    def firsts(self) -> dict[int, Pick]:
        """Map the id of each module to the module under its first name."""
        return {id(m): Pick(name, m) for name, m, first in walk(self.root) if first}

    def everything(self) -> list[Pick]:
        """Return each module that runs, without the root unless there is no other."""
        firsts = list(self.firsts.values())
        return _running(firsts[1:]) or firsts

    def of(self, selector: Any) -> Iterator[Pick]:
        """Yield the modules that one selector matches."""
        if isinstance(selector, Selection):
            for name, m in selector.items():
                yield self.by_module(m)._replace(
                    path=selector.path(name), by_name=True, new_name=name
                )
        elif isinstance(selector, Mapping):
            for key, new in selector.items():
                yield self.renamed(key, new)
        elif isinstance(selector, str):
            yield from self.by_text(selector)
        elif isinstance(selector, nn.Module) and not isinstance(selector, nn.ModuleList):
            yield self.by_module(selector)
        elif isinstance(selector, Iterable):
            for each in selector:
                yield from self.of(each)
        else:
            test = _test(selector)
            by_module = isinstance(selector, type) or isinstance(test, OfLast)
            places = self.firsts.values() if by_module else self.places
            picks = [pick for pick in places if test(pick.name, pick.module)]
            if not picks:
                raise SelectionError(
                    f"no module matches {short_repr(selector)}. print(select(model)) lists all, "
                    "with their classes."
                )
            yield from _running(picks)

    def by_module(self, module: nn.Module) -> Pick:
        """Return a module of the model under its first name; a wrapper stands for what it wraps."""
        inner = unwrap(module)
        if id(inner) not in self.firsts:
            raise SelectionError(
                f"the {type(inner).__name__} given is no module of this "
                f"{type(self.root).__name__}. A copied, pickled or converted model has modules of "
                "its own: select by name."
            )
        return self.firsts[id(inner)]

    def renamed(self, key: Any, new: Any) -> Pick:
        """Return the one module that `key` matches, under the name `new` that a dict gives it."""
        if not isinstance(new, str):
            raise ArgumentError(
                f"select: a dict renames, {{selector: new name}}, and the new name of {key!r} is "
                f'{kind_of(new)}. Give text, as in {{"layer2": "h"}}.'
            )
        picks = list(self.of(key))
        if len(picks) != 1:
            raise OptionError(
                f'select: a dict gives the name "{new}" to one module, and {key!r} matches '
                f"{len(picks)}. Select one, or keep the names: select(model, {key!r})."
            )
        return picks[0]._replace(by_name=True, new_name=new)

    def by_text(self, text: str) -> list[Pick]:
        """Return the modules of a name, glob or role, which may end with a path into the output."""
        if place := find(self.model, text):
            return [Pick(*place, by_name=True)]
        path = _WITH_PATH.fullmatch(text)
        if path and (picks := self.matched(path[1])):
            if not any(can_run(pick.module) for pick in picks):
                raise SelectionError(
                    f'no module matches "{text}": "{path[1]}" is never called, and has no output. '
                    f'Its entries are modules: "{path[1]}.{path[2].strip("[]")}".'
                )
            return [pick._replace(path=canonical_path(path[2])) for pick in picks]
        if picks := self.matched(text):
            return picks
        what = f'no module matches "{text}"'
        if text.startswith("@"):
            raise SelectionError(
                f"{what}. Add the model's names to hookkit.hooks.ROLES, or select by name."
            )
        names = [name for name, _, _ in walk(self.root)]
        raise no_such(what, text, names[1:] or names, "print(select(model)) lists all.")

    def matched(self, text: str) -> list[Pick]:
        """Return the modules of a name, glob or role without a path; [] if there are none."""
        if text.startswith("@"):
            for picks in map(self.matched, patterns_of(text)):
                if any(can_run(pick.module) for pick in picks):
                    return picks
            return []
        picks = []
        for pattern in expand(text):
            if place := find(self.model, pattern):
                picks.append(Pick(*place, by_name=True))
            elif any(c in pattern for c in "*?["):
                picks += _globbed(self.root, pattern)
        return _running(picks)


def _running(picks: list[Pick]) -> list[Pick]:
    """Drop modules that PyTorch never calls, unless they were named, or nothing else is left."""
    return [pick for pick in picks if pick.by_name or can_run(pick.module)] or picks


def _test(selector: Any) -> Any:
    """Return `f(name, module)`, which tells whether a regex, class or predicate matches."""
    if isinstance(selector, re.Pattern):
        return lambda name, _: name and selector.search(name)
    if isinstance(selector, type):
        return lambda _, module: isinstance(module, selector)
    if not callable(selector):
        raise ArgumentError(
            f"select: {short_repr(selector)} selects nothing. Give a name, a glob, a compiled "
            "regex, a class, a predicate of (name, module) or of the module, a module, or a list "
            "or dict of these."
        )
    return check_function("select", selector, "name", "module", name="predicate")
