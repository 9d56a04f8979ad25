"""Which modules of two models belong together: by name, by equal weights, or by order and size.

Modules with the same weights are a pair. The signature of a weight is a sum over its values, so it
is the same for a transposed, permuted or reshaped matrix, and that of a fused matrix is the sum of
its parts'. Vectors say less (many are all ones), so only layers without a matrix go by them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
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
from hookkit.inspection.sides import WHO, Key, Side, float_dtype, own_params

Signature = tuple[int, int]
_NOTHING: Signature = (0, 0)  # of no values, and of zeros
_WILDCARD = re.compile(r"\*+|\?|\[!?[^]]+\]")
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a name
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Pair(NamedTuple):
    """Modules of the first model and of the second that compute the same.

    Attributes:
        a: names in the first; several if their weights are one fused weight in the second.
        b: names in the second.
        how: "names=", "name", "weights", "order" or "around".
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    how: str


class Names:
    """Reads `names=`: names or globs of the first model, and those that they are in the second."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._rules: list[tuple[list[str], list[str]]] = []
        for old, new in names.items():
            rule = f"{WHO}: names={{{old!r}: {new!r}}}"
            if not (isinstance(old, str) and isinstance(new, str)):
                raise OptionError(f"{rule} is no text. Give names or globs, {{in a: in b}}.")
            olds, news = expand(old), expand(new)
            if len(olds) == len(news):
                self._rules += [([o], [n]) for o, n in zip(olds, news, strict=True)]
            elif 1 in (len(olds), len(news)):
                self._rules.append((olds, news))
            else:
                raise OptionError(
                    f"{rule} has {len(olds)} names for {len(news)}. Give as many in both braces, "
                    "or one name for a module with fused weights."
                )
            if any(n_wildcards(n) > n_wildcards(o) for o in olds for n in news):
                raise OptionError(
                    f"{rule} has more wildcards in the second: each stands for what the one in its "
                    "place in the first matches."
                )
        self._rules.sort(key=lambda rule: n_wildcards(rule[0][0]))

    def pair(self, name: str) -> Pair:
        """Return the pair of the module `name`; itself in both if no rule fits.

        A rule stands for all modules below the one that it names. If several rules fit, the one
        that names the longest part of `name` counts, then the one with the fewest wildcards.

        >>> names = Names({"h.*.{q,k}": "layer.*.{query,key}", "h.*.kv": "layer.*.{k,v}"})
        >>> names.pair("h.3.q.bias").b, names.pair("h.0.kv").b, names.pair("head").b
        (('layer.3.query.bias',), ('layer.0.k', 'layer.0.v'), ('head',))
        """
        keys = name.split(".") if name else []
        for n in range(len(keys), -1, -1):
            start, rest = ".".join(keys[:n]), keys[n:]
            for olds, news in self._rules:
                found = next(filter(None, (compile_glob(o).fullmatch(start) for o in olds)), None)
                if found and not (rest and len(olds) + len(news) > 2):
                    texts = [text or "" for text in found.groups()]
                    a, b = (tuple(_filled(p, texts, rest) for p in part) for part in (olds, news))
                    return Pair(a, b, "names=")
        return Pair((name,), (name,), "name")

    def check(self, first: Collection[str], second: Collection[str]) -> None:
        """Raise if a rule names nothing in `first`, or stands for nothing in `second`."""
        for olds, news in self._rules:
            found = [m for old in olds for m in map(compile_glob(old).fullmatch, first) if m]
            if not found:
                raise no_such(f'{WHO}: names= has "{olds[0]}" in the first', olds[0], first)
            texts = [[text or "" for text in m.groups()] for m in found]
            made = [_filled(new, text, []) for text in texts for new in news]
            if not {*made} & {*second}:
                raise no_such(f'{WHO}: names= has "{made[0]}" in the second', made[0], second)


def n_wildcards(pattern: str) -> int:
    """Return the number of wildcards in a glob without braces."""
    return len(_WILDCARD.findall(pattern))


def _filled(pattern: str, texts: list[str], rest: list[str]) -> str:
    """Return the name that `pattern` stands for if its wildcards stand for `texts`."""
    left = iter(texts)
    name = _WILDCARD.sub(lambda _: next(left), pattern)
    return ".".join(filter(None, [*name.split("."), *rest]))


def names_of(pairs: list[Pair]) -> dict[str, str]:
    """Return the names of the first model and of the second where they differ, for `names=`.

    Names that differ by the same rule for each number are one entry.

    >>> names_of([Pair((f"h.{i}.q",), (f"layer.{i}.query",), "weights") for i in range(3)])
    {'h.*.q': 'layer.*.query'}
    """
    globs = dict[str, set[str]]()
    for pair in pairs:
        a, b = braced(pair.a), braced(pair.b)
        alike = _NUMBER.findall(a) == _NUMBER.findall(b)
        globs.setdefault(_NUMBER.sub("*", a), set()).add(_NUMBER.sub("*", b) if alike else "")
    names = dict[str, str]()
    for as_glob in (True, False):
        for pair in sorted(pairs, key=lambda pair: pair.a[0].count(".")):
            a, b = braced(pair.a), braced(pair.b)
            old = _NUMBER.sub("*", a)
            if Names(names).pair(pair.a[0])[:2] == pair[:2]:
                continue
            if not as_glob:
                names[a] = b
            elif len(globs[old]) == 1 and "" not in globs[old]:
                (names[old],) = globs[old]
    return names


def braced(names: tuple[str, ...]) -> str:
    """Return several names as one, as `expand` reads them.

    >>> braced(("attn.q", "attn.k")), braced(("fc",))
    ('attn.{q,k}', 'fc')
    """
    if len(names) == 1:
        return names[0]
    heads = {name.rpartition(".")[0] for name in names}
    if len(heads) > 1 or "" in heads:
        return "{" + ",".join(names) + "}"
    return heads.pop() + ".{" + ",".join(name.rpartition(".")[2] for name in names) + "}"


def pair_modules(first: Side, second: Side, names: Names) -> list[Pair]:
    """Return the pairs of the modules that ran, or that two files have.

    What `names` says comes first, then equal names, if all layers with parameters have their equal.
    Otherwise names may mean other things, and equal weights count before them; then layers of the
    same size in the same place, in the order of execution; then what is around pairs.
    """
    found = _Pairing(first, second)
    found.by_rules(names)
    if first.saved or second.saved or found.all_named():
        found.by_name(lambda x, y: True)
        return [*found.pairs.values()]
    if not ({""} & {*found.pairs, *found.taken}):
        found.put(("",), ("",), "name")
    found.by_weights()
    found.by_fused_weights()
    found.by_name(found.alike)
    for _ in range(2):
        found.by_order(layers_alone=True, after_same=False)
        found.by_order(layers_alone=True, after_same=True)
        found.by_what_is_around()
        found.by_order(layers_alone=False, after_same=False)
    return list(dict.fromkeys(found.pairs.values()))


class _Modules:
    """Knows the modules of one side that ran, in the order of their first call.

    Attributes:
        ran: their names.
        around: for each the names of the modules in whose forward it ran, the innermost first.
        holders: the modules in whose forward another one ran.
        params: for each its own parameters, without those of others that ran.
        total: for each the signature of all matrices in it, for a layer without any of its vectors.
    """

    def __init__(self, side: Side, dtype: torch.dtype | None) -> None:
        self.side, self.ran = side, side.ran()
        self.at = {name: i for i, name in enumerate(self.ran)}
        self.around = {n: [c.name for c in side.tree.around(Call(n))] for n in self.ran}
        self.holders = {*chain(*self.around.values())}
        modules = {n: side.modules[n] for n in self.ran if n in side.modules}
        ids = {id(m) for m in modules.values()}
        self.params = {n: [p for _, p in own_params(m, ids)] for n, m in modules.items()}
        self._signatures, self._dtype = dict[int, Signature](), dtype

    def signature(self, name: str) -> Signature:
        """Return the signature of all matrices in a module, of a layer without any its vectors."""
        module = self.side.modules[name]
        chosen = {id(p): p for p in module.parameters() if p.ndim > 1}
        if not chosen:
            own = (p for p in self.params[name] if p.numel() > 1)
            chosen = {id(p): p for p in own if bool((p != p.reshape(-1)[0]).any())}
        for key, p in chosen.items():
            if key not in self._signatures:
                (self._signatures[key],) = signatures(p.reshape(1, -1), self._dtype)
        return _sum(self._signatures[key] for key in chosen)

    def sizes(self, name: str) -> str:
        """Return the sizes of a module's own matrices, or those of its vectors if it has none."""
        own = [p for p in self.params[name] if p.ndim > 1]
        return str(sorted(p.numel() for p in own or self.params[name] if bool(p.any())))

    def output(self, name: str) -> Parts:
        return self.side.values[Key("output", Call(name))]


