"""Change a model's inputs in ways that must not matter, with one function for each kind of change.

Builds on `axes`. There are two sorts of change. One replaces values and keeps all shapes, so not
one bit may differ. The other changes the layout (a sample alone, no padding, one token at a time),
so kernels of other sizes run, and rounding may differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from hookkit._core.pytree import Inputs, tree_leaves_with_path, tree_map, tree_set
from hookkit.errors import ArgumentError, OptionError
from hookkit.inspection.axes import Region, Size

WHO = "check_invariance"
Decode = Callable[[nn.Module, Inputs, Any], Any]
"""Calls a model with the next inputs and its state, None at first; returns its new state."""
# The input that is changed, if it is called so; transformers' names.
_MAIN = ("input_ids", "inputs_embeds", "pixel_values", "input_values", "input_features")
_MAIN_OF_DECODER = ("decoder_input_ids", "decoder_inputs_embeds")
_CACHES = ("past_key_values", "cache", "cache_params", "state")  # parameters that take a cache
_ONE_BY_ONE = 16  # the most tokens given singly: each is a forward, and more would show nothing new


@dataclass(frozen=True)
class Step:
    """Holds the inputs of one forward, and pairs (part of the unchanged run, part of this run)."""

    inputs: Inputs
    size: Size
    pairs: tuple[tuple[Region, Region], ...] = ()


@dataclass(frozen=True)
class Change:
    """Describes a change that must not matter.

    Attributes:
        words: what is changed, to be read after "with".
        runs: runs of one forward, or of several that continue from each other's state.
        exact: whether all shapes are kept, so that no bit may differ.
        needs: what the axes of an output must hold for it to be judged: `"samples"`, `"positions"`,
            or `"either"` of the two; `""` if every output is compared as a whole.
        seed: the random seed of the runs; None for the random state of the unchanged run.
        decode: calls the model instead of a plain call.
        anywhere: whether values come from anywhere in the input. All of the input must then be one
            vocabulary. A model may refuse such values: it may need a certain first token.
    """

    words: str
    runs: list[list[Step]]
    exact: bool
    needs: str
    seed: int | None = None
    decode: Decode | None = None
    anywhere: bool = False


class Given:
    """Holds the inputs of a model, which of them is changed, and what their axes hold.

    Attributes:
        path: the path, among the inputs, of `main`, the input that is changed.
        names: the names of all inputs, by path.
        size: the samples and positions of `main`.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Inputs,
        to: str,
        vary: str | None = None,
        batch_dim: int = 0,
        seq_dim: int | None = None,
    ) -> None:
        self.model, self.inputs, self.to, self.vary = model, inputs, to, vary
        self.parameters = signature(model.forward).parameters
        tensors = dict(tree_leaves_with_path(inputs))
        if not tensors:
            raise ArgumentError(f"{WHO}: there is no tensor in the inputs.")
        self.names = {path: self._name(path) for path in tensors}
        self.path = self._chosen(tensors)
        self.main, self.name = tensors[self.path], self.names[self.path]
        n_dims = self.main.ndim
        for option, dim in (("batch_dim", batch_dim), ("seq_dim", seq_dim)):
            if dim is not None and not -n_dims <= dim < n_dims:
                raise OptionError(f"{WHO}({option}={dim}): {self.name} has {n_dims} axes.")
        self.batch_dim = batch_dim % n_dims
        usual = n_dims == (3 if self.main.is_floating_point() else 2)  # vectors, or numbers
        if seq_dim is None and usual and self.batch_dim < 2:
            seq_dim = 1 - self.batch_dim
        self.seq_dim = None if seq_dim is None else seq_dim % n_dims
        lengths, per_position = self.main.shape, to not in ("batch", "order", "repeat")
        seq = None if self.seq_dim is None else lengths[self.seq_dim]
        if per_position and (self.seq_dim == self.batch_dim or (seq or 0) < 2):
            raise OptionError(
                f'{WHO}(to="{to}"): which axis of {self.name}, {tuple(lengths)}, holds several '
                "positions? Give seq_dim=, or vary= if another input is meant."
            )
        self.size = Size(lengths[self.batch_dim], seq if per_position else None)

    def _name(self, path: str) -> str:
        """Return the name of an input as the user knows it: its parameter's name or last key."""
        key, names = path.rstrip("]").rpartition("[")[2].strip("'\""), [*self.parameters]
        if path == f"[{key}]" and key.isdecimal() and int(key) < len(names):
            return names[int(key)]
        return path if key.isdecimal() else key

    def _chosen(self, tensors: dict[str, Tensor]) -> str:
        """Return the path of the input that is changed."""
        by_name = {name: path for path, name in reversed(self.names.items())}
        if self.vary is not None and self.vary not in by_name:
            known = ", ".join(by_name)
            raise OptionError(f"{WHO}(vary={self.vary!r}): no such input. Give one of {known}.")
        usual = (*_MAIN_OF_DECODER * (self.to in ("future", "cache")), *_MAIN)
        named = [by_name[n] for n in ([self.vary] if self.vary else usual) if n in by_name]
        main = [p for p, t in tensors.items() if t.ndim > 1 and not _is_mask(self.names[p], t)]
        return (named or main or [*tensors])[0]

    def describe(self) -> str:
        """Return in words which axes of the input are taken for samples and positions."""
        axes = f"axis {self.batch_dim} samples"
        axes += f", axis {self.seq_dim} positions" * (self.size.seq is not None)
        return f"Of {self.name}, {'×'.join(map(str, self.main.shape))}, {axes}"

    def axes(self, path: str, t: Tensor) -> tuple[int | None, list[int]]:
        """Return the axis of samples of one input, and its axes of positions."""
        (n, seq), name, at = self.size, self.names[path], self.batch_dim
        if path == self.path:
            return at, [] if seq is None or self.seq_dim is None else [self.seq_dim]
        samples: int | None = at if t.ndim > at and t.shape[at] == n else None
        if t.ndim == 1:
            samples = 0 if len(t) == n and (n != seq or "pos" not in name) else None
        elif samples is None and t.ndim == 3 and t.shape[1] == n:
            samples = 1  # the state of an RNN: (layers, samples, features)
        if seq is None or _is_decoders(name) != _is_decoders(self.name):
            return samples, []
        square = t.ndim == 2 and t.shape == (seq, seq)
        free = t.ndim == 1 or (t.ndim == 2 and samples is None) or square or _is_mask(name, t)
        every = [d for d, length in enumerate(t.shape) if d != samples and length == seq]
        return samples, [d for d in every if free or d == self.seq_dim]

    def taken(
        self, samples: Tensor | None = None, positions: Tensor | None = None, upto: int = 0
    ) -> Inputs:
        """Return the inputs cut to some samples and positions.

        If `upto` is given, masks keep all positions before it along their last axis.
        """
        paths = iter(self.names)

        def one(t: Tensor) -> Tensor:
            path = next(paths)
            of_samples, of_positions = self.axes(path, t)
            if of_samples is not None and samples is not None:
                t = t.index_select(of_samples, samples.to(t.device))
            if positions is not None:
                for d in of_positions:
                    whole = upto and d == of_positions[-1] and _is_mask(self.names[path], t)
                    at = torch.arange(upto, device="cpu") if whole else positions
                    t = t.index_select(d, at.to(t.device))
            return t

        taken: Inputs = tree_map(one, self.inputs)
        return taken

    def other_sizes(self) -> Iterator[tuple[Inputs, Size]]:
        """Yield the inputs at other sizes, which a model may refuse, and last at the same size."""
        n, seq = self.size
        more = torch.cat([torch.arange(n, device="cpu"), torch.tensor([n - 1], device="cpu")])
        shorter = () if seq is None else (seq - 2, seq - 1, seq // 2)
        for samples in (more, torch.arange(n, device="cpu")):
            # an axis of samples × positions has to change its length, or it would not be found
            lengths = [x for x in shorter if x > 1 and x * len(samples) != n * (seq or 0)]
            for length in [*lengths, seq]:
                positions = None if length == seq else torch.arange(length or 0, device="cpu")
                yield self.taken(samples, positions), Size(len(samples), length)

    def changed(self, keep: Tensor | None = None, seed: int = 1, anywhere: bool = False) -> Inputs:
        """Return the inputs with other values in `main`, all taken from `main` itself.

        Args:
            keep: what stays, (samples,) or (samples, positions) of bool; nothing by default.
            seed: chooses the values; the process's random state is not used.
            anywhere: take values of any feature, not only of the same.
        """
        new = self._other_values(seed, anywhere)
        if keep is not None:
            dims = [self.batch_dim, self.seq_dim or 0][: keep.ndim]
            shape = [n if d in dims else 1 for d, n in enumerate(self.main.shape)]
            keep = keep.T if dims != sorted(dims) else keep
            new = torch.where(keep.reshape(shape).to(new.device), self.main, new)
        if torch.equal(new, self.main):
            what = "samples" if self.to == "batch" and self.size.batch > 1 else "values"
            raise ArgumentError(
                f"{WHO}: all {what} of {self.name} are the same, so no value can be replaced by "
                f"another. Give {what} that differ."
            )
        inputs: Inputs = tree_set(self.inputs, self.path, new)
        return inputs

    def _other_values(self, seed: int, anywhere: bool) -> Tensor:
        """Replace each value by a different value of the same feature, if it has one.

        The axes other than samples and positions number the features; with `anywhere`, all values
        count as one feature. In the sorted values of a feature, the values equal to one's own are a
        range; a draw picks a value outside of it.
        """
        dims = [self.batch_dim]
        if self.size.seq is not None and self.seq_dim is not None:
            dims.append(self.seq_dim)
        front = [*range(len(dims))]
        rows = self.main.detach().cpu().movedim(dims, front)
        values = rows.to(torch.float64 if rows.is_floating_point() else torch.int64)
        values = values.reshape(rows.shape[: len(dims)].numel(), -1)
        columns = values.T.contiguous()
        columns = columns.reshape(1, -1) if anywhere or len(values) == 1 else columns
        ordered, n = columns.sort(1).values, columns.shape[1]
        low = torch.searchsorted(ordered, columns)
        high = torch.searchsorted(ordered, columns, right=True)
        others = n - (high - low)  # how many have a different value
        generator = torch.Generator().manual_seed(seed)  # the same draw for a copy in float64
        draw = torch.rand(columns.shape, generator=generator, dtype=torch.float64, device="cpu")
        new = ordered.gather(1, (high + (draw * others).long()) % n)
        new = torch.where(others > 0, new, columns).reshape(-1, len(values)).T
        return new.reshape(rows.shape).movedim(front, dims).to(self.main)


def _is_mask(name: str, t: Tensor) -> bool:
    return t.dtype == torch.bool or "mask" in name or "bias" in name


def _is_decoders(name: str) -> bool:
    return any(word in name for word in ("decoder", "tgt", "target"))


# --- one function for each kind, which returns the inputs of the unchanged run, and the changes


def future(given: Given) -> tuple[Given, list[Change]]:
    """Change all values after a position.

    A change shows a leak only if it begins between the two positions, so several are tried: the
    middle, which shows most leaks; the first, which shows a prefix, and chunks of any length; the
    last; and odd ones between these.
    """
    n, seq = given.size.batch, given.size.seq or 0
    middle, changes = seq // 2, list[Change]()
    cuts = [middle, middle + 1, 1, 2, 3, middle // 2 | 1, (middle + middle // 2) | 1, seq - 1]
    for cut in dict.fromkeys(cut for cut in cuts if 0 < cut < seq):
        region = Region(None, torch.arange(cut, device="cpu"))
        keep = torch.arange(seq, device="cpu") < cut
        runs = [_with_others(given, keep.expand(n, seq), region)]
        words = f"other values of {given.name} from position {cut} on"
        changes.append(Change(words, runs, True, "positions"))
    return given, changes


def batch(given: Given) -> tuple[Given, list[Change]]:
    """For the first and for the last sample, change the other samples, and leave them out.

    At first, the values come from other samples at the same place. A token that all samples share,
    such as the first, has no other value there, so tokens from anywhere are tried too.
    """
    given = _several(given)
    rows = torch.arange(given.size.batch, device="cpu")
    ends = rows[:1], rows[-1:]
    words = f"{given.name} in the other samples"
    beside = [_with_others(given, rows == i, Region(i)) for i in ends]
    changes = [Change(f"other values of {words}", beside, True, "samples")]
    if given.main.ndim > 1 and given.main.dtype in (torch.int64, torch.int32):
        beside = [_with_others(given, rows == i, Region(i), anywhere=True) for i in ends]
        words = f"tokens from anywhere in {words}"
        changes.append(Change(words, beside, True, "samples", anywhere=True))
    alone = [_alone(given, i) for i in ends]
    return given, [*changes, Change("one sample alone", alone, False, "samples")]


def order(given: Given) -> tuple[Given, list[Change]]:
    """Put the last sample first."""
    given = _several(given)
    rolled = torch.arange(given.size.batch, device="cpu").roll(1)
    pair = Region(rolled), Region(torch.arange(given.size.batch, device="cpu"))
    step = Step(given.taken(rolled), given.size, (pair,))
    return given, [Change("the last sample first", [[step]], False, "samples")]


def repeat(given: Given) -> tuple[Given, list[Change]]:
    """Change nothing, and then only the random state.

    The second of two calls shows what the model keeps from call to call: a counter, a cache.
    """
    step = Step(given.inputs, given.size)
    return given, [
        Change("the same inputs and random state again", [[step, step]], True, ""),
        Change("another random state", [[step]], True, "", seed=12345),
    ]


def padding(given: Given, padded: Any = None) -> tuple[Given, list[Change]]:
    """Change the values in the padding, and leave the padding out."""
    real = ~_told(given, "padded", padded).bool() if padded is not None else _mask(given)
    fewest = [i for i in real.sum(1).argsort() if 0 < real[i].sum() < real.shape[1]]
    if not fewest:
        raise ArgumentError(
            f'{WHO}(to="padding"): no sample has padding beside real positions. Give one.'
        )
    rows = dict.fromkeys(int(i) for i in (fewest[0], fewest[-1]))  # with most, and least padding
    places = [(torch.tensor([i], device="cpu"), real[i].nonzero()[:, 0]) for i in rows]
    values = [_with_others(given, real, *(Region(*place) for place in places))]
    alone = [_alone(given, *place) for place in places]
    return given, [
        Change(f"other values of {given.name} in the padding", values, True, "either"),
        Change("one sample without its padding", alone, False, "either"),
    ]


def packing(given: Given, documents: Any = None) -> tuple[Given, list[Change]]:
    """Change the other documents of the first row, and leave them out."""
    numbers = _documents(given) if documents is None else _told(given, "documents", documents)
    row, zero = numbers[0], torch.tensor([0], device="cpu")
    which = dict.fromkeys((int(row[0]), int(row[-1])))
    if len(which) < 2:
        raise ArgumentError(
            f'{WHO}(to="packing"): the first row begins and ends with the same document. Give a '
            "row of several."
        )
    places = [(zero, (row == number).nonzero()[:, 0]) for number in which]
    beside = list[list[Step]]()
    for _, at in places:
        keep = torch.zeros_like(numbers, dtype=torch.bool)
        keep[0, at] = True
        beside.append(_with_others(given, keep, Region(zero, at)))
    alone = [_alone(given, *place) for place in places]
    return given, [
        Change(f"other values of {given.name} in the other documents", beside, True, "positions"),
        Change("one document alone", alone, False, "positions"),
    ]


def cache(given: Given, decode: Decode | None = None) -> tuple[Given, list[Change]]:
    """Give the last tokens one by one, each with the cache of the tokens before it."""
    seq = given.size.seq or 0
    first = max(seq // 2, seq - _ONE_BY_ONE)
    steps = list[Step]()
    for a, b in [(0, first), *((i, i + 1) for i in range(first, seq))]:
        here = torch.arange(a, b, device="cpu")
        pair = Region(None, here), Region(None, torch.arange(b - a, device="cpu"))
        size = Size(given.size.batch, b - a)
        steps.append(Step(given.taken(None, here, upto=b), size, (pair,)))
    words = f"the cache: {first} tokens first, then one by one"
    decode = decode or _decoder(given)
    return given, [Change(words, [steps], False, "positions", decode=decode)]


# --- what they share


def _with_others(
    given: Given, keep: Tensor, *regions: Region, anywhere: bool = False
) -> list[Step]:
    """Return the step with other values where `keep` is false; `regions` must stay."""
    inputs = given.changed(keep, anywhere=anywhere)
    return [Step(inputs, given.size, tuple((r, r) for r in regions))]


def _alone(given: Given, row: Tensor, positions: Tensor | None = None) -> list[Step]:
    """Return the step with only one sample, or only some of its positions."""
    count = None if positions is None else torch.arange(len(positions), device="cpu")
    size = Size(1, given.size.seq if count is None else len(count))
    pair = Region(row, positions), Region(torch.tensor([0], device="cpu"), count)
    return [Step(given.taken(row, positions), size, (pair,))]


def _several(given: Given) -> Given:
    """Return `given` with a second sample if it has only one."""
    if given.size.batch > 1:
        return given
    other = dict(tree_leaves_with_path(given.changed()))[given.path]
    main = torch.cat([given.main, other], given.batch_dim)
    inputs = tree_set(given.taken(torch.tensor([0, 0], device="cpu")), given.path, main)
    return Given(given.model, inputs, given.to, given.vary, given.batch_dim, given.seq_dim)


def _told(given: Given, name: str, value: Any) -> Tensor:
    """Return `value` expanded to (samples, positions) on the CPU; raise if it does not fit."""
    t = torch.as_tensor(value, device="cpu").detach()
    shape = (given.size.batch, given.size.seq or 0)
    if t.shape not in (shape, shape[1:], (1, shape[1])):
        raise OptionError(
            f"{WHO}: {name} has the shape {tuple(t.shape)}. Give (samples, positions), {shape}."
        )
    return t.expand(shape)


def _mask(given: Given) -> Tensor:
    """Find the input that masks padding; return it as bool, true at real positions."""
    for path, t in tree_leaves_with_path(given.inputs):
        name = given.names[path]
        if "mask" in name and tuple(t.shape) == given.size and path != given.path:
            # PyTorch's `key_padding_mask` is true at padding, `attention_mask` at real positions
            return ~t.bool().cpu() if "padding_mask" in name else t.bool().cpu()
    raise ArgumentError(
        f'{WHO}(to="padding"): no input says where padding is. Give a padded batch with its mask, '
        "or padded= (samples, positions), true where padding is."
    )


def _documents(given: Given) -> Tensor:
    """Find the input that tells documents apart; return the document's number at each position."""
    for path, t in tree_leaves_with_path(given.inputs):
        name = given.names[path]
        if any(word in name for word in ("document", "segment", "seq_idx", "doc_id")):
            return _told(given, name, t)
        if "position_ids" in name or "input_pos" in name:
            t = _told(given, name, t)
            return (t.diff(dim=1, prepend=t[:, :1] - 1) != 1).long().cumsum(1)
    raise ArgumentError(
        f'{WHO}(to="packing"): no input says which documents a row has. Give position ids that '
        "begin again, or documents= (samples, positions), the number of each position's document."
    )


def _decoder(given: Given) -> Decode:
    """Return a function that calls the model with its cache, as transformers' `generate` does."""
    name = next((c for c in _CACHES if c in given.parameters), None)
    if name is None:
        raise ArgumentError(
            f'{WHO}(to="cache"): how the model takes its cache is not known. Give decode= (model, '
            "inputs, state), which calls the model and returns its new state; None at first."
        )
    more = {"use_cache": True} if "use_cache" in given.parameters else {}

    def decode(model: nn.Module, inputs: Inputs, state: Any) -> Any:
        out = model(*inputs, **{**inputs.kwargs, name: state, **more})
        return out[name] if hasattr(out, "keys") else getattr(out, name)

    return decode
