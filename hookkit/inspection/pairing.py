"""Pair the modules of two models: by name, by equal weights, or by order and size.

Equal weights are found by a signature, a sum over the bits of all values. A transposed, permuted or
reshaped matrix has the same signature, and the signature of a fused matrix is the sum of its
parts' signatures. Vectors are read only for layers without a matrix, since many are all ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import chain, combinations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hookkit._core.globs import compile_glob, expand
from hookkit._core.messages import no_such
from hookkit._core.pytree import Parts
from hookkit.errors import OptionError
from hookkit.inspection.differences import dense
from hookkit.inspection.first_difference import Call
from hookkit.inspection.sides import WHO, Side, float_dtype, own_params

Signature = tuple[int, int]
_NOTHING: Signature = (0, 0)  # of no values, and of zeros
_WILDCARD = re.compile(r"\*+|\?|\[!?[^]]+\]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a name
_NEAR = 8  # layers of one module, among which some may be parts of a fused layer
Units = list[tuple[str, ...]]  # names of modules, several together if one weight fuses theirs
_KeyOf = Callable[["_Modules", str], Any]
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pair(NamedTuple):
    """Pairs modules of the first model with modules of the second that compute the same.

    Attributes:
        a: names in the first; several if their weights are one fused weight in the second.
        b: names in the second.
        how: "names=", "name", "weights", "order" or "around".
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    how: str


# -- names ----------------------------------------------------------------------------------------


