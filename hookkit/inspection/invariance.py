"""`check_invariance`: which layer is the first whose output depends on what it must not depend on.

Builds on `input_changes`, `axes` and `first_difference`. The model runs once as it is given, and
again with a change that must not matter. Each input and output of each layer is compared where it
must stay. A dependence begins in the innermost call whose inputs stay and whose output does not,
if it has an effect: if no call around it has an output that stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookkit._core.checks import check_choice, check_module, check_number
from hookkit._core.modules import can_run, unwrap, walk
from hookkit._core.pytree import Inputs, tree_leaves_of_objects, tree_leaves_with_path, tree_map
from hookkit._core.text import escape_controls, si, wrap
from hookkit.errors import ArgumentError, OptionError
from hookkit.hooks.attach import check_hookable
from hookkit.hooks.values import snapshot
from hookkit.inspection import input_changes as kinds
from hookkit.inspection.axes import Reading, Region, readings, take
from hookkit.inspection.differences import dense, difference
from hookkit.inspection.first_difference import Call, CallTree, Localisation
from hookkit.inspection.input_changes import WHO, Change, Given, Step
from hookkit.inspection.preserve import preserve_state, real_inputs

_DEPENDS = {
    "future": "depends on later positions",
    "padding": "depends on the padding",
    "batch": "depends on the other samples",
    "order": "depends on the order of the samples",
    "packing": "depends on the other documents",
    "cache": "differs with the cache",
    "repeat": "differs from call to call",
}
# Kernels of another layout round otherwise: |a − b| ≤ rtol · (|a| + rms(a)) counts as equal.
_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_SMALL = 100  # times that tolerance: what the model's output changes less is confirmed in float64
_NEAR = 2  # rows that the text shows on each side of the first
_WIDTH = 100

Place = tuple[Call, str, str]
"""A tensor of a run: the call, "in" or "out", and the tensor's path among these."""


@dataclass(frozen=True)
class InvarianceRow:
    """One output of a layer, in the unchanged run and with one change.

    Attributes:
        name: of the module, with the path of the tensor in its output.
        type: the module's class.
        call: the number of the module's call, from 0.
        path: of the tensor in the output, `""` if the module returns the tensor itself.
        shape: in the unchanged run.
        axes: what each axis was found to hold: samples, positions, or – for anything else.
        change: what was changed.
        max_abs_error: the largest `|a − b|` where the output must stay.
        rel_error: `‖a − b‖ / ‖a‖` there.
        n_different: elements that differ: by one bit if the change leaves all shapes, beyond the
            tolerance otherwise.
        inputs_differ: whether the module's inputs differ too.
        has_effect: whether what is around the module differs too, where that is known.
        place: of the row in which the dependence begins, where in the module that is; `None` of
            all others.
    """

    name: str
    type: str
    call: int
    path: str
    shape: tuple[int, ...]
    axes: str
    change: str
    max_abs_error: float
    rel_error: float
    n_different: int
    inputs_differ: bool = False
    has_effect: bool = True
    place: str | None = None

    @property
    def differs(self) -> bool:
        """Whether it changes where it must stay."""
        return self.n_different > 0

    @property
    def label(self) -> str:
        """The module, its class and the call."""
        name = self.name if self.name and self.name[0] not in "[." else f"(model){self.name}"
        return escape_controls(f"{name} ({self.type})" + f", call {self.call}" * bool(self.call))


