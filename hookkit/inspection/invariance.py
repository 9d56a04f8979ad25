"""`check_invariance` finds the first layer whose output depends on something that it must not.

Builds on `input_changes`, `axes` and `first_difference`. The model runs once unchanged, and again
with a change that must not matter. Each input and output of each layer is compared where it must
stay the same. A dependence begins in the innermost call whose inputs stay and whose output does
not. It has no effect, and does not count, if the output of a call around it stays.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from operator import add
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookkit._core.checks import check_choice, check_module, check_number
from hookkit._core.modules import can_run, unwrap, walk
from hookkit._core.pytree import Inputs, tree_leaves_of_objects, tree_leaves_with_path, tree_map
from hookkit._core.random_state import random_states, set_random_states
from hookkit._core.text import clip, columns, escape_controls, si
from hookkit.errors import ArgumentError
from hookkit.hooks.attach import check_hookable
from hookkit.hooks.values import snapshot
from hookkit.inspection import input_changes
from hookkit.inspection.axes import Axis, Reading, Region, Size, readings, take
from hookkit.inspection.differences import dense, difference
from hookkit.inspection.first_difference import Call, CallTree, Localisation
from hookkit.inspection.input_changes import WHO, Change, Decode, Given, Step
from hookkit.inspection.preserve import clone_inputs, preserve_state

_DEPENDS = {
    "future": "depends on later positions",
    "padding": "depends on the padding",
    "batch": "depends on the other samples",
    "order": "depends on the order of the samples",
    "packing": "depends on the other documents",
    "cache": "differs with the cache",
    "repeat": "differs from call to call",
}
# Another layout uses kernels that round differently: |a − b| ≤ rtol · (|a| + rms(a)) is equal.
_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_SMALL = 100  # tolerances: a smaller change of the model's output is confirmed in float64

Place = tuple[Call, str, str]
"""A tensor of a run: the call, "in" or "out", and the tensor's path among these."""


@dataclass(frozen=True)
class InvarianceRow:
    """Holds how one output of a layer reacted to one change.

    Attributes:
        name: of the module, with the `path` of the tensor in its output; `""` is the model.
        type: the module's class.
        call: the number of the module's call, from 0.
        shape: of the whole output.
        axes: what each axis was found to hold: samples, positions, or – for anything else.
        change: what was changed.
        max_abs_error: the largest `|a − b|` where the output must stay the same.
        rel_error: `‖a − b‖ / ‖a‖` there.
        n_different: number of elements that differ: in any bit if the change keeps all shapes,
            otherwise by more than the tolerance.
        place: where in the module the dependence begins; None in all other rows.
    """

    name: str
    type: str
    call: int
    path: str
    shape: tuple[int, ...]
    change: str
    n_different: int
    rel_error: float
    max_abs_error: float
    axes: str
    place: str | None = None

    @property
    def differs(self) -> bool:
        """Return whether the output changes where it must stay the same."""
        return self.n_different > 0

    @property
    def label(self) -> str:
        """Return the module's name, its class and the number of the call, as text."""
        name = self.name if self.name and self.name[0] not in "[." else f"(model){self.name}"
        return escape_controls(f"{name} ({self.type})" + f", call {self.call}" * bool(self.call))


