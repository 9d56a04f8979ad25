"""`select`: which modules of a model; used by every function that hooks, edits or swaps.

A selector is a name, a glob, a class, a predicate, a module, or a list or dict of these. Names are
tried first, by a look-up for each part; everything else walks the model once and matches the names.
A selector that matches nothing is an error with the names that are near, before anything is hooked.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import translate
from functools import cached_property, lru_cache
from typing import Any

from torch import Tensor, nn

from hookkit.checks import check_function, check_module, kind_of, shown
from hookkit.errors import ArgumentError, OptionError, SelectionError, nearest
from hookkit.modules import (
    calls_children,
    can_run,
    children,
    find,
    is_observer,
    join,
    unwrap,
    walk,
)
from hookkit.roles import patterns_of

Selector = (
    str
    | re.Pattern[str]
    | type
    | nn.Module
    | Callable[..., bool]
    | Mapping[Any, str]
    | Iterable[Any]
)
Pick = tuple[str, nn.Module, str]
"""A module's name in the model, the module, and the path into its output that is meant, or ""."""

__all__ = ["Selection", "Selector", "leaf_modules", "select", "unwrap"]

_LEAF = re.compile(r"""(.*?)((?:\[-?\d+\]|\['[^']*'\]|\["[^"]*"\])+)""", re.DOTALL)
_BRACES = re.compile(r"\{([^{}]*)\}")
_PARTS = re.compile(r"(?:\[[^\]]*\]|[^.\[]|\[)+")  # between dots, but for dots inside brackets


class Selection(dict[str, nn.Module]):
    """Selected modules by name, in the order of the selectors: a dict. What `select` returns.

    Two entries can share a module: when they pick different parts of its output, or when both of
    its names were selected.

    >>> s = select(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "1", "0")
    >>> s
    Selection(2 modules: '1', '0')
    >>> s["0"]
    Linear(in_features=2, out_features=3, bias=True)
    """

    def __init__(self, picks: Mapping[str, Pick]) -> None:
        super().__init__((name, module) for name, (_, module, _) in picks.items())
        self._paths = {name: (own, leaf) for name, (own, _, leaf) in picks.items()}

    def leaf(self, name: str) -> str:
        """The path into the module's output, such as `[0]` or `['logits']`; "" for all of it."""
        return self._paths[name][1]

    def path(self, name: str) -> str:
        """The entry's name in the model, leaf path included: differs from `name` if renamed."""
        return "".join(self._paths[name])

    def place(self, name: str) -> tuple[str, str]:
        """The module's name in the model, and the path into its output that is meant, or ""."""
        return self._paths[name]

    def __missing__(self, name: str) -> nn.Module:
        near = ", ".join(f'"{key}"' for key in nearest(str(name), self) or list(self)[:3])
        raise SelectionError(
            f'this selection has no entry "{name}". Nearest: {near or "there are none"}. '
            f"list(selection) has all {len(self)}."
        )

    def _ipython_key_completions_(self) -> list[str]:
        """What IPython and Jupyter offer after `selection["`: the names."""
        return list(self)

    def __reduce__(self) -> Any:
        return Selection, ({n: (own, self[n], leaf) for n, (own, leaf) in self._paths.items()},)

    def __repr__(self) -> str:
        names = [repr(name) for name in self]
        if len(names) > 6:
            names = [*names[:4], "…", names[-1]]
        few = "1 module" if len(self) == 1 else f"{len(self)} modules"
        return f"Selection({few}{': ' if names else ''}{', '.join(names)})"

    def __str__(self) -> str:
        """A line for each entry: name, class, and its name in the model if renamed."""
        width = max((len(name) for name in self), default=0)
        lines = [repr(self).split(":")[0].rstrip(")") + ")"]
        for name, module in self.items():
            where = "" if self.path(name) == name else f"  = {self.path(name)}"
            lines.append(f"{name or '(model)':<{width}}  {type(module).__name__}{where}")
        return "\n".join(lines)