class _Pairing:
    """Finds the pairs of two sides, one rule after another; what is a pair is left alone."""

    def __init__(self, first: Side, second: Side) -> None:
        kinds = {float_dtype(s.modules[""]) for s in (first, second) if "" in s.modules} - {None}
        low = min(kinds, key=lambda d: d.itemsize) if len(kinds) > 1 else None  # type: ignore[union-attr]
        self.a, self.b = _Modules(first, low), _Modules(second, low)
        self.pairs, self.taken = dict[str, Pair](), dict[str, Pair]()

    def put(self, a: tuple[str, ...], b: tuple[str, ...], how: str) -> None:
        pair = Pair(a, b, how)
        self.pairs |= dict.fromkeys(a, pair)
        self.taken |= dict.fromkeys(b, pair)

    def left(self) -> tuple[list[str], list[str]]:
        """Return the names on both sides that are in no pair."""
        mine = [n for n in self.a.ran if n not in self.pairs]
        return mine, [n for n in self.b.ran if n not in self.taken]

    def by_rules(self, names: Names) -> None:
        for name in self.left()[0]:
            pair = names.pair(name)
            known = {*pair.a} <= {*self.a.ran} and {*pair.b} <= {*self.b.ran}
            if pair.how == "names=" and known and not self.taken.keys() & {*pair.b}:
                self.put(*pair)

    def all_named(self) -> bool:
        """Return whether each layer with parameters that is left has its equal by name."""
        mine, theirs = self.left()
        with_params = {n for n in mine if self.a.params[n]} | {
            n for n in theirs if self.b.params[n]
        }
        return with_params <= {*mine} & {*theirs}

    def by_name(self, fits: Any) -> None:
        mine, theirs = self.left()
        for name in mine:
            if name in theirs and fits(name, name):
                self.put((name,), (name,), "name")

    def alike(self, x: str, y: str) -> bool:
        """Return whether two modules with the same name may be the same layer."""
        leaf = x not in self.a.holders, y not in self.b.holders
        kinds = self.a.side.types[x], self.b.side.types[y]
        alike = self.a.sizes(x) == self.b.sizes(y) != "[]"
        return (all(leaf) and alike) or kinds[0] == kinds[1]

    def by_weights(self) -> None:
        groups = dict[Signature, tuple[list[str], list[str]]]()
        for i, names in enumerate(self.left()):
            for n in names:
                groups.setdefault((self.a, self.b)[i].signature(n), ([], []))[i].append(n)
        groups.pop(_NOTHING, None)
        for xs, ys in groups.values():
            mine, theirs = _nested(self.a, xs), _nested(self.b, ys)
            if len(mine) != len(theirs):  # tied weights that one of the two has in a function
                mine, theirs = self._by_output(mine, theirs)
            for p, q in zip(mine, theirs, strict=True):
                self._match(p, q)

    def _by_output(self, mine: list[Any], theirs: list[Any]) -> tuple[list[Any], list[Any]]:
        found = []
        for p in mine:
            if q := next((q for q in theirs if self.fits(p[-1], q[-1])), None):
                theirs.remove(q)
                found.append((p, q))
        return [p for p, _ in found], [q for _, q in found]

    def _match(self, p: list[str], q: list[str]) -> None:
        """Pair modules inside each other: the innermost, the outermost, then those between."""
        for x in dict.fromkeys((p[-1], *p)):
            ends = q[::-1] if x == p[-1] else q
            fit = [y for y in ends if self.fits(x, y)]
            leaf = x in self.a.holders
            if fit:
                y = next((y for y in fit if (y in self.b.holders) == leaf), fit[0])
                q.remove(y)
                self.put((x,), (y,), "weights")

    def fits(self, x: str, y: str) -> bool:
        """Return whether the two modules give tensors of the same size."""
        return main_pair(self.a.output(x), self.b.output(y)) is not None

    def by_fused_weights(self) -> None:
        def size(side: _Modules, n: str) -> int:
            return sum(t.numel() for _, t in side.output(n) if isinstance(t, Tensor))

        for one, other, swapped in ((self.a, self.b, False), (self.b, self.a, True)):
            fused, parts = self.left()[::-1] if swapped else self.left()
            fused = [n for n in fused if n not in one.holders]
            groups = dict[str, list[str]]()
            for n in parts:
                if n not in other.holders and other.signature(n) != _NOTHING:
                    groups.setdefault(other.around[n][0] if other.around[n] else "", []).append(n)
            tuples = [c for g in groups.values() for k in (2, 3, 4) for c in combinations(g, k)]
            sums = {_sum(map(other.signature, names)): names for names in tuples}
            for n in fused:
                if (names := sums.pop(one.signature(n), None)) and size(one, n) == sum(
                    size(other, m) for m in names
                ):
                    a, b = (names, (n,)) if swapped else ((n,), names)
                    self.put(a, b, "weights")

    def by_order(self, layers_alone: bool, after_same: bool) -> None:
        """Pair what has parameters of the same sizes inside the same pair, if both have as many.

        Args:
            layers_alone: only layers, by the sizes of their own parameters. Otherwise also modules
                around layers without a partner, by the size of all that is in them.
            after_same: those that come after the same pair are counted by themselves.
        """

        def groups(side: _Modules, names: list[str], pairs: dict[str, Pair]) -> dict[Any, Any]:
            made = dict[Any, list[str]]()
            for n in names:
                homes = [pairs[m] for m in side.around[n] if m in pairs]
                if layers_alone:
                    counts, sizes = n not in side.holders, side.sizes(n)
                else:
                    counts = bool(side.around[n]) and side.around[n][0] in pairs
                    sizes = str(sum(p.numel() for p in side.side.modules[n].parameters()))
                if counts and sizes not in ("[]", "0"):
                    before = [pairs[m] for m in side.ran[: side.at[n]] if m in pairs]
                    near = before[-1:] if after_same else []
                    made.setdefault((*homes[:1], sizes, *near), []).append(n)
            return made

        self._zip(groups, "order")

    def by_what_is_around(self) -> None:
        def groups(side: _Modules, names: list[str], pairs: dict[str, Pair]) -> dict[Any, Any]:
            inside = dict[str, set[Pair]]()
            for n, pair in pairs.items():
                for outer in side.around.get(n, ()) if n not in side.holders else ():
                    inside.setdefault(outer, set()).add(pair)
            made = dict[Any, list[str]]()
            for n in names:
                if n in inside:
                    made.setdefault(frozenset(inside[n]), []).append(n)
            return made

        self._zip(groups, "around")

    def _zip(self, groups: Any, how: str) -> None:
        """Pair the modules of the groups that have the same key and as many on both sides."""
        mine, theirs = self.left()
        there = groups(self.b, theirs, self.taken)
        for key, xs in groups(self.a, mine, self.pairs).items():
            if len(xs) == len(ys := there.get(key, [])):
                for x, y in zip(xs, ys, strict=True):
                    self.put((x,), (y,), how)