@dataclass(frozen=True, repr=False)
class Invariance(Localisation):
    """Which outputs of a model depend on what they must not depend on.

    Attributes:
        rows: the outputs that were compared, for each change in the order of execution. The checks
            end with the first change that shows a dependence.
        to: as it was given to `check_invariance`.
        not_judged: outputs and changes that could not be judged, each with the reason.
        notes: what was assumed, and what was found to be rounding.
    """

    rows: tuple[InvarianceRow, ...]
    to: str
    not_judged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    _AGREES: ClassVar[str] = "nothing depends on what was changed"

    @property
    def first(self) -> InvarianceRow | None:
        """The row in which the dependence begins; None if there is none."""
        return next((r for r in self.rows if r.place is not None), None)

    @property
    def verdict(self) -> str:
        """The layer in which the dependence begins, and where in it, in one line."""
        if (first := self.first) is not None:
            return f"{first.label} {_DEPENDS[self.to]}{first.place and ', '}{first.place}"
        n = sum(r.has_effect for r in self.rows)
        inner = len(self.rows) - n
        none = f"nothing {_DEPENDS[self.to]}: {n} output{'s' * (n != 1)} compared"
        return none + f"; {inner} more differ without effect" * bool(inner)

    def text(self) -> str:
        """Return the verdict, the change that showed it, the rows around the first, and notes."""
        changes = dict.fromkeys(r.change for r in self.rows)
        lines = [self.verdict, f"  with {' | '.join(changes)}"]
        if (first := self.first) is not None:
            lines[1] = f"  with {first.change}"
            at = self.rows.index(first)
            near = self.rows[max(0, at - _NEAR) : at + _NEAR + 1]
            rows = [r for r in near if r.change == first.change]
            cells = [("layer", "shape", "axes", "max_abs_error", "rel_error", "n_different")]
            for r in rows:
                shape = "×".join(map(str, r.shape)) or "scalar"
                sizes = f"{r.max_abs_error:.3g}", f"{r.rel_error:.3g}", si(r.n_different)
                cells.append((r.label, shape, r.axes, *sizes))
            widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
            for row, r in zip(cells, [None, *rows], strict=True):
                left = [c.ljust(n) for c, n in zip(row[:3], widths, strict=False)]
                right = [c.rjust(n) for c, n in zip(row[3:], widths[3:], strict=True)]
                lines.append(("→ " if r is first else "  ") + "  ".join([*left, *right]))
        unjudged = [escape_controls(text) for text in self.not_judged[:6]]
        unjudged += [f"and {len(self.not_judged) - 6} more (.not_judged)"] * (
            len(self.not_judged) > 6
        )
        rest = [*self.notes, *[f"Not judged: {'; '.join(unjudged)}"] * bool(unjudged)]
        return "\n".join([*lines, *wrap(rest, _WIDTH, ". ")])


# --- runs


Look = Callable[[Step, Call, str, list[tuple[str, Tensor]]], None]
"""Called with the step, the call, "in" or "out", and the tensors with their paths."""


def _run(
    model: nn.Module,
    modules: dict[str, nn.Module],
    steps: list[Step],
    look: Look,
    seed: int | None = None,
    decode: Callable[[nn.Module, Inputs, Any], Any] | None = None,
) -> tuple[CallTree, bool]:
    """Run `model` and show its layers' tensors to `look`; leave everything as it was.

    Returns the calls of the last step, and whether the model drew random numbers.
    """
    step, tree, state = steps[0], CallTree(), None

    def before(call: Call, _m: nn.Module, args: Any, kwargs: Any) -> None:
        look(step, call, "in", tree_leaves_with_path(Inputs(args, kwargs)))

    def after(call: Call, _m: nn.Module, out: Any) -> None:
        parts = tree_leaves_of_objects(out)
        look(step, call, "out", [(path, t) for path, t in parts if isinstance(t, Tensor)])

    with preserve_state(model), torch.no_grad():
        if seed is not None:
            torch.manual_seed(seed)
        random = _random_state()
        for step in steps:
            tree = CallTree()
            with ExitStack() as undo:
                for handle in tree.follow(modules, before, after):
                    undo.callback(handle.remove)
                inputs = real_inputs(step.inputs)
                if decode is None:
                    model(*inputs, **inputs.kwargs)
                else:
                    state = decode(model, inputs, state)
        drew = any(not torch.equal(a, b) for a, b in zip(random, _random_state(), strict=True))
    return tree, drew


def _random_state() -> list[Tensor]:
    devices = [d for d in (torch.cuda, torch.xpu) if d.is_available() and d.is_initialized()]
    return [torch.get_rng_state(), *(s for d in devices for s in d.get_rng_state_all())]


class _Found(NamedTuple):
    """How far a tensor is from that of the unchanged run, where it must stay."""

    max_abs_error: float
    rel_error: float
    n_different: int
    axes: str