def select(model: nn.Module, *what: Selector) -> Selection:
    """The modules of `model` that the selectors `what` match, by name, in their order.

    Each of `what` is one of

    - a dotted name: `"layer1.0.conv1"`; `""` is the model itself;
    - a glob, matched part by part: `*` (one part, or some letters of one), `**` (any number of
      parts, also none), `?`, `[0-3]`, `[!0]`, `{q,k}`: `"blocks.*.mlp"`, `"**.conv?"`;
    - a role that transformers have under other names in each family, where `hookkit.roles.ROLES`
      knows it: `"@resid"`, `"@attn.3"`, `"@mlp.*.act"`; names in the result are the model's own;
    - any of them with a path into a structured output: `"attn[0]"`, `"lstm[1][0]"`,
      `"head['logits']"`. A name that exists is always a name, and `"attn[0]"` means a part of the
      output when there is a module `attn`, else the glob for `attn0`;
    - a compiled regex: its `search` is tried on each name, so `^` and `$` are yours to write;
    - a class, by `isinstance`; a predicate `f(name, module)` or `f(module)`; a module of the model;
    - a list, or any iterable, of all these (a ModuleList is its entries, since it never runs);
    - a dict that renames, `{"layer2": "h"}`: a selector, and the name in the result.

    Without a selector it gives every module below the root that runs. Modules that PyTorch never
    calls (a ModuleList, attention's output projection) are given for their name, and by a glob,
    regex, class or predicate only if it matches nothing else.

    Names are those of the model inside compile, DDP, DataParallel and FSDP wrappers. Each given
    name has its entry, also two names of a shared module; globs, classes and the like give it once,
    under its first name, and modules of `torch.nn.utils.parametrize` only when spelt out.

    Args:
        model: a model, wrapped or not.
        *what: selectors.

    Returns:
        A `Selection`: a dict of name → module, which hooks, edits and recorders take.

    Raises:
        SelectionError: nothing matches; the message has the nearest names.
        ArgumentError: something in `what` is none of the above.
        OptionError: two entries have the same name, or a dict gives one name to several modules.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> list(select(net, nn.Linear))
    ['0', '2']
    >>> list(select(net, {"0": "first"}, "[1-2]"))
    ['first', '1', '2']
    """
    check_module("select", model, "The model comes first: select(model, what).")
    resolver = _Resolver(unwrap(model))
    picks: dict[str, Pick] = {}
    taken: set[tuple[int, str]] = set()
    for key, pick in resolver.of(what) if what else resolver.everything():
        own, module, leaf = pick
        if key is None and (id(module), leaf) in taken:  # a second name of a shared module
            continue
        taken.add((id(module), leaf))
        name = own + leaf if key is None else key
        other = picks.setdefault(name, pick)
        if other[1] is not module or other[2] != leaf:
            raise OptionError(
                f'select: two modules have the name "{name}", "{other[0]}" and "{own}". Give one '
                "of them another name."
            )
    return Selection(picks)