class Names:
    """Translates module names of the first model into those of the second, as `names=` says."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._rules: list[tuple[list[str], list[str]]] = []
        for old, new in names.items():
            if not (isinstance(old, str) and isinstance(new, str)):
                raise OptionError(f"{WHO}: names={{{old!r}: {new!r}}} is no text. Give {{a: b}}.")
            olds, news = expand(old), expand(new)
            fused = len(olds) != len(news)
            wild = min(map(_n_wildcards, olds)) < max(map(_n_wildcards, news))
            if wild or (fused and 1 not in (len(olds), len(news))):
                raise OptionError(
                    f"{WHO}: names={{{old!r}: {new!r}}} cannot be read: a wildcard in the second "
                    "stands for what the one in its place in the first matches. Give as many names "
                    "in both braces, or one name for a module with fused weights."
                )
            parts = zip(([o] for o in olds), ([n] for n in news), strict=False)
            self._rules += [(olds, news)] if fused else parts
        self._rules.sort(key=lambda rule: _n_wildcards(rule[0][0]))

    def pair(self, name: str) -> Pair:
        """Return the pair of the module `name`; if no rule fits, `name` stands for both models.

        A rule also applies to the modules inside the one that it names. If several rules fit, the
        rule for the longest part of `name` wins, then the rule with the fewest wildcards.

        >>> names = Names({"h.*.{q,k}": "layer.*.{query,key}", "h.*.kv": "layer.*.{k,v}"})
        >>> names.pair("h.3.q.bias").b, names.pair("h.0.kv").b, names.pair("head").b
        (('layer.3.query.bias',), ('layer.0.k', 'layer.0.v'), ('head',))
        """
        keys = name.split(".") if name else []
        for n in range(len(keys), -1, -1):
            start, rest = ".".join(keys[:n]), keys[n:]
            for olds, news in self._rules:
                found = next(filter(None, (compile_glob(o).fullmatch(start) for o in olds)), None)
                # a rule for fused weights does not apply to the modules inside
                if found and not (rest and len(olds) + len(news) > 2):
                    a, b = (tuple(_filled(p, found, rest) for p in part) for part in (olds, news))
                    return Pair(a, b, "names=")
        return Pair((name,), (name,), "name")

    def check(self, first: Collection[str], second: Collection[str]) -> None:
        """Raise if a rule matches no name in `first`, or its translation is not in `second`."""
        for olds, news in self._rules:
            found = [m for old in olds for m in map(compile_glob(old).fullmatch, first) if m]
            made = [_filled(new, match, []) for match in found for new in news]
            if not {*made} & {*second}:
                which, names = ("second", second) if made else ("first", first)
                name = (made or olds)[0]
                raise no_such(f'{WHO}: names= has "{name}", and the {which} has not', name, names)


def _n_wildcards(pattern: str) -> int:
    return len(_WILDCARD.findall(pattern))


def _filled(pattern: str, match: re.Match[str], rest: list[str]) -> str:
    """Return `pattern` with the groups of `match` for its wildcards, and `rest` appended."""
    texts = iter(match.groups())
    name = _WILDCARD.sub(lambda _: next(texts) or "", pattern)
    return ".".join(filter(None, [*name.split("."), *rest]))


def names_of(pairs: list[Pair]) -> dict[str, str]:
    """Return a dict for `names=` of the names that differ: first model → second model.

    If names differ in the same way for each layer number, they become one entry with `*`.

    >>> names_of([Pair((f"h.{i}.q",), (f"layer.{i}.query",), "weights") for i in range(3)])
    {'h.*.q': 'layer.*.query'}
    """
    globs, names = dict[str, set[str]](), dict[str, str]()
    for pair in pairs:
        a, b = braced(pair.a), braced(pair.b)
        alike = _NUMBER.findall(a) == _NUMBER.findall(b)
        globs.setdefault(_NUMBER.sub("*", a), set()).add(_NUMBER.sub("*", b) if alike else "")
    for as_glob in (True, False):
        for pair in sorted(pairs, key=lambda pair: pair.a[0].count(".")):
            a = braced(pair.a)
            both = globs[_NUMBER.sub("*", a)]
            if Names(names).pair(pair.a[0])[:2] == pair[:2]:
                continue
            if not as_glob:
                names[a] = braced(pair.b)
            elif len(both) == 1 and "" not in both:
                (names[_NUMBER.sub("*", a)],) = both
    return names


def braced(names: tuple[str, ...]) -> str:
    """Return `names` as one text with braces, which `expand` takes apart again.

    >>> braced(("attn.q", "attn.k")), braced(("fc",))
    ('attn.{q,k}', 'fc')
    """
    if len(names) == 1:
        return names[0]
    heads = {name.rpartition(".")[0] for name in names}
    head = heads.pop() + "." if len(heads) == 1 and "" not in heads else ""
    return head + "{" + ",".join(name.removeprefix(head) for name in names) + "}"


# -- pairs ----------------------------------------------------------------------------------------


def pair_modules(first: Side, second: Side, names: Names) -> list[Pair]:
    """Pair the modules that ran on both sides, or that both files list; return the pairs.

    `names` comes first. If every other layer with parameters then has a namesake, equal names
    decide. If not, a name may mean another layer, so equal weights come before names. Then follow
    layers of the same size in the same place, in the order of execution, and modules around pairs.

    Copies of a block have equal weights. If one side has fewer of them, as one was loaded wrongly,
    the pair around them, the pair before them and their place decide which belong together.
    """
    # weights of two precisions are compared in the lower one
    kinds = {float_dtype(s.modules[""]) for s in (first, second) if "" in s.modules} - {None}
    low = min(kinds, key=lambda d: d.itemsize) if len(kinds) > 1 else None  # type: ignore[union-attr]
    a, b = _Modules(first, low), _Modules(second, low)

    def put(xs: tuple[str, ...], ys: tuple[str, ...], how: str) -> None:
        pair = Pair(xs, ys, how)
        a.pairs |= dict.fromkeys(xs, pair)
        b.pairs |= dict.fromkeys(ys, pair)

    def match(
        how: str,
        key: _KeyOf,
        xs: Units | None = None,
        ys: Units | None = None,
        as_many: bool = True,
    ) -> None:
        """Pair those of equal key in the order of their first call, if there are `as_many`.

        `xs` and `ys` are names, several for a fused layer; by default each unpaired module.
        """
        mine, theirs = a.groups(key, xs), b.groups(key, ys)
        for k, found in mine.items():
            others = theirs.get(k, [])
            if len(found) == len(others) or not as_many:
                for x, y in zip(found, others, strict=False):
                    put(x, y, how)

    for pair in (pair for name in a.ran if (pair := names.pair(name)).how == "names="):
        if {*pair.a} <= {*a.unpaired()} and {*pair.b} <= {*b.unpaired()}:
            put(*pair)
    with_params = {n for side in (a, b) for n in side.unpaired() if side.params.get(n)}
    if first.saved or second.saved or with_params <= {*a.unpaired()} & {*b.unpaired()}:
        match("name", lambda _, n: (n,))
        return list(dict.fromkeys(a.pairs.values()))
    if "" not in {**a.pairs, **b.pairs}:
        put(("",), ("",), "name")
    match("weights", lambda m, n: m.weights(n, m.rank(n)))
    match("weights", lambda m, n: m.weights(n))
    fused = [*_fused(a, b), *((xs, ys) for ys, xs in _fused(b, a))]
    ties: list[_KeyOf] = [
        lambda m, n: (True,),
        lambda m, n: (m.pair_around(n),),
        lambda m, n: (m.pair_around(n), m.pair_before(n)),
        lambda m, n: m.place(n),
    ]
    for tie in ties:

        def equal(m: _Modules, n: str, tie: _KeyOf = tie) -> Any:
            return m.weights(n, m.rank(n), tie(m, n))

        match("weights", equal)
        for xs, ys in fused:
            match("weights", tie, xs, ys)
    match("name", lambda m, n: (n, m.side.types[n]))
    match("name", lambda m, n: m.sizes(n) and (n, m.sizes(n)))
    for _ in range(2):
        match("order", lambda m, n: m.sizes(n) and (m.sizes(n), m.pair_around(n)))
        match("order", lambda m, n: m.sizes(n) and (m.sizes(n), m.pair_around(n), m.pair_before(n)))
        match("around", lambda m, n: m.pairs_inside(n))
        match("order", lambda m, n: m.size_in_pair(n))
        # nothing tells apart the rest of equal weights: one side has fewer copies, from the first
        match("weights", lambda m, n: m.weights(n), as_many=False)
        for xs, ys in fused:
            match("weights", lambda m, n: True, xs, ys, as_many=False)
    return list(dict.fromkeys(a.pairs.values()))


class _Modules:
    """Holds what pairing asks about the modules of one side that ran.

    Attributes:
        ran: the names of the modules, in the order of their first call.
        around: name → the modules in whose forward it ran, the innermost first.
        holders: the modules in whose forward another one ran; the others are layers.
        params: name → its own parameters, without those of other modules that ran.
        pairs: name → its pair, for modules that have one.
    """

    def __init__(self, side: Side, dtype: torch.dtype | None) -> None:
        self.side, self.ran, self.pairs = side, side.ran(), dict[str, Pair]()
        self.around = {n: [c.name for c in side.tree.around(Call(n))] for n in self.ran}
        self.holders = {*chain(*self.around.values())}
        # of the first call that returned; a call that raised may come before it
        returned = reversed([k for k in side.values if k.what == "output"])
        self._outputs = {key.call.name: side.values[key] for key in returned}
        self._modules = {n: side.modules[n] for n in self.ran if n in side.modules}
        ids = {id(m) for m in self._modules.values()}
        self.params = {n: [p for _, p in own_params(m, ids)] for n, m in self._modules.items()}
        self._dtype, self._signatures = dtype, dict[int | str, Signature]()
        self._kinds = dict[str, tuple[int, int, bool]]()

    def unpaired(self) -> list[str]:
        """Return the names of the modules that are in no pair."""
        return [n for n in self.ran if n not in self.pairs]

    def groups(self, key: _KeyOf, units: Units | None = None) -> dict[Any, Units]:
        """Return the unpaired of `units`, or of all modules, grouped by `key` of the first name.

        Those whose key is false are left out.
        """
        made = dict[Any, Units]()
        for unit in [(n,) for n in self.unpaired()] if units is None else units:
            if self.pairs.keys().isdisjoint(unit) and (k := key(self, unit[0])):
                made.setdefault(k, []).append(unit)
        return made

    def signature(self, n: str) -> Signature:
        """Return the signature of a module's matrices; if it has none, of its own vectors."""
        if n not in self._signatures:
            chosen = {id(p): p for p in self._modules[n].parameters() if p.ndim > 1}
            if not chosen:
                # vectors of one repeated value, such as initial biases, identify no layer
                own = (p for p in self.params[n] if p.numel() > 1)
                chosen = {id(p): p for p in own if bool((p != p.reshape(-1)[0]).any())}
            for key, p in chosen.items():
                if key not in self._signatures:
                    (self._signatures[key],) = signatures(p.reshape(1, -1), self._dtype)
            self._signatures[n] = _sum(self._signatures[key] for key in chosen)
        return self._signatures[n]

    def rank(self, n: str) -> int:
        """Return how many modules inside a module have the same weights; 0 for the innermost."""
        same = (m for m in self.ran if n in self.around[m])
        return sum(self.signature(m) == self.signature(n) for m in same)

    def weights(self, n: str, *more: Any) -> tuple[Any, ...]:
        """Return a key of a module's weights and the size of its output; () without weights."""
        signature = self.signature(n)
        return () if signature == _NOTHING else (signature, self.n_outputs(n), *more)

    def n_outputs(self, n: str) -> int:
        """Return the number of elements in the first tensor that a module returned."""
        return next((t.numel() for _, t in self._outputs[n] if isinstance(t, Tensor)), 0)

    def sizes(self, n: str) -> tuple[int, ...]:
        """Return the sizes of a layer's matrices (or vectors if it has none) that are not zero."""
        own = () if n in self.holders else self.params[n]
        matrices = [p for p in own if p.ndim > 1]
        return tuple(sorted(p.numel() for p in matrices or own if bool(p.any())))

    def size_in_pair(self, n: str) -> tuple[Any, ...]:
        """Return the number of parameters in a module and the pair around it; () if none is."""
        size = sum(p.numel() for p in self._modules[n].parameters())
        around = self.around[n][:1]
        return (size, self.pair_around(n)) if size and around and around[0] in self.pairs else ()

    def pair_around(self, n: str) -> Pair | None:
        """Return the innermost pair around a module."""
        return next((self.pairs[m] for m in self.around[n] if m in self.pairs), None)

    def pair_before(self, n: str) -> Pair | None:
        """Return the last pair that was called before a module."""
        earlier = self.ran[: self.ran.index(n)]
        return next((self.pairs[m] for m in reversed(earlier) if m in self.pairs), None)

    def place(self, n: str) -> tuple[int, int]:
        """Return the number of a module among the unpaired ones of its size, and how many are."""
        unpaired = self.unpaired()
        for m in unpaired:
            if m not in self._kinds:
                size = sum(p.numel() for p in self._modules[m].parameters())
                self._kinds[m] = size, self.n_outputs(m), m in self.holders
        alike = [m for m in unpaired if self._kinds[m] == self._kinds[n]]
        return alike.index(n), len(alike)

    def pairs_inside(self, n: str) -> frozenset[Pair]:
        """Return the pairs of the layers inside a module."""
        layers = ((m, pair) for m, pair in self.pairs.items() if m not in self.holders)
        return frozenset(pair for m, pair in layers if n in self.around[m])