class _Reference:
    """The unchanged run, and what is known of its tensors: their axes, and which are tables.

    Attributes:
        draws: whether the model draws random numbers.
        notes: what was assumed about axes.
    """

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], given: Given) -> None:
        self.model, self.modules, self.given, self.notes = model, modules, given, list[str]()
        self.values, self.shapes = dict[Place, Tensor](), dict[Place, tuple[int, ...]]()
        kept: dict[
            int, Tensor
        ] = {}  # the last snapshot of each object: an output is often an input

        def keep(_step: Step, call: Call, side: str, parts: list[tuple[str, Tensor]]) -> None:
            for path, t in parts:
                if t.is_nested:
                    continue
                last = kept.get(id(t))
                if last is None or not _equal(last, dense(t)):
                    last = kept[id(t)] = snapshot(dense(t))
                self.values[call, side, path] = last

        self.tree, self.draws = _run(model, modules, [Step(given.inputs, given.size)], keep)
        self.other, self._tables = given.size, set[Place]()
        self._n_calls = self._calls_of(self.tree)
        self._other_n_calls = self._n_calls
        self._knows_tables = False

    @staticmethod
    def _calls_of(tree: CallTree) -> dict[str, int]:
        return {call.name: call.n + 1 for call in tree.begun}

    def learn_axes(self) -> None:
        """Run the model at another size."""

        def see(_step: Step, call: Call, side: str, parts: list[tuple[str, Tensor]]) -> None:
            for path, t in parts:
                if not t.is_nested:
                    self.shapes[call, side, path] = tuple(t.shape)

        problem = ""
        for inputs, size in self.given.other_sizes():
            self.shapes.clear()
            try:
                tree, _ = _run(self.model, self.modules, [Step(inputs, size)], see)
            except Exception as error:  # the model takes no such size
                problem = problem or f"{type(error).__name__}: {error}"
                continue
            self.other, self._other_n_calls = size, self._calls_of(tree)
            break
        same = [("samples", self.other.batch == self.given.size.batch)]
        same += [("positions", self.other.seq == self.given.size.seq is not None)]
        if fixed := " and ".join(name for name, is_fixed in same if is_fixed):
            text = (
                f"the model takes no other number of {fixed}, so axes of that length count as such"
            )
            self.notes.append(escape_controls(f"{text} ({problem})"))

    def tables(self) -> set[Place]:
        """Return the tensors that no value of the changed input changes: positions, masks."""

        def see(_step: Step, call: Call, side: str, parts: list[tuple[str, Tensor]]) -> None:
            for path, t in parts:
                mine = self.values.get((call, side, path))
                if mine is not None and _equal(mine, dense(t)):
                    self._tables.add((call, side, path))

        if not self._knows_tables:
            self._knows_tables = True
            step = Step(self.given.changed(seed=7), self.given.size)
            _run(self.model, self.modules, [step], see)
        return self._tables

    def positions_are_calls(self, name: str) -> bool:
        """Whether a module is called once for each position: a cell in a loop over them."""
        here, there = self.given.size.seq, self.other.seq
        calls, other = self._n_calls.get(name), self._other_n_calls.get(name)
        return here != there and here is not None and here > 1 and (calls, other) == (here, there)

    def readings(self, place: Place) -> list[Reading]:
        """Return all ways to read the axes of a tensor."""
        call, side, path = place
        n = 0 if self.positions_are_calls(call.name) else call.n
        other = self.shapes.get((Call(call.name, n), side, path))
        shape = tuple(self.values[place].shape)
        return [] if other is None else readings(shape, other, self.given.size, self.other)


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are the same bit by bit, but for kinds of NaN."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