def leaf_modules(model: nn.Module) -> Selection:
    """The modules that run and have none inside that does, in the model's order.

    Shared ones are given once. Left out are parametrizations, containers that are never called,
    what is inside `nn.MultiheadAttention`, which calls no module, and observers of quantization: a
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
    root = unwrap(check_module("leaf_modules", model, "Write leaf_modules(model)."))
    places = [(n, m, first) for n, m, first in walk(root, calls_children) if can_run(m)]
    places = [place for place in places if place[1] is root or not is_observer(place[1])]
    parts = [name.split(".") if name else [] for name, _, _ in places]
    around = {".".join(keys[:i]) for keys in parts for i in range(len(keys))}
    return Selection({n: (n, m, "") for n, m, first in places if first and n not in around})


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


@lru_cache(256)
def glob(pattern: str) -> re.Pattern[str]:
    """A glob without braces as one regex, for a whole name that is followed by a dot.

    >>> bool(glob("blocks.**.q").fullmatch("blocks.0.attn.q."))
    True
    """
    words = []
    for word in _PARTS.findall(pattern):
        one = translate(word).removeprefix("(?s:").removesuffix(r")\Z").removesuffix(r")\z")
        words.append(r"(?:[^.]+\.)*" if word == "**" else f"{one.replace('.*', '[^.]*')}\\.")
    return re.compile("".join(words))


def _places(root: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """Every name of every module, as `walk` gives them, and also the names in shared modules."""
    found, seen = list[tuple[str, nn.Module, bool]](), set[int]()
    stack = [("", root, frozenset[int]())]
    while stack:
        name, module, above = stack.pop()
        found.append((name, module, id(module) not in seen))
        seen.add(id(module))
        if id(module) not in above:  # a module that holds itself
            here = above | {id(module)}
            stack += [(join(name, key), child, here) for key, child in children(module)][::-1]
    return found


class _Resolver:
    """Finds the modules of one model: `of` gives `(new name or None, pick)` for a selector."""

    def __init__(self, root: nn.Module) -> None:
        self.root = root

    @cached_property
    def places(self) -> list[tuple[str, nn.Module, bool]]:
        """Every name of every module; the model is walked at most once."""
        return _places(self.root)

    @cached_property
    def names(self) -> dict[int, str]:
        """The first name of each module, by the module's id."""
        return {id(m): name for name, m, first in self.places if first}

    def everything(self) -> Iterator[tuple[str | None, Pick]]:
        """Each module that runs, without the root unless there is no other."""
        below = [(n, m, "") for n, m, first in self.places if first and n]
        return ((None, pick) for pick in _running(below) or [("", self.root, "")])

    def of(self, what: Any) -> Iterator[tuple[str | None, Pick]]:
        """What one selector matches."""
        if isinstance(what, Selection):
            for key, module in what.items():
                yield key, (*self.by_module(module)[:2], what.leaf(key))
        elif isinstance(what, Mapping):
            yield from (self.renamed(key, new) for key, new in what.items())
        elif isinstance(what, str):
            yield from self.by_text(what)
        elif isinstance(what, nn.Module) and not isinstance(what, nn.ModuleList):
            yield None, self.by_module(what)
        elif isinstance(what, re.Pattern):
            hits = [(n, m) for n, m, _ in self.places if n and what.search(n)]
            yield from self.hits(hits, f'no name has a match of the regex "{what.pattern}"')
        elif isinstance(what, type):
            yield from self.by_type(what)
        elif isinstance(what, Iterable) and not isinstance(what, bytes | Tensor):
            for each in what:
                yield from self.of(each)
        elif callable(what):
            yield from self.by_predicate(what)
        else:
            raise ArgumentError(
                f"select: {shown(what)} selects nothing. Give a name, a glob, a compiled regex, a "
                "class, a predicate of (name, module) or of the module, a module, or a list or "
                "dict of these."
            )

    def hits(self, found: list[tuple[str, nn.Module]], why: str) -> list[tuple[None, Pick]]:
        """What was found, those that run if any does; or the error, which begins with `why`."""
        if not found:
            raise SelectionError(f"{why}. {self.listing()}")
        return [(None, pick) for pick in _running([(n, m, "") for n, m in found])]

    def by_type(self, kind: type) -> list[tuple[None, Pick]]:
        """The modules of a class, each once, the root included."""
        found = [(n, m) for n, m, first in self.places if first and isinstance(m, kind)]
        kinds = Counter(type(m).__name__ for _, m, first in self.places if first)
        some = ", ".join(f"{k} ({n})" for k, n in kinds.most_common(6))
        return self.hits(found, f"no module is a {kind.__name__}. There are {some}")

    def by_predicate(self, wanted: Callable[..., bool]) -> list[tuple[None, Pick]]:
        """The modules for which `wanted(name, module)` or `wanted(module)` is true, each once."""
        test = check_function("select", wanted, "name", "module", name="predicate")
        try:
            found = [(n, m) for n, m, first in self.places if first and test(n, m)]
        except Exception as e:
            e.add_note("hookkit: raised in a predicate of select, called with (name, module)")
            raise
        name = getattr(wanted, "__name__", repr(wanted))
        return self.hits(found, f"the predicate {name} is true for no module")

    def by_module(self, module: nn.Module) -> Pick:
        """A module of the model under its first name, a wrapper as what it wraps."""
        inner = unwrap(module)
        name = self.names.get(id(inner))
        if name is None:  # a parametrization has a name too
            places = self.root.named_modules()
            name = next((n for n, m in places if m is module or m is inner), None)
        if name is None:
            raise SelectionError(
                f"the {type(inner).__name__} given is no module of this "
                f"{type(self.root).__name__}. A copied, pickled or converted model has modules of "
                "its own: select by name."
            )
        return name, inner, ""

    def renamed(self, key: Any, new: Any) -> tuple[str, Pick]:
        """A dict's entry: the one module that `key` matches, under the name `new`."""
        if not isinstance(new, str):
            raise ArgumentError(
                f"select: a dict renames, {{selector: new name}}, and the new name of {key!r} is "
                f'{kind_of(new)}. Give text, as in {{"layer2": "h"}}.'
            )
        picks = [pick for _, pick in self.of(key)]
        if len(picks) != 1:
            raise OptionError(
                f'select: a dict gives the name "{new}" to one module, and {key!r} matches '
                f"{len(picks)}. Select one, or keep the names: select(model, {key!r})."
            )
        return new, picks[0]

    def by_text(self, text: str) -> list[tuple[str | None, Pick]]:
        """A name or a glob, with a path into the output at its end if it has one."""
        if (found := find(self.root, text)) is not None:
            return [(found[0], (*found, ""))]
        path = _LEAF.fullmatch(text)
        if path is not None and path[1][-1:] != "." and (picks := self.matched(path[1])):
            if not any(can_run(m) for _, (_, m, _) in picks):
                raise SelectionError(
                    f'no module matches "{text}": "{path[1]}" is never called, and has no output. '
                    f'Its entries are modules: "{path[1]}.{path[2].strip("[]")}".'
                )
            leaf = path[2].replace('"', "'")
            return [(key if key is None else key + leaf, (n, m, leaf)) for key, (n, m, _) in picks]
        if not (picks := self.matched(text)):
            raise SelectionError(self.unknown(text))
        return picks

    def matched(self, text: str) -> list[tuple[str | None, Pick]]:
        """What a name without path, or names in braces, or a glob matches; those that run."""
        if (found := find(self.root, text)) is not None:
            return [(found[0], (*found, ""))]
        if text.startswith("@"):
            return next(filter(None, map(self.matched, patterns_of(text))), [])
        if not any(c in text for c in "*?[{"):
            return []
        hits = []
        for pattern in expand(text):
            test, places = glob(pattern).fullmatch, self.places
            if "parametrizations" in pattern:
                places = [(n, m, True) for n, m in self.root.named_modules()]
            hits += [(n, m, "") for n, m, _ in places if n and test(f"{n}.")]
        literal = not any(c in _BRACES.sub("", text) for c in "*?[")  # each name in the braces
        return [((pick[0] if literal else None), pick) for pick in _running(hits)]

    def unknown(self, text: str) -> str:
        """The message for a name or glob that matches nothing, with what is near it."""
        if text.startswith("@"):
            return (
                f'no module matches "{text}": no name here is like those in hookkit.roles.ROLES. '
                f"Add the family's there, or select by name. {self.listing()}"
            )
        owner, _, last = text.rpartition(".")
        found = find(self.root, owner)
        if found is not None and last in _tensors(found[1]):
            return (
                f'no module matches "{text}": it is a tensor of the {type(found[1]).__name__} '
                f'"{owner}", and hooks go on modules. Use "{owner}", or select_params.'
            )
        names = list(self.names.values())[1:]
        near = [n for n in names if n.endswith(f".{text}")] or nearest(text, names)
        if not near:
            return f'no module matches "{text}". {self.listing()}'
        few = ", ".join(f'"{name}"' for name in names if name in near[:3])
        return (
            f'no module matches "{text}". Nearest: {few}. select(model) lists all '
            f"{len(list(self.everything()))} names."
        )

    def listing(self) -> str:
        """For a message: what names look like here."""
        some = ", ".join(f'"{name}"' for name in list(self.names.values())[1:4])
        if not some:
            return 'It has no modules inside it: select(model, "") is the model itself.'
        return f"Names are like {some}: select(model) lists all {len(list(self.everything()))}."


def _running(picks: list[Pick]) -> list[Pick]:
    """Those whose module can run; all if none can (a selector of containers only)."""
    return [pick for pick in picks if can_run(pick[1])] or picks


def _tensors(module: nn.Module) -> set[str]:
    """The names of the module's own parameters and buffers."""
    tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    return {name for name, _ in tensors}