@dataclass(frozen=True, repr=False)
class Invariance(Localisation):
    """Holds which outputs of a model depend on something that they must not depend on.

    Attributes:
        rows: the outputs that were compared, for each change in the order of execution. The checks
            end with the first change that shows a dependence.
        to: the argument `to` of `check_invariance`.
        not_judged: outputs and changes that could not be judged, each with the reason.
        notes: what was assumed about the inputs, and which differences are only rounding.
    """

    rows: tuple[InvarianceRow, ...]
    to: str
    not_judged: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    _AGREES: ClassVar[str] = "nothing depends on what was changed"

    @property
    def first(self) -> InvarianceRow | None:
        """Return the row in which the dependence begins; None if there is none."""
        return next((r for r in self.rows if r.place is not None), None)

    @property
    def verdict(self) -> str:
        """Return the layer in which the dependence begins, and where in it, in one line."""
        if first := self.first:
            return f"{first.label} {_DEPENDS[self.to]}{first.place and ', '}{first.place}"
        inner = sum(r.differs for r in self.rows)
        cuts = f", from {self._cuts()} on" if self.to == "future" else ""
        none = f"nothing {_DEPENDS[self.to]}{cuts}: "
        none += f"{len(self)} output{'s' * (len(self) != 1)} compared"
        return none + f", {inner} differ without effect" * bool(inner)

    def _cuts(self) -> str:
        """Return the positions from which later ones were changed."""
        return ", ".join(map(str, sorted({int(r.change.split()[-2]) for r in self.rows})))

    def text(self) -> str:
        """Return the verdict, the changes, the rows around the first, and what was not judged."""
        first, changes = self.first, dict.fromkeys(r.change for r in self.rows)
        if first is not None:
            changes = {first.change: None}
        elif self.to == "future":  # the verdict has the positions
            changes = {"other values from each of these positions on": None}
        lines = [self.verdict, f"  with {' | '.join(changes)}"]
        if first is not None:
            at = self.rows.index(first)
            rows = [r for r in self.rows[max(0, at - 2) : at + 3] if r.change == first.change]
            cells = [("layer", "shape", "axes", "max_abs_error", "rel_error", "n_different")]
            for r in rows:
                shape = "×".join(map(str, r.shape)) or "scalar"
                errors = f"{r.max_abs_error:.3g}", f"{r.rel_error:.3g}", si(r.n_different)
                cells.append((r.label, shape, r.axes, *errors))
            marks = ["  ", *("→ " if r is first else "  " for r in rows)]
            lines += map(add, marks, columns(cells, n_left=3))
        unjudged = [clip(f"Not judged: {'; '.join(self.not_judged)}", 300)]
        return "\n".join([*lines, *self.notes, *unjudged * bool(self.not_judged)])


# --- runs


def _run(
    model: nn.Module,
    modules: dict[str, nn.Module],
    steps: list[Step],
    look: Callable[[Step, Place, Tensor], None],
    seed: int | None = None,
    decode: Decode | None = None,
) -> tuple[CallTree, bool]:
    """Run `model` on the inputs of `steps`, pass each tensor of its layers to `look`, restore all.

    Each step begins with the same random states of the process; what the model keeps stays from
    step to step. Returns the calls of the last step, and whether the model drew random numbers.
    """
    step, tree, state = steps[0], CallTree(), None

    def before(call: Call, _m: nn.Module, args: Any, kwargs: Any) -> None:
        for path, t in tree_leaves_with_path(Inputs(args, kwargs)):
            if not t.is_nested:
                look(step, (call, "in", path), dense(t))

    def after(call: Call, _m: nn.Module, out: Any) -> None:
        for path, t in tree_leaves_of_objects(out):
            if isinstance(t, Tensor) and not t.is_nested:
                look(step, (call, "out", path), dense(t))

    with preserve_state(model) as saved, torch.no_grad():
        if seed is not None:
            saved.seed(seed)
        start, random = random_states(), saved.random_state()
        for step in steps:
            set_random_states(start)
            tree = CallTree()
            with ExitStack() as undo:
                for handle in tree.follow(modules, before, after):
                    undo.callback(handle.remove)
                inputs = clone_inputs(step.inputs)
                if decode is None:
                    model(*inputs, **inputs.kwargs)
                else:
                    state = decode(model, inputs, state)
        drew = saved.random_state() != random
    return tree, drew