class _Comparison:
    """What one change does to each tensor of the unchanged run."""

    def __init__(self, ref: _Reference, change: Change, rtol: float | None) -> None:
        self.ref, self.change, self.rtol = ref, change, rtol
        self.found, self.unjudged = dict[Place, _Found](), dict[Place, str]()
        self.skipped = ref.tables() if change.needs and not change.exact else set[Place]()
        for steps in change.runs:
            _run(ref.model, ref.modules, steps, self.see, change.seed, change.decode)

    def see(self, step: Step, call: Call, side: str, parts: list[tuple[str, Tensor]]) -> None:
        """Compare the inputs, or the outputs, of a call with the unchanged run's."""
        if not self.change.needs:
            for path, t in parts:
                if (place := (call, side, path)) in self.ref.values:
                    self.keep(place, self.measure(self.ref.values[place], dense(t), ""))
            return
        by_call = self.ref.positions_are_calls(call.name)
        for here, there in step.pairs:
            if by_call and there.positions is not None and here.positions is not None:
                at = (there.positions == call.n).nonzero()
                if len(at):
                    same = Call(call.name, int(here.positions[int(at[0])]))
                    pair = Region(here.samples), Region(there.samples)
                    self.compare(step, same, side, parts, *pair, by_call)
            else:
                self.compare(step, call, side, parts, here, there, by_call)

    def compare(
        self,
        step: Step,
        call: Call,
        side: str,
        parts: list[tuple[str, Tensor]],
        here: Region,
        there: Region,
        by_call: bool,
    ) -> None:
        """Compare the part `there` of each tensor with the part `here` of the unchanged run."""
        ref, change = self.ref, self.change
        for path, t in parts:
            place = (call, side, path)
            if place not in ref.values or t.is_nested:
                self.unjudged.setdefault(place, "the unchanged run has no such tensor")
                continue
            a, b = ref.values[place], dense(t)
            if place in self.skipped:
                self.unjudged.setdefault(place, "no value of the input changes it: a table")
                continue
            if change.exact and a.shape != b.shape:
                self.unjudged.setdefault(place, "its shape depends on values")
                continue
            ways = [way for way in ref.readings(place) if _has(way, change.needs, by_call)]
            results = list[_Found]()
            for way in ways:
                mine, other = take(a, way, ref.given.size, here), take(b, way, step.size, there)
                if mine is None or other is None or mine[0].shape != other[0].shape:
                    continue
                if all(map(torch.equal, mine[1], other[1])):
                    axes = " × ".join(map(str, way)) + ", positions by call" * by_call
                    results.append(self.measure(mine[0], other[0], axes))
            if results:  # it has changed only if it has by all readings
                self.keep(place, min(results, key=lambda found: found.n_different))
            else:
                whose = {"either": "samples or positions"}.get(change.needs, change.needs)
                why = f"no axis is known to hold {whose}", "its size does not follow the input's"
                self.unjudged.setdefault(place, why[bool(ways)])

    def measure(self, a: Tensor, b: Tensor, axes: str) -> _Found:
        """Return how far `b` is from `a`, by the change's tolerance."""
        if a.shape != b.shape:
            return _Found(float("inf"), float("inf"), max(1, a.numel()), axes)
        discrete = not (a.is_floating_point() or a.is_complex())
        # indices and decisions flip where two values are near, which another layout moves
        if not a.numel() or _equal(a, b) or (discrete and not self.change.exact):
            return _Found(0.0, 0.0, 0, axes)
        rtol = atol = 0.0
        if not self.change.exact:
            usual = max(_RTOL.get(t.dtype.to_real(), 0.0) for t in (a, b))
            rtol = usual if self.rtol is None else self.rtol
            finite = a[a.isfinite() & (a.abs() < 1e30)].abs().double()  # masks hold huge numbers
            atol = rtol * float(finite.pow(2).mean().sqrt()) if len(finite) else 0.0
        d = difference(a, b, rtol, atol)
        return _Found(d.max_abs_error, d.rel_error, d.n_different, axes)

    def keep(self, place: Place, new: _Found) -> None:
        """Keep the worst of what was found for a tensor."""
        old = self.found.get(place)
        if old is None or (new.n_different, new.rel_error) > (old.n_different, old.rel_error):
            self.found[place] = new

    def rows(self) -> list[InvarianceRow]:
        """Return a row for each output that was judged; one has a place if a dependence begins."""
        tree, modules = self.ref.tree, self.ref.modules
        judged = {call for call, side, _ in self.found if side == "out"}
        differ: dict[str, set[Call]] = {"in": set(), "out": set()}
        for (call, side, _), found in self.found.items():
            if found.n_different:
                differ[side].add(call)
        inputs_differ, stays = differ["in"], judged - differ["out"]

        def has_effect(call: Call) -> bool:  # if not: a scratch value, or one that is masked later
            return not any(outer in stays for outer in tree.around(call))

        effective = {c for c in differ["in"] | differ["out"] if has_effect(c)}
        outputs_differ = effective & differ["out"]
        for call in effective:  # what cannot be judged differs if something in it does
            outputs_differ |= {outer for outer in tree.around(call) if outer not in judged}
        first = tree.first(inputs_differ, outputs_differ)
        if first is None:
            first = next((c for c in tree.ended if c in outputs_differ), None)
        made = list[InvarianceRow]()
        for call in tree.ended:
            paths = {p: f for (c, side, p), f in self.found.items() if (c, side) == (call, "out")}
            if call == first and call not in judged:  # shown by what it gives to layers inside
                inner = [f for (c, *_), f in self.found.items() if tree.parent.get(c) == call]
                paths = {"": max(inner, key=lambda f: (f.n_different, f.rel_error))}
            for path, found in paths.items():
                value = self.ref.values.get((call, "out", path))
                row = InvarianceRow(
                    call.name + path,
                    type(modules[call.name]).__name__,
                    call.n,
                    path,
                    () if value is None else tuple(value.shape),
                    found.axes,
                    self.change.words,
                    found.max_abs_error,
                    found.rel_error,
                    found.n_different,
                    call in inputs_differ,
                    not found.n_different or call in outputs_differ,
                )
                if call == first and row.differs:
                    place = tree.place(call, inputs_differ)
                    if not place and modules[call.name].training:
                        place = "in training mode"
                    row, first = replace(row, place=place), None
                made.append(row)
        return made


