"""`select`: which modules of a model; used by every function that hooks, edits or swaps.

`select(model, *what)` takes names, patterns, types, predicates, modules, lists and dicts, and gives
an ordered mapping from name to module. An unknown name is an error with the names that are near,
before anything is attached. Builds on `resolving`, which finds the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import ref

from torch import nn

from hookkit.checks import check_module
from hookkit.errors import OptionError, SelectionError, nearest
from hookkit.modules import all_names, calls_children, is_leaf, is_observer, unwrap, walk
from hookkit.selecting.patterns import Pick
from hookkit.selecting.resolving import Resolver, Selector


class Selection(Mapping[str, nn.Module]):
    """Selected modules by name, in the order of the selectors. What `select` returns.

    It holds the modules strongly and the model weakly. Two entries can share a module: when they
    pick different leaves of its output, or when both of its names were selected.

    >>> s = select(nn.Sequential(nn.Linear(2, 3), nn.ReLU()), "1", "0")
    >>> s
    Selection(2 modules: '1', '0')
    >>> s["0"]
    Linear(in_features=2, out_features=3, bias=True)
    """

    def __init__(self, model: nn.Module, picks: Mapping[str, Pick]):
        self._model, self.picks = ref(model), dict(picks)

    def __reduce__(self) -> Any:
        return _selected, (self._model(), self.picks)

    def __getitem__(self, name: str) -> nn.Module:
        return self._pick(name).module

    def _pick(self, name: str) -> Pick:
        if name in self.picks:
            return self.picks[name]
        other = next((key for key in self if name in self.aliases(key)), None)
        near = nearest(str(name), self) or list(self)[:3]
        shown = ", ".join(f'"{key}"' for key in near) or "there are none"
        hint = f"Nearest: {shown}." if other is None else f'Its module is here as "{other}".'
        raise SelectionError(
            f'this selection has no entry "{name}". {hint} list(selection) has all {len(self)}.'
        )

    def __contains__(self, name: object) -> bool:
        return name in self.picks

    def _ipython_key_completions_(self) -> list[str]:
        """What IPython and Jupyter offer after `selection["`: the names."""
        return list(self)

    def __iter__(self) -> Iterator[str]:
        return iter(self.picks)

    def __len__(self) -> int:
        return len(self.picks)

    def leaf(self, name: str) -> str:
        """The path into the module's output, such as `[0]` or `.last_hidden_state`; "" for all."""
        return self._pick(name).leaf

    def path(self, name: str) -> str:
        """The entry's name in the model, leaf path included: differs from `name` if renamed."""
        return self._pick(name).name + self._pick(name).leaf

    def aliases(self, name: str) -> tuple[str, ...]:
        """Every name of the entry's module in the model (at most 64), the selected one first.

        Cost: one walk through the model per call.
        """
        pick, model = self._pick(name), self._model()
        names = all_names(model, pick.module) if model is not None else []
        return tuple(dict.fromkeys([pick.name, *names]))

    def __repr__(self) -> str:
        shown = [repr(name) for name in self]
        if len(shown) > 6:
            shown = [*shown[:4], "…", shown[-1]]
        few = "1 module" if len(self) == 1 else f"{len(self)} modules"
        return f"Selection({few}{': ' if shown else ''}{', '.join(shown)})"

    def __str__(self) -> str:
        """A line for each entry: name, class, and its name in the model if renamed."""
        width = max((len(name) for name in self), default=0)
        lines = []
        for name, pick in self.picks.items():
            where = "" if self.path(name) == name else f"  = {self.path(name)}"
            lines.append(f"{name or '(model)':<{width}}  {type(pick.module).__name__}{where}")
        return "\n".join([repr(self).split(":")[0].rstrip(")") + ")", *lines])


def _selected(model: nn.Module | None, picks: Mapping[str, Pick]) -> Selection:
    """A selection from a pickle or a copy; without a model if there was none any more."""
    return Selection(nn.Module() if model is None else model, picks)


def select(model: nn.Module, *what: Selector) -> Selection:
    """The modules of `model` that the selectors `what` match, by name, in their order.

    Each of `what` is one of

    - a dotted name: `"layer1.0.conv1"`; `""` is the model itself;
    - a glob, matched part by part: `*` (one part, or some letters of one), `**` (any number of
      parts, also none), `?`, `[0-3]`, `[!0]`, `{q,k}`: `"blocks.*.mlp"`, `"**.conv?"`;
    - either of them with a path into a structured output: `"attn[0]"`, `"lstm[1][0]"`,
      `"encoder.last_hidden_state"`, `"head['logits']"`. A name that exists is always a name, and
      `"attn[0]"` means a leaf when there is a module `attn`, else the glob for `attn0`;
    - a compiled regex: its `search` is tried on each name, so `^` and `$` are yours to write;
    - a class, by `isinstance`; a predicate `f(name, module)` or `f(module)`; a module of the model;
    - a list, or any iterable, of all these (a ModuleList is its entries, since it never runs);
    - a dict that renames, `{"layer2": "h"}`: a selector, and the name in the result.

    Without a selector it gives every module below the root that runs. Modules that PyTorch never
    calls (a ModuleList, attention's output projection) are given for their name, and by a glob,
    regex, class or predicate only if it matches nothing else.

    Names are canonical: those of the model inside compile, DDP, DataParallel and FSDP wrappers.
    Each given name has its entry, also two names of a shared module; globs, classes and the like
    give it once, under its first name (`Selection.aliases` has them all), and modules of
    `torch.nn.utils.parametrize` only when spelt out. Names cost one look-up per part, globs a walk
    through the part of the model that they can reach, the others one walk through the model.

    Args:
        model: a model, wrapped or not.
        *what: selectors.

    Returns:
        A `Selection`: name → module, a Mapping, which hooks, edits and recorders take.

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
    resolver = Resolver(unwrap(model))
    picks: dict[str, Pick] = {}
    taken: set[tuple[int, str]] = set()
    for renamed, pick in resolver.of(what) if what else resolver.everything():
        if renamed is None and (id(pick.module), pick.leaf) in taken:
            continue
        taken.add((id(pick.module), pick.leaf))
        key = pick.name + pick.leaf if renamed is None else renamed
        if key in picks and (picks[key].module, picks[key].leaf) == (pick.module, pick.leaf):
            continue
        if key in picks:
            raise OptionError(
                f'select: two modules have the name "{key}", "{picks[key].name}" and '
                f'"{pick.name}". Give one of them another name.'
            )
        picks[key] = pick
    return Selection(resolver.root, picks)


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
    check_module("leaf_modules", model, "Write leaf_modules(model).")
    root = unwrap(model)
    places = [(n, m) for n, m, first in walk(root, into=calls_children) if first and is_leaf(m)]
    return Selection(root, {n: Pick(n, m) for n, m in places if m is root or not is_observer(m)})