def _equal(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have equal shape, dtype and values; all NaN are equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


class _Reference:
    """Holds the unchanged run: its tensors, what their axes hold, whether it draws randomly."""

    def __init__(self, model: nn.Module, modules: dict[str, nn.Module], given: Given) -> None:
        self.model, self.modules, self.given, self.notes = model, modules, given, list[str]()
        self.values, self.shapes = dict[Place, Tensor](), dict[Place, tuple[int, ...]]()
        last: dict[Any, Tensor] = {}  # an output of one module is often an input of the next

        def keep(_step: Step, place: Place, t: Tensor) -> None:
            memory = t.data_ptr(), t.shape
            if memory not in last or not _equal(last[memory], t):
                last[memory] = snapshot(t)
            self.values[place] = last[memory]

        self.tree, self.draws = _run(model, modules, [Step(given.inputs, given.size)], keep)

        def see(_step: Step, place: Place, t: Tensor) -> None:
            self.shapes[place] = tuple(t.shape)

        problem = ""
        for inputs, size in given.other_sizes():
            self.other = size
            self.shapes.clear()
            try:
                _run(model, modules, [Step(inputs, size)], see)
                break
            except Exception as error:  # the model takes no such size
                problem = problem or f"{type(error).__name__}: {error}"
        self._n_calls = Counter(call.name for call in self.tree.parent)
        self._other_n_calls = Counter(call.name for call in {call for call, *_ in self.shapes})
        pairs = zip(("samples", "positions"), given.size, self.other, strict=True)
        if fixed := " and ".join(name for name, n, other in pairs if n == other is not None):
            text = f"No other number of {fixed} runs, so axes of that length count as such"
            self.notes.append(f"{text} ({problem})")

    def has_one_vocabulary(self) -> bool:
        """Return whether an Embedding takes all of the input that is changed."""
        return any(
            isinstance(self.modules[call.name], nn.Embedding) and _equal(t, self.given.main)
            for (call, side, _), t in self.values.items()
            if side == "in"
        )

    def positions_are_calls(self, name: str) -> bool:
        """Return whether a module is called once for each position: a cell in a loop over them."""
        seq, other = self.given.size.seq, self.other.seq
        return seq != other and (seq, other) == (self._n_calls[name], self._other_n_calls[name])

    def readings(self, place: Place) -> list[Reading]:
        """Return all ways to assign samples and positions to the axes of a tensor."""
        call, side, path = place
        if self.positions_are_calls(call.name):
            call = Call(call.name)
        other = self.shapes.get((call, side, path))
        shape = tuple(self.values[place].shape)
        return [] if other is None else readings(shape, other, self.given.size, self.other)


class _Found(NamedTuple):
    """Holds how far a tensor is from that of the unchanged run, where it must stay the same."""

    n_different: int = 0
    rel_error: float = 0.0
    max_abs_error: float = 0.0
    axes: str = ""


class _Comparison:
    """Runs the model with one change, and compares each tensor with that of the unchanged run."""

    def __init__(
        self, ref: _Reference, change: Change, rtol: float | None, exact_rtol: float = 0.0
    ) -> None:
        self.ref, self.change, self.rtol, self.exact_rtol = ref, change, rtol, exact_rtol
        self.found, self.unjudged = dict[Place, _Found](), dict[Place, str]()
        self.tables = set[Place]()  # tensors that no value of the input changes: positions, masks
        if change.needs and not change.exact:
            step = Step(ref.given.changed(seed=7), ref.given.size)
            _run(ref.model, ref.modules, [step], self.see_table)
        for steps in change.runs:
            _run(ref.model, ref.modules, steps, self.see, change.seed, change.decode)

    def see_table(self, _step: Step, place: Place, t: Tensor) -> None:
        """Note a tensor that stays the same when all values of the input are changed."""
        if place in self.ref.values and _equal(self.ref.values[place], t):
            self.tables.add(place)

    def see(self, step: Step, place: Place, t: Tensor) -> None:
        """Compare a tensor with that of the unchanged run where it must stay; keep the result."""
        (call, *where), ref = place, self.ref
        by_call = bool(self.change.needs) and ref.positions_are_calls(call.name)
        for here, there in step.pairs or [(Region(), Region())]:
            if by_call and there.positions is not None and here.positions is not None:
                at = (there.positions == call.n).nonzero()
                if not len(at):  # this call's position does not have to stay
                    continue
                place = (Call(call.name, int(here.positions[int(at[0])])), where[0], where[1])
                here, there = Region(here.samples), Region(there.samples)
            found = self.compare(place, t, step.size, here, there, by_call)
            if isinstance(found, _Found):
                self.found[place] = max(self.found.get(place, found), found)
            else:
                self.unjudged.setdefault(place, found)

    def compare(
        self, place: Place, b: Tensor, size: Size, here: Region, there: Region, by_call: bool
    ) -> _Found | str:
        """Compare the part `there` of `b` with the unchanged part `here`; or return why not."""
        ref, change, a = self.ref, self.change, self.ref.values.get(place)
        if a is None:
            return "the unchanged run has no such tensor"
        if not change.needs:
            return self.measure(a, b, "")
        if place in self.tables:
            return "a table: no value of the input changes it"
        if change.exact and a.shape != b.shape:
            return "its shape depends on values"
        ways = [way for way in ref.readings(place) if _holds(way, change.needs, by_call)]
        results = list[_Found]()
        for way in ways:
            axes = " × ".join(map(str, way)) + ", positions by call" * by_call
            if change.exact and place[1] == "in":
                # attention scores: for each query, its scores for all keys count as inputs
                several = [d for d, axis in enumerate(way) if axis.positions and not axis.samples]
                way = tuple(Axis() if d in several[1:] else axis for d, axis in enumerate(way))
            mine, other = take(a, way, ref.given.size, here), take(b, way, size, there)
            if mine and a.numel() and not mine[0].numel():
                return "it has no place that must stay"
            if mine and other and all(map(np.array_equal, mine[1], other[1])):
                results.append(self.measure(mine[0], other[0], axes))
        if results:  # the axes are ambiguous: only a change under every reading is one
            return min(results)
        if change.exact and change.needs == "either" and a.ndim == 0:
            return self.measure(
                a, b, ""
            )  # a loss over all samples, of which all that is real stays
        held = {"either": "samples or positions"}.get(change.needs, change.needs)
        return "its size does not follow the input's" if ways else f"no axis holds {held}"

    def measure(self, a: Tensor, b: Tensor, axes: str) -> _Found:
        """Return how far `b` is from `a`, by the change's tolerance."""
        if a.shape != b.shape:
            return _Found(max(1, a.numel()), math.inf, math.inf, axes)
        discrete = not (a.is_floating_point() or a.is_complex())
        # another layout moves values a little, and then indices and booleans of near ties flip
        if not a.numel() or _equal(a, b) or (discrete and not self.change.exact):
            return _Found(axes=axes)
        usual = max(_RTOL.get(t.dtype.to_real(), 0.0) for t in (a, b))
        rtol = self.exact_rtol if self.change.exact else usual if self.rtol is None else self.rtol
        finite = a[a.isfinite() & (a.abs() < 1e30)].abs().double()  # masks hold huge numbers
        atol = rtol * float(finite.square().mean().sqrt()) if len(finite) else 0.0
        d = difference(a, b, rtol, atol)
        return _Found(d.n_different, d.rel_error, d.max_abs_error, axes)

    def rows(self) -> list[InvarianceRow]:
        """Return a row for each output that was judged; set `place` where a dependence begins."""
        tree, modules, made = self.ref.tree, self.ref.modules, list[InvarianceRow]()
        outputs, inputs_differ = dict[Call, dict[str, _Found]](), set[Call]()
        for (call, side, path), found in self.found.items():
            if side == "out":
                outputs.setdefault(call, {})[path] = found
            elif found.n_different:
                inputs_differ.add(call)
        differ = {c for c, paths in outputs.items() if any(f.n_different for f in paths.values())}
        stays = set(outputs) - differ
        # a difference inside a call that stays has no effect: it is unused, or masked later
        outputs_differ = {c for c in differ if not any(outer in stays for outer in tree.around(c))}
        for call in [*outputs_differ]:  # an outer call without judged outputs differs too
            outputs_differ |= {outer for outer in tree.around(call) if outer not in outputs}
        first = tree.first(inputs_differ, outputs_differ)
        if first is None:
            first = next((c for c in tree.ended if c in outputs_differ), None)
        if first is not None and first not in outputs:  # its row has the errors of tensors inside
            inside = [f for (c, *_), f in self.found.items() if tree.parent[c] == first]
            outputs[first] = {"": max(inside)}
        for call in tree.ended:
            m = modules[call.name]
            for path, found in outputs.get(call, {}).items():
                value = self.ref.values.get((call, "out", path))
                shape = () if value is None else tuple(value.shape)
                where = call.name + path, type(m).__name__, call.n, path, shape
                row = InvarianceRow(*where, self.change.words, *found)
                if call == first and row.differs:
                    mode = m.training and (hasattr(m, "running_mean") or "Drop" in row.type)
                    words = ["in training mode"] * mode + [tree.place(call, inputs_differ)]
                    row, first = replace(row, place=", ".join(filter(None, words))), None
                made.append(row)
        return made


def _holds(way: Reading, needs: str, by_call: bool) -> bool:
    samples = any(axis.samples for axis in way)
    positions = by_call or any(axis.positions for axis in way)
    return {"samples": samples, "positions": positions, "either": samples or positions}[needs]


# --- float64


class _Float64(TorchFunctionMode):
    """Replaces narrower floating point dtypes by float64 in all calls of torch functions."""

    _NARROW = (torch.float32, torch.float16, torch.bfloat16)
    _CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(x: Any) -> Any:
            return torch.float64 if isinstance(x, torch.dtype) and x in self._NARROW else x

        kwargs = {k: wide(v) for k, v in (kwargs or {}).items()}
        # Private, torch 2.9 to 2.13: mixtures of experts call it, and it takes no float64. Without
        # this a model that has one is not confirmed.
        if getattr(func, "__name__", "") == "_grouped_mm" and args[0].ndim == 2 < args[1].ndim:
            rows = args[0].tensor_split(kwargs["offs"][:-1].long().cpu())
            return torch.cat([x @ w for x, w in zip(rows, args[1], strict=True)])
        return (Tensor.double if func in self._CASTS else func)(*map(wide, args), **kwargs)


def _effect(rows: list[InvarianceRow]) -> float:
    """Return the relative error of the model's output, or where the dependence begins."""
    # the model's name is "", so the name of its rows is the path alone
    whole = [r.rel_error for r in rows if r.name == r.path and r.differs]
    return max(whole or [r.rel_error for r in rows if r.place is not None], default=0.0)


def _confirmed(
    rows: list[InvarianceRow], in_float64: Callable[[], list[InvarianceRow]], rtol: float
) -> tuple[list[InvarianceRow], str]:
    """Return the rows without a dependence that is only rounding, and a note about it.

    A small error may be rounding. Rounding vanishes in float64; a dependence stays as large.
    """
    size, default = _effect(rows), torch.get_default_dtype()
    first = next(r for r in rows if r.place is not None)
    if size > _SMALL * rtol and first.rel_error > rtol / 10:
        return rows, ""
    text = f"{rows[0].change}: the output changes by {size:.1g}"
    try:
        torch.set_default_dtype(torch.float64)
        with _Float64():
            wide = in_float64()
        if (rest := _effect(wide)) > size / 10:
            again = next(r for r in wide if r.place is not None)
            if (again.name, again.call) == (first.name, first.call):
                return rows, ""
            return wide, f"{rows[0].change}: errors in float64, since {first.label} rounds"
        note = f"{text} by rounding, in float64 by {rest:.1g}"
    except Exception as error:
        note = f"{text}, not confirmed in float64 ({type(error).__name__}: {str(error)[:60]})"
        if size > rtol / 10:
            return rows, note
    finally:
        torch.set_default_dtype(default)
    return [replace(r, place=None, n_different=0) for r in rows], note


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
    """Find the first layer whose output depends on something that it must not depend on.

    The model runs unchanged, and again with changes that must not matter: without gradients, in the
    current modes of its modules, from the same random state. Its state is restored afterwards.
    Compiled models run eagerly. The tensors of all layers are kept in memory meanwhile.

    If a change keeps all shapes, no bit of a value may differ. A change of the layout uses other
    kernels, so a tolerance applies; it is skipped if the model draws random numbers. Small errors
    are confirmed with a copy in float64. A run with one more sample and two fewer positions shows
    which axes hold samples and positions.

    Args:
        model: a model; a batch of one sample is enough.
        *inputs: for the model.
        to: `"future"`: later positions (causality). `"batch"`: the other samples, and that there
            are any. `"order"`: the order of the samples. `"padding"`: the padding, and that there
            is any. `"packing"`: the other documents in a row. `"cache"`: one token at a time with a
            cache, or all at once. `"repeat"`: the same call again, and another random state.
        vary: the name of the input that is changed; by default the first that is no mask.
        batch_dim: the axis of samples of that input.
        seq_dim: the axis of positions of that input. By default integers with two axes and floats
            with three have it as the second (as the first if `batch_dim` is 1).
        padded: for `"padding"`, (samples, positions), true where padding is. By default the input
            with "mask" in its name says it.
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

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    >>> x = torch.randn(3, 4)
    >>> print(check_invariance(net, x, to="batch").verdict)
    1 (BatchNorm1d) depends on the other samples, in training mode
    >>> check_invariance(net.eval(), x, to="batch").first is None
    True
    """
    check_choice(WHO, "to", to, _DEPENDS)
    check_hookable(unwrap(check_module(WHO, model)), WHO)
    if rtol is not None:
        check_number(WHO, "rtol", rtol, 0)
    options = {"padded": padded, "documents": documents, "decode": decode}
    options = {name: value for name, value in options.items() if value is not None}

    def prepare(model: nn.Module, inputs: Inputs) -> tuple[_Reference, list[Change]]:
        root = unwrap(model)
        modules = {n: m for n, m, first in walk(root) if first and can_run(m)}
        given = Given(root, inputs, to, vary, batch_dim, seq_dim)
        given, changes = getattr(input_changes, to)(given, **options)
        return _Reference(model, modules, given), changes

    @cache  # for each of the changes
    def wide() -> tuple[_Reference, list[Change]]:
        given = Inputs(inputs, kwargs)
        given = tree_map(lambda t: t.double() if t.is_floating_point() else t, given)
        return prepare(copy.deepcopy(unwrap(model)).double(), given)

    def in_float64(i: int) -> list[InvarianceRow]:
        ref, changes = wide()
        return _Comparison(ref, changes[i], rtol, exact_rtol=_RTOL[torch.float64] / 10).rows()

    ref, changes = prepare(model, Inputs(inputs, kwargs))
    dtypes = {t.dtype.to_real() for t in ref.values.values()}
    usual = max((_RTOL[dtype] for dtype in dtypes if dtype in _RTOL), default=0.0)
    notes = [ref.given.describe(), *ref.notes] if to != "repeat" else []
    rows, not_judged = list[InvarianceRow](), list[str]()
    reasons = dict[Place, str]()
    for i, change in enumerate(changes):
        if not change.exact and ref.draws:
            why = "the model draws random numbers, and others in another layout"
            not_judged.append(f"{change.words} ({why})")
            continue
        if change.anywhere and not ref.has_one_vocabulary():
            not_judged.append(f"{change.words} (no Embedding takes all of {ref.given.name})")
            continue
        try:
            compared = _Comparison(ref, change, rtol)
        except Exception as error:
            if (change.exact and not change.anywhere) or len(changes) == 1:
                error.add_note(f"{WHO}: raised with {change.words}")
                raise
            not_judged.append(f"{change.words} ({type(error).__name__}: {str(error)[:99]})")
            continue
        reasons |= compared.unjudged
        new = compared.rows()
        if change.needs and any(r.place is not None for r in new):
            new, note = _confirmed(new, partial(in_float64, i), usual)
            notes += [note] * bool(note)
        rows += new
        if any(r.place is not None for r in new):
            break
    if not rows:
        tried = "; ".join(not_judged) or f"no output follows the size of {ref.given.name}"
        cure = "Call model.eval()" if ref.draws and not_judged else "Give batch_dim= and seq_dim="
        raise ArgumentError(f'{WHO}(to="{to}"): nothing was compared: {tried}. {cure}.')
    judged, by_reason = {(r.name, r.call) for r in rows}, dict[str, dict[str, None]]()
    for (call, side, path), why in reasons.items():
        if side == "out" and (call.name + path, call.n) not in judged:
            by_reason.setdefault(why, {})[(call.name or "(model)") + path] = None
    not_judged += [f"{', '.join(names)}: {why}" for why, names in by_reason.items()]
    return Invariance(tuple(rows), to, tuple(not_judged), tuple(notes))