def _nested(layers: _Modules, names: list[str]) -> list[list[str]]:
    """Return `names` in lists of those inside each other, the outermost first."""
    chains = list[list[str]]()
    for n in names:
        home = next((c for c in chains if c[-1] in layers.around[n]), None)
        if home is None:
            chains.append([n])
        else:
            home.append(n)
    return sorted(chains, key=lambda c: layers.at[c[-1]])


def main_pair(xs: Parts, ys: Parts) -> tuple[tuple[str, Tensor], tuple[str, Tensor]] | None:
    """Return the first two tensors of the same size: of floating point, or of whole numbers.

    They are what is meant where two modules take or give other structures.
    """
    for floats in (True, False):
        mine, theirs = (
            [(p, t) for p, t in parts if isinstance(t, Tensor) and not t.is_nested
             and (t.is_floating_point() or t.is_complex()) == floats] for parts in (xs, ys)
        )  # fmt: skip
        for x, y in ((x, y) for x in mine for y in theirs):
            if x[1].numel() == y[1].numel():
                return x, y
        if mine and theirs:
            return None
    return None


def signatures(rows: Tensor, dtype: torch.dtype | None) -> list[Signature]:
    """Return for each row a number that is the same for the same values in any order."""
    rows = dense(rows)
    rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    if rows.is_floating_point():
        rows = rows.float() if rows.element_size() == 1 else rows.to(dtype or rows.dtype)
        rows = (rows + 0.0).contiguous()  # -0.0 is 0.0
        rows = rows.view(_BITS[rows.element_size()])
    bits = rows.to(torch.int64 if rows.element_size() == 8 else torch.int32)
    sums = (
        bits.sum(1, dtype=torch.int64),
        (bits * bits + (bits >> 7) * bits).sum(1, dtype=torch.int64),
    )
    return [*zip(*(s.tolist() for s in sums), strict=True)]