def _fused(one: _Modules, other: _Modules) -> list[tuple[Units, Units]]:
    """Return layers of `one` that have equal weights, with the layers of `other` that they fuse."""
    layers = one.groups(lambda m, n: n not in m.holders and m.weights(n))
    parts = other.groups(lambda m, n: m.weights(n) and n not in m.holders and (*m.around[n][:1],))
    found = dict[Any, Units]()
    for units in parts.values():
        for names in _nearby([n for (n,) in units]):
            weights = (_sum(map(other.signature, names)), sum(map(other.n_outputs, names)))
            if weights in layers:
                known = found.setdefault(weights, [])
                if {*names}.isdisjoint(chain(*known)):
                    known.append(names)
    return [(layers[weights], tuples) for weights, tuples in found.items()]


def _nearby(names: list[str]) -> Iterator[tuple[str, ...]]:
    """Yield two to four of `names` that are close together, as parts of one layer are called.

    All combinations of the layers of a long `nn.Sequential` would take hours.
    """
    for i, name in enumerate(names):
        for n_more in (1, 2, 3):
            for more in combinations(names[i + 1 : i + _NEAR], n_more):
                yield name, *more


# -- weights --------------------------------------------------------------------------------------


def main_pair(xs: Parts, ys: Parts) -> tuple[tuple[str, Tensor], tuple[str, Tensor]] | None:
    """Return the first tensors of `xs` and `ys` with equal sizes: floats, or integers without any.

    Two modules whose inputs or outputs have different structures are compared by these tensors.
    """
    for floats in (True, False):
        mine, theirs = (
            [(p, t) for p, t in parts if isinstance(t, Tensor) and not t.is_nested
             and (t.is_floating_point() or t.is_complex()) == floats] for parts in (xs, ys)
        )  # fmt: skip
        if mine and theirs:
            both = product(mine, theirs)
            return next(((x, y) for x, y in both if x[1].numel() == y[1].numel()), None)
    return None