def _has(way: Reading, needs: str, by_call: bool) -> bool:
    samples = any(axis.samples for axis in way)
    positions = by_call or any(axis.positions for axis in way)
    return {"samples": samples, "positions": positions, "either": samples or positions}[needs]


# --- float64


class _Float64(TorchFunctionMode):
    """Gives float64 to whatever asks for a narrower floating point dtype."""

    _NARROW = (torch.float32, torch.float16, torch.bfloat16)
    _CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if isinstance(x, torch.dtype) and x in self._NARROW else x

        func = Tensor.double if func in self._CASTS else func
        return func(*map(wide, args), **{k: wide(v) for k, v in (kwargs or {}).items()})


def _effect(rows: list[InvarianceRow]) -> float:
    """Return how much the model's output changes; where that is not known, where it begins."""
    whole = [r.rel_error for r in rows if r.name == r.path and r.differs and r.has_effect]
    return max(whole or [r.rel_error for r in rows if r.place is not None], default=0.0)


def _rounding(
    rows: list[InvarianceRow], again: Callable[[], list[InvarianceRow]], rtol: float
) -> tuple[bool, str]:
    """Return whether what the rows show is rounding, and a note about it.

    Rounding vanishes in float64, a dependence stays as large as it is.
    """
    size = _effect(rows)
    if size > _SMALL * rtol:
        return False, ""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with _Float64():
            rest = _effect(again())
    except Exception as error:
        why = f"not confirmed in float64 ({type(error).__name__}: {error})"
        return size < rtol / 10, f"{rows[0].change}: the output changes by {size:.1g}, {why:.120}"
    finally:
        torch.set_default_dtype(default)
    vanishes = rest < 1e-4 * size
    note = f"{rows[0].change}: rounding alone, {size:.1g}; in float64 {rest:.1g}"
    return vanishes, note * vanishes