def _sum(parts: Any) -> Signature:
    one, two = 0, 0
    for x, y in parts:
        one, two = (one + x) % 2**64, (two + y) % 2**64
    return one, two


def feature_orders(first: Side, second: Side, pair: Pair) -> list[Tensor]:
    """Return the orders in which `pair.b` may have the features that `pair.a` take and give.

    They are read from the rows and columns of the weights: a port may have those of a matrix in
    another order, as for rotary embeddings. Each is the place in the second of each in the first.
    """
    orders = []
    for x, y in product(_rows(first, pair.a), _rows(second, pair.b)):
        if len(x) == len(y):
            low = min(x.dtype, y.dtype, key=lambda d: d.itemsize)
            places = {s: i for i, s in enumerate(signatures(y, low))}
            found = [places.get(s, -1) for s in signatures(x, low)]
            if found != sorted(found) == [*range(len(x))]:
                orders.append(torch.tensor(found))
    return orders


def _rows(side: Side, names: tuple[str, ...]) -> Iterator[Tensor]:
    """Yield the weights of `names` as matrices with a row for each feature that they give."""
    for axis in (0, 1):
        parts = []
        for name in names:
            own = [
                p for _, p in side.modules[name].named_parameters(recurse=False) if p.numel() > 1
            ]
            weights = [p.detach() for p in own if p.ndim > 1] or [p.detach() for p in own][:1]
            if len(weights) == 1 and weights[0].ndim > axis:
                parts.append(weights[0].movedim(axis, 0).reshape(weights[0].shape[axis], -1))
        if len(parts) == len(names) and len({p.shape[1] for p in parts}) == 1:
            yield torch.cat(parts)