def signatures(rows: Tensor, dtype: torch.dtype | None) -> list[Signature]:
    """Return a signature of each row, two sums that do not depend on the order of its values."""
    rows = dense(rows)
    rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    if rows.is_floating_point():
        rows = rows.float() if rows.element_size() == 1 else rows.to(dtype or rows.dtype)
        rows = (rows + 0.0).contiguous()  # -0.0 is 0.0
        rows = rows.view(_BITS[rows.element_size()])
    bits = rows.to(torch.int64 if rows.element_size() == 8 else torch.int32)
    mixed = bits * bits + (bits >> 7) * bits  # tells apart rows whose plain sums are equal
    sums = (t.sum(1, dtype=torch.int64).tolist() for t in (bits, mixed))
    return [*zip(*sums, strict=True)]


def _sum(parts: Iterable[Signature]) -> Signature:
    every = [*parts]
    one, two = (sum(column) % 2**64 for column in ([p[i] for p in every] for i in (0, 1)))
    return one, two


def feature_orders(first: Side, second: Side, pair: Pair) -> list[Tensor]:
    """Return permutations of features that may turn the outputs of `pair.a` into those of `pair.b`.

    A port may reorder the rows or columns of a matrix, as for rotary embeddings. Equal rows are
    found by their signatures. Element i is the second model's index of the first model's feature i.
    """
    orders = []
    for x, y in product(_rows(first, pair.a), _rows(second, pair.b)):
        if len(x) == len(y):
            low = min(x.dtype, y.dtype, key=lambda d: d.itemsize)
            places = {s: i for i, s in enumerate(signatures(y, low))}
            found = [places.get(s, -1) for s in signatures(x, low)]
            if found != sorted(found) == [*range(len(x))]:
                orders.append(torch.tensor(found, device="cpu"))
    return orders


def _rows(side: Side, names: tuple[str, ...]) -> Iterator[Tensor]:
    """Yield the weights of `names` as a matrix of their rows, then as a matrix of their columns."""
    for axis in (0, 1):
        parts = []
        for name in names:
            own = [p for p in side.modules[name].parameters(recurse=False) if p.numel() > 1]
            weights = [p.detach() for p in own if p.ndim > 1] or [p.detach() for p in own][:1]
            if len(weights) == 1 and weights[0].ndim > axis:
                parts.append(weights[0].movedim(axis, 0).reshape(weights[0].shape[axis], -1))
        if len(parts) == len(names) and len({p.shape[1] for p in parts}) == 1:
            yield torch.cat(parts)
