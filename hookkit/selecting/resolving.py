"""From a selector to modules, and the message if there are none.

`Resolver` has a method for each kind of selector; half of it are messages that name what the user
probably meant, which is why the file is longer than others. Builds on `modules` (names, wrappers)
and `patterns`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from hookkit.checks import check_function, kind_of, shown
from hookkit.errors import ArgumentError, OptionError, SelectionError, nearest
from hookkit.modules import can_run, children, find, unwrap, walk
from hookkit.selecting.patterns import expand, glob, is_glob, parts, splits

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

_BARE_KEY = re.compile(r"(.*?)\[([^\W\d]\w*)\](.*)", re.DOTALL)
_BRACKETS = re.compile(r"""(.*?)((?:\[-?\d+\]|\['[^']*'\]|\["[^"]*"\])*)""", re.DOTALL)


@dataclass(frozen=True)
class Pick:
    """One selected thing: a module, its name in the model, and a path into its output or ""."""

    name: str
    module: nn.Module
    leaf: str = ""


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
    return not plain and can_run(module) and word not in _tensors(module)


def _tensors(module: nn.Module) -> set[str]:
    """Names of a module's parameters and buffers; no attribute is read, which could run code."""
    return {*module.__dict__.get("_parameters", ()), *module.__dict__.get("_buffers", ())}


def running(picks: list[Pick]) -> list[Pick]:
    """Those whose module can run; all if none can (a selector of containers only)."""
    return [pick for pick in picks if can_run(pick.module)] or picks


def _by_names(picks: list[Pick]) -> list[tuple[str | None, Pick]]:
    return [(pick.name + pick.leaf, pick) for pick in picks]


def _named_if_literal(text: str, picks: list[Pick]) -> list[tuple[str | None, Pick]]:
    """The picks of `text`: by their names if it is a name, or names in braces: `{q,k}_proj`."""
    if any(is_glob(name) for name in expand(text)):
        return [(None, pick) for pick in picks]
    return _by_names(picks)


class Resolver:
    """Finds the modules of one model; it is walked once at most, and only if necessary."""

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
                f"{self.listing()}"
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
                f"called with {_CALLED_WITH}. {self.listing()}"
            )
        return running(hits)

    def listing(self) -> str:
        """For a message without a better hint: what names look like here."""
        some = [f'"{name}"' for name in self.names.values() if name][:3]
        if not some:
            return 'It has no modules inside it: select(model, "") is the model itself.'
        return f"Names are like {', '.join(some)}: select(model) lists all {self.n_names}."

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
        raise SelectionError(self.unknown(text))

    def named(self, text: str) -> list[tuple[str, nn.Module]]:
        """`(name, module)` of a dotted name or a glob without leaf path, braces expanded."""
        if not is_glob(text):
            found = find(self.root, text)
            return [] if found is None else [found]
        return [hit for pattern in expand(text) for hit in glob(self.root, pattern)]

    def unknown(self, text: str) -> str:
        """The message for a name or glob that matches nothing, with what is near it."""
        owner, _, last = text.rpartition(".")
        found = find(self.root, owner)
        if found is not None and last in _tensors(found[1]):
            return (
                f'no module matches "{text}": it is a tensor of the {type(found[1]).__name__} '
                f'"{owner}", and hooks go on modules. Use "{owner}", or hook_tensor for a tensor.'
            )
        if (bare := _BARE_KEY.fullmatch(text)) and find(self.root, bare[1]) is not None:
            name, key, rest = bare.groups()
            return (
                f'no module matches "{text}". A key of an output is written in quotes: '
                f"\"{name}['{key}']{rest}\"."
            )
        name, leaf = _BRACKETS.fullmatch(text).groups()  # type: ignore[union-attr]
        corrected = self.corrected(name) or self.corrected(text)
        hits = [name for name, _ in self.named(corrected)] if corrected else self.similar(text)
        if corrected and len(hits) == 1:  # its siblings may be as near
            parent, _, _ = hits[0].rpartition(".")
            siblings = [n for n in self.names.values() if n.rpartition(".")[0] == parent and n]
            hits = list(dict.fromkeys([*hits, *nearest(name, siblings)]))[:3]
        kind = self.of_class(last, whole=bool(hits))
        if not hits:
            return f'no module matches "{text}". {kind or self.listing()}'
        near = ", ".join(f'"{name}"' for name in hits)
        if len(hits) > 3:
            near = f'"{hits[0]}" … "{hits[-1]}" ({len(hits)})'
        use = f'Use "{corrected or hits[0]}{leaf if corrected else ""}", or'
        return (
            f'no module matches "{text}". Nearest: {near}. {use} select(model) to list all '
            f"{self.n_names} names.{' ' if kind else ''}{kind}"
        )

    def of_class(self, word: str, whole: bool) -> str:
        """A sentence on the modules whose class is called `word`, or begins with it; "" if none."""
        word = word.replace("_", "").lower()
        kinds = Counter(type(m) for _, m, first in self.places if first)
        names = {kind: kind.__name__.lower() for kind in kinds}
        hits = [kind for kind, name in names.items() if word in (name, f"{name}s")]
        if not hits and not whole and len(word) > 2:
            hits = [kind for kind, name in names.items() if name.startswith(word)]
        if not hits:
            return ""
        kind, n = hits[0], kinds[hits[0]]
        spelt = f"nn.{kind.__name__}" if getattr(nn, kind.__name__, 0) is kind else kind.__name__
        few = "1 module is" if n == 1 else f"{n} modules are"
        return f"{few} of class {kind.__name__}: select(model, {spelt}) gives every module of it."

    def corrected(self, text: str) -> str | None:
        """`text` with each part that matches nothing replaced by the child's name nearest to it."""
        words = parts(text)
        for i, word in enumerate(words):
            if self.named(".".join(words[: i + 1])):
                continue
            above = self.named(".".join(words[:i]))
            keys = dict.fromkeys(key for _, module in above for key, _ in children(module))
            if word.isdigit() and keys and all(key.isdigit() for key in keys):
                words[i] = "*"
            elif near := nearest(word, keys, n=1):
                words[i] = near[0]
            else:
                return None
        return ".".join(words)

    def similar(self, text: str) -> list[str]:
        """Names that end as `text` does, else the ones that look most like it."""
        names = [name for name in self.names.values() if name]
        return [n for n in names if n.endswith(f".{text}")] or nearest(text, names)