def check_invariance(
    model: nn.Module,
    *inputs: Any,
    to: str,
    vary: str | None = None,
    batch_dim: int = 0,
    seq_dim: int | None = None,
    padded: Any = None,
    documents: Any = None,
    decode: Callable[[nn.Module, Inputs, Any], Any] | None = None,
    rtol: float | None = None,
    **kwargs: Any,
) -> Invariance:
    """Find the first layer whose output depends on what it must not depend on.

    The model runs as it is given, and again with changes that must not matter: without gradients,
    in the modes in which its modules are, from the same random state. The model, its inputs and all
    random states are as before afterwards. Compiled models run eagerly. All inputs and outputs of
    all layers are kept until the check ends.

    A change of values leaves all shapes, so nothing may differ by one bit. A change of the layout
    has other kernels, so there is a tolerance; it is not tried if the model draws random numbers.
    A small effect is confirmed by a copy of the model in float64. Which axes of an output hold
    samples and positions is learned from a run with one sample more and two positions less.

    Args:
        model: a model; a batch of one sample is enough.
        *inputs: for the model.
        to: `"future"`: values at later positions (causality). `"batch"`: the other samples' values,
            and that there are any. `"order"`: the order of the samples. `"padding"`: the padding's
            values, and that there is any. `"packing"`: the other documents in the same row.
            `"cache"`: one token at a time with a cache, or all at once. `"repeat"`: the same call
            again, and from another random state.
        vary: the name of the input whose values are changed; by default the first that is no mask.
        batch_dim: the axis of samples of that input.
        seq_dim: its axis of positions; by default the second of integers of two axes and of floats
            of three (the first if `batch_dim` is 1).
        padded: for `"padding"`, (samples, positions), true where padding is. By default the input
            whose name has "mask" says it; without one, some tokens are replaced by padding if the
            model takes an `attention_mask`.
        documents: for `"packing"`, (samples, positions), the number of each position's document. By
            default position ids that begin again say it.
        decode: for `"cache"`, a function (model, inputs, state) that calls the model with the next
            inputs and returns what it has kept for later ones; `state` is None at first. By default
            as transformers' models take and return their cache.
        rtol: tolerance for changes of the layout: `|a − b| ≤ rtol · (|a| + rms(a))`. By default
            1e-9 for float64, 1e-4 for float32, 2e-2 for float16 and 0.1 for bfloat16.
        **kwargs: keyword inputs for the model.

    Returns:
        The outputs that were compared; `.first` is the one in which a dependence begins, if any.

    Raises:
        ArgumentError: `model` is no module; there is no tensor, or none whose values can be
            changed; nothing could be compared; the change needs inputs that are missing.
        OptionError: an option is unknown, or does not fit the inputs.
        HookError: the model is scripted.

    Cost in forwards, without float64: 4 to 8; `"cache"` about 20.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> x = torch.randn(3, 4)
    >>> print(check_invariance(net, x, to="batch").verdict)
    1 (BatchNorm1d) depends on the other samples, in training mode
    >>> check_invariance(net.eval(), x, to="batch").first is None
    True
    """
    check_choice(WHO, "to", to, _DEPENDS)
    check_module(WHO, model)
    check_hookable(unwrap(model), WHO)
    if rtol is not None:
        check_number(WHO, "rtol", rtol, 0)
    for name, value, wanted in (
        ("padded", padded, "padding"),
        ("documents", documents, "packing"),
        ("decode", decode, "cache"),
    ):
        if value is not None and to != wanted:
            raise OptionError(f'{WHO}({name}=…): this is for to="{wanted}", not "{to}".')
    option = [x for x in (padded, documents, decode) if x is not None]

    def prepare(model: nn.Module, inputs: Inputs) -> tuple[_Reference, list[Change]]:
        root = unwrap(model)
        modules = {n: m for n, m, first in walk(root) if first and can_run(m)}
        given = Given(root, inputs, to, vary, batch_dim, seq_dim)
        given, changes = getattr(kinds, to)(given, *option)
        ref = _Reference(model, modules, given)
        if to != "repeat":
            ref.learn_axes()
        return ref, changes

    def in_float64(i: int) -> list[InvarianceRow]:
        wide = copy.deepcopy(unwrap(model)).double()
        numbers = tree_map(lambda t: t.double() if t.is_floating_point() else t, everything)
        ref, changes = prepare(wide, numbers)
        return _Comparison(ref, changes[i], rtol).rows()

    everything = Inputs(inputs, kwargs)
    ref, changes = prepare(model, everything)
    dtypes = [t.dtype.to_real() for t in ref.values.values() if t.dtype in _RTOL]
    usual = max((_RTOL[dtype] for dtype in dtypes), default=0.0)
    rows, unjudged, notes = list[InvarianceRow](), dict[Place, str](), [*ref.notes]
    skipped = list[str]()
    for i, change in enumerate(changes):
        if not change.exact and ref.draws:
            why = "the model draws random numbers, and others in another layout"
            skipped.append(f"{change.words} ({why})")
            continue
        try:
            compared = _Comparison(ref, change, rtol)
        except Exception as error:
            if change.exact or len(changes) == 1:
                error.add_note(f"{WHO}: raised with {change.words}")
                raise
            skipped.append(f"{change.words} ({type(error).__name__}: {error})")
            continue
        unjudged |= {k: why for k, why in compared.unjudged.items() if k[1] == "out"}
        new = compared.rows()
        if change.needs and any(r.place is not None for r in new):
            is_rounding, note = _rounding(new, partial(in_float64, i), usual)
            notes += [note] * bool(note)
            if is_rounding:
                new = [replace(r, place=None, n_different=0, has_effect=True) for r in new]
        rows += new
        if any(r.place is not None for r in new):
            break
    if not rows:
        tried = "; ".join(skipped) or f"no output follows the size of {ref.given.name}"
        cure = "Call model.eval()" if ref.draws and skipped else "Give batch_dim= and seq_dim="
        raise ArgumentError(f'{WHO}(to="{to}"): nothing was compared: {tried}. {cure}.')
    outputs = dict[str, list[str]]()
    judged = {(r.name, r.call) for r in rows}
    for (call, _, path), why in unjudged.items():
        if (call.name + path, call.n) not in judged:
            outputs.setdefault(why, []).append((call.name or "(model)") + path)
    for why, names in outputs.items():
        names = [*dict.fromkeys(names)]
        more = f" and {len(names) - 3} more" * (len(names) > 3)
        skipped.append(f"{', '.join(names[:3])}{more} ({why})")
    notes = [ref.given.describe(), *notes] if to != "repeat" else notes
    return Invariance(tuple(rows), to, tuple(skipped), tuple(notes))
