"""`find_nonfinite` finds the function and the line of source that make the first NaN or Inf.

In the forward a `TorchFunctionMode` sees each torch function. The first Inf in time is often a mask
that a softmax removes. So the search starts at the output, and follows NaN and Inf back to the call
that made the first of them. In the backward a hook on each autograd node notes which nodes turned
good gradients into bad ones, and the search goes from the parameters' gradients to the loss.

"Bad" in the names and comments of this file: holds NaN or Inf.
"""

from __future__ import annotations

import linecache
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hookkit._core.batches import loss_in
from hookkit._core.checks import check_flag, check_module
from hookkit._core.devices import accelerator
from hookkit._core.graph import graph_nodes, op_name
from hookkit._core.modules import can_run, class_name, find, unwrap, walk
from hookkit._core.pytree import Inputs, tree_leaves, tree_leaves_with_path
from hookkit._core.random_state import random_states, set_random_states
from hookkit._core.text import escape_controls
from hookkit.errors import ArgumentError
from hookkit.hooks.attach import attach, remove_all
from hookkit.hooks.functions import plain_name, running_modules, writes_in_place
from hookkit.hooks.values import is_transforming
from hookkit.inspection.differences import dense
from hookkit.inspection.first_difference import Call, CallTree, Localisation
from hookkit.inspection.preserve import clone_inputs, preserve_state
from hookkit.inspection.tree import storage_of

_HOME, _TORCH = Path(__file__).parents[1], Path(torch.__file__).parent
_NOT_USERS = f"{_HOME}{os.sep}", f"{_TORCH}{os.sep}", "<frozen"
_UNSEEN = "a function that was not seen"
# functions, by their plain names, whose result is memory as it was: it may hold NaN
_ALLOCATE = frozenset(
    ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")
)
_FILL = frozenset(("full", "full_like", "new_full", "fill"))
# functions that, in place, replace values of their first argument and do not read them
_OVERWRITE = frozenset(("copy", "fill", "fill_diagonal", "put", "scatter", "setitem", "zero")) | {
    "index_copy",
    "index_fill",
    "index_put",
    "masked_fill",
    "masked_scatter",
}
_LINE = re.compile(r'\s*File "(.*)", line (\d+), in ')


@dataclass(frozen=True)
class NonFiniteCall:
    """Describes a call, or a node of the backward, that returned NaN or Inf.

    Attributes:
        name, type: the innermost module that was running, and its class; `""` for none.
        function: the torch function (`sqrt`; `div` for `/`), or the operation of the node; for
            values from before the run, where they are: `the parameter 0.weight`.
        backward: gradients are not finite.
        file, line: the innermost line of source outside of PyTorch; `""` and 0 if not known.
        made, given: the values of the result and of the inputs, in words.
        inputs_finite: whether all inputs (gradients) were finite; None if there were none, or if
            the function allocates memory that was read before a function wrote it.
    """

    name: str
    type: str
    function: str
    backward: bool = False
    file: str = ""
    line: int = 0
    made: str = ""
    given: str = ""
    inputs_finite: bool | None = None

    @property
    def label(self) -> str:
        """Return function, line and module, such as `sqrt (net.py:41) in blocks.1 (Block)`."""
        at = f" ({Path(self.file).name}:{self.line})" if self.file else ""
        where = f" in {self.name or 'the model'} ({self.type})" if self.type else ""
        return escape_controls("backward of " * self.backward + self.function + at + where)


@dataclass(frozen=True, repr=False)
class NonFinite(Localisation):
    """Holds what made the first NaN or Inf in a run; `found.first is None` if all is finite.

    Attributes:
        rows: the call that made it and the calls that passed it on to the output, in order; in the
            backward the nodes that made it from finite gradients, or NaN from Inf.
        not_judged: what could not be checked, with the reason.
    """

    rows: tuple[NonFiniteCall, ...]
    not_judged: tuple[str, ...] = ()
    _AGREES: ClassVar[str] = "everything is finite"

    @property
    def first(self) -> NonFiniteCall | None:
        """Return the call or node that made the first NaN or Inf; None if all is finite."""
        return self.rows[0] if self.rows else None

    @property
    def verdict(self) -> str:
        """Return in one line the function, its place, and whether its inputs were finite."""
        if self.first is None:
            return "no NaN or Inf"
        given = "gradients" if self.first.backward else "inputs"
        masked = f", of {given} with a mask or constant of Inf or NaN"
        finite = {None: "", True: f", of finite {given}", False: masked}
        return f"first non-finite: {self.first.label}{finite[self.first.inputs_finite]}"

    def text(self) -> str:
        """Return the verdict, the line of source, the values, and where they went from there."""
        lines, first = [self.verdict], self.first
        if first is not None:
            code = linecache.getline(first.file, first.line).strip()
            values = f"made {first.made or '?'}" + f", given {first.given}" * bool(first.given)
            then = ", ".join(row.label for row in self.rows[1:4]) + ", …" * (len(self.rows) > 4)
            lines += [f"  {line}" for line in (code, values, f"then: {then}" * bool(then)) if line]
        return "\n".join([*lines, *(f"  not judged: {reason}" for reason in self.not_judged)])


def find_nonfinite(
    model: nn.Module,
    *inputs: Any,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> NonFinite:
    """Run a model once, and find the function and the line that make the first NaN or Inf.

    Values that do not reach the output do not count, such as a mask of `-inf` that a softmax
    removes. The model runs without its wrappers and compiled code, in its current mode, and its
    state is restored (see `preserve_state`). If you train in `torch.autocast`, call this in it.

    Args:
        model: any model.
        *inputs: the model's positional inputs; they are copied.
        backward: if the forward is finite, run the backward too, and name what makes the first
            gradient that is not finite and reaches a parameter, or an input that requires one.
        loss: a function of the model's output, for the backward. By default the backward starts at
            the loss in the output; if there is none, at all outputs with gradients of 1.
        **kwargs: the model's keyword inputs.

    Raises:
        ArgumentError: `model` is no module; no output needs a gradient, or the backward goes
            through a checkpoint with `use_reentrant=True`.

    Cost: on a CPU about 15 forwards, with the backward 25. Each tensor is waited for.

    >>> class Root(nn.Module):
    ...     def forward(self, x):
    ...         return torch.sqrt(x - 1)
    >>> found = find_nonfinite(nn.Sequential(nn.Identity(), Root()), torch.zeros(2))
    >>> found.first.function, found.first.name, found.first.made, found.first.inputs_finite
    ('sqrt', '1', '2 of 2 NaN', True)
    >>> find_nonfinite(nn.Linear(2, 2), torch.zeros(2), backward=True)
    no NaN or Inf
    """
    root = unwrap(check_module("find_nonfinite", model))
    backward = check_flag("find_nonfinite", "backward", backward) or loss is not None
    call = ModelCall("", Inputs(inputs, kwargs), grad=backward or torch.is_grad_enabled())
    return search(root, [call], backward, loss)


def _autocast() -> dict[str, tuple[bool, torch.dtype]]:
    devices = dict.fromkeys(("cpu", accelerator()))
    return {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices}


@dataclass
class ModelCall:
    """Holds what is needed to repeat one call of a model or of a module in it.

    Attributes:
        name: the module's name, `""` for the model itself.
        inputs, output: by reference, not copied.
        random: the random states before the call.
        autocast: type of device → (whether autocast was on, its dtype).
        grad: whether gradients were on.
        grads: gradients of the output's tensors, by number; if it holds a loss, only the loss's.
    """

    name: str
    inputs: Inputs
    random: dict[str, Any] = field(default_factory=random_states)
    autocast: dict[str, Any] = field(default_factory=_autocast)
    grad: bool = field(default_factory=torch.is_grad_enabled)
    output: Any = None
    grads: dict[int, Tensor] = field(default_factory=dict)

    def repeat(self, root: nn.Module, inputs: Inputs) -> Any:
        """Make the call again with `inputs`, a copy of its own; return what the module returns."""
        set_random_states(self.random)
        with ExitStack() as undo:
            for device, (enabled, dtype) in self.autocast.items():
                undo.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            undo.enter_context(torch.set_grad_enabled(self.grad))
            found: Any = find(root, self.name)
            return found[1](*inputs, **inputs.kwargs)

    def ends(self, output: Any) -> list[Any]:
        """Return where the backward of `output` begins: pairs of a tensor and its gradient."""
        tensors = tree_leaves(output)
        return [(tensors[i], g.to(tensors[i].device)) for i, g in self.grads.items()]


def search(
    root: nn.Module,
    calls: list[ModelCall],
    backward: bool,
    loss: Callable[[Any], Tensor] | None = None,
    layer: str | None = None,
) -> NonFinite:
    """Repeat calls of `root`, or of modules in it, and find what makes the first NaN or Inf.

    Args:
        root: the model, without wrappers.
        calls: in their order. If they have `grads`, the backward starts from these.
        backward: also run the backward if the forward is finite.
        loss: as in `find_nonfinite`.
        layer: a module whose outputs count even if they do not reach the model's output.
    """
    modules = {name: m for name, m, first in walk(root) if first and can_run(m)}
    functions, nodes, tree = _Functions(root), _Nodes(modules), CallTree()
    bad_inputs, bad_outputs = set[Call](), set[Call]()
    bad, failed = list[Tensor](), tuple[str, ...]()

    def before(call: Call, _: nn.Module, args: Any, kwargs: Any) -> None:
        if any(map(functions.counts, tree_leaves((args, kwargs)))):
            bad_inputs.add(call)

    def after(call: Call, _: nn.Module, out: Any) -> None:
        if found := [t for t in tree_leaves(out) if functions.counts(t)]:
            bad_outputs.add(call)
            bad.extend(found if call.name == layer else ())

    with ExitStack() as undo:
        undo.enter_context(preserve_state(root))
        inputs = [clone_inputs(call.inputs) for call in calls]
        for call, own in zip(calls, inputs, strict=True):
            of = f"of {call.name or 'the model'}"
            functions.know((f"the input {path} {of}", t) for path, t in tree_leaves_with_path(own))
        if backward:  # to keep the line that made each node
            undo.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            for name, m in modules.items():
                undo.callback(attach(m, partial(nodes.own, name)).remove)
        undo.callback(remove_all, [*tree.follow(modules, before, after)])
        value = None
        try:
            with functions:
                outputs = [c.repeat(root, own) for c, own in zip(calls, inputs, strict=True)]
                if loss is not None:
                    value = loss(outputs[-1])
        except Exception as error:  # such as a check of the model's own for NaN
            if functions.last is None:
                raise
            failed = (f"what follows on {type(error).__name__}: {error}"[:200],)
            outputs = [functions.last.tensors]
        bad += [t for t in tree_leaves([outputs, value]) if is_bad(t)]
        if bad:
            rows = functions.path_to(bad)
            maker = tree.first(bad_inputs, bad_outputs)
            if not rows and maker is not None:
                what = ", ".join(filter(None, [_UNSEEN, tree.place(maker, bad_inputs)]))
                kind = class_name(modules[maker.name])
                rows = [NonFiniteCall(maker.name, kind, what, inputs_finite=True)]
            return NonFinite(tuple(rows or [NonFiniteCall("", "", _UNSEEN)]), failed)
        unread = ("what torch.func computes, and nested tensors",) * functions.met_unreadable
        if not backward:
            return NonFinite((), unread)
        if not (ends := _ends(calls, outputs, value)):
            raise ArgumentError("find_nonfinite: no output of the model needs a gradient.")
        leaves = [t for t in [*root.parameters(), *tree_leaves(inputs)] if t.requires_grad]
        found = nodes.run(leaves, ends)
        # fused attention can return finite values for NaN inputs, and NaN only in its backward
        hidden = functions.hidden.get(next(iter(found), None), [])
        rows = functions.path_to(hidden) if hidden else []
        return NonFinite((*rows, *found.values()), unread)


def _ends(calls: list[ModelCall], outputs: list[Any], loss: Tensor | None) -> list[Any]:
    """Return where the backward begins: pairs of a tensor and its gradient, None for a loss."""
    if loss is None and any(call.grads for call in calls):
        ends = [end for call, out in zip(calls, outputs, strict=True) for end in call.ends(out)]
    elif loss is not None or (loss := loss_in(outputs[-1])[0]) is not None:
        ends = [(loss, None)]
    else:  # not their sum, which may overflow
        ends = [(t, torch.ones_like(t)) for t in tree_leaves(outputs)]
    return [(t, grad) for t, grad in ends if t.requires_grad]


def is_bad(t: Tensor) -> bool:
    """Return whether a tensor holds NaN or Inf; False if its values cannot be read."""
    if not (t.is_floating_point() or t.is_complex()) or t.is_meta or is_transforming():
        return False
    try:
        return bool(_bad_values(t).any())  # sync: one for each tensor
    except (RuntimeError, NotImplementedError):  # nested and fake tensors
        return False


def _bad_values(t: Tensor) -> Tensor:
    """Return a bool tensor that is True where `t` is NaN or Inf."""
    t = dense(t)
    return ~(t.float() if t.itemsize == 1 else t).isfinite()  # float8 has no arithmetic


def _has_nan(t: Tensor) -> bool:
    return bool(dense(t).isnan().any())


def _words(tensors: Iterable[Tensor]) -> str:
    """Return the range of the values of the first three tensors, and how many are NaN and Inf."""
    words = list[str]()
    for t in [] if is_transforming() else [t for t in tensors if t.is_floating_point()][:3]:
        if t.is_meta or t.is_nested or not t.numel():
            continue
        values = dense(t).float()
        finite, n = values[values.isfinite()], values.numel()
        low_high = f"{float(finite.min()):.4g} to {float(finite.max()):.4g}" if len(finite) else ""
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        bad = f"{nan} of {n} NaN" * bool(nan), f"{inf} of {n} Inf" * bool(inf)
        kind = f" ({str(t.dtype)[6:]})" if t.dtype is not torch.float32 else ""
        words.append(" and ".join(filter(None, [low_high, *bad])) + kind)
    return "; ".join(words)


# --- the forward


@dataclass(eq=False)
class _Made:
    """Records a call that returned something bad, or a tensor that was bad before the run.

    Attributes:
        row: the call, as the result shows it.
        nan: whether there is a NaN, not only Inf.
        is_mask: whether it is Inf that comes only from constants or other masks.
        is_prefilled: whether it is memory as it was allocated, or filled with a constant.
        parents: the records of what made its bad inputs.
        tensors: the bad results; kept, so that PyTorch does not reuse their memory.
        where: for a write in place, a bool tensor: which values of its result the call made bad.
        before: for a write in place, the record of what made that memory bad before; or None.
    """

    row: NonFiniteCall
    nan: bool
    is_mask: bool
    is_prefilled: bool
    parents: list[_Made]
    tensors: list[Tensor]
    where: Tensor | None = None
    before: _Made | None = None

    @property
    def is_replaced(self) -> bool:
        """Return whether a later call has written finite values over all that this call wrote."""
        if self.where is None:
            return False
        return not bool((_bad_values(self.tensors[0]) & self.where).any())


class _Functions(TorchFunctionMode):
    """Notes each torch function that returns something bad, and what made its bad inputs.

    Attributes:
        made: memory of a bad tensor → the record of what made it.
        last: the latest record that is not a mask, or None.
        met_unreadable: whether there were values that `is_bad` cannot read.
        hidden: autograd node → the bad inputs (no masks) of a call that returned finite values.
    """

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.modules = {id(m): (name, class_name(m)) for name, m, first in walk(root) if first}
        self.made = dict[Any, _Made]()
        self.last: _Made | None = None
        self.hidden, self.met_unreadable = dict[Any, list[Tensor]](), False
        self._names = dict[Any, str]()  # of the tensors from before the run, by their memory
        self.know((f"the parameter {name}", p) for name, p in root.named_parameters())
        self.know((f"the buffer {name}", t) for name, t in root.named_buffers())

    def know(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Note tensors that exist before the run, each with a text that names it."""
        self._names.update((storage_of(t)[0], text) for text, t in tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` in PyTorch's place, and note it if it returns something bad."""
        kwargs = kwargs or {}
        name, inplace = plain_name(func), writes_in_place(getattr(func, "__name__", ""))
        nested = any(t.is_nested for t in tree_leaves((args, kwargs)))
        self.met_unreadable |= is_transforming() or nested
        allocates, overwrites = name in _ALLOCATE, inplace and name in _OVERWRITE and bool(args)
        inplace |= kwargs.get("out") is not None
        # `given` has only tensors that are read: others do not explain the result
        given = tree_leaves((args[1:] if overwrites else args, {**kwargs, "out": None}))
        if allocates or (name in _FILL and not inplace):
            given = []
        bad_given = [t for t in given if is_bad(t)]
        parents = [*dict.fromkeys(map(self._maker, bad_given))]
        values = _words(given) if inplace else None  # as they were before
        before, written = None, None
        if overwrites and is_bad(args[0]):
            # the same write over zeros tells new bad values from old ones that it leaves
            before, written = self._maker(args[0]), torch.zeros_like(args[0])
            with torch.no_grad():
                func(written, *args[1:], **kwargs)
        out = func(*args, **kwargs)
        bad = [t for t in tree_leaves([out, args[0] if name == "setitem" else None]) if is_bad(t)]
        if before is not None and written is not None and bad:
            if not is_bad(written):  # all bad values are old
                return out
            if bool((_bad_values(args[0]) & ~_bad_values(written)).any()):
                parents.append(before)
        if not inplace:  # a view shows bad values that another call made
            views = {storage_of(t)[0] for t in bad_given}
            bad = [t for t in bad if storage_of(t)[0] not in views]
        if not bad and (hidden := [t for t in bad_given if not self._maker(t).is_mask]):
            self.hidden.update((t.grad_fn, hidden) for t in tree_leaves(out) if t.grad_fn)
        if bad:
            running = (self.modules[id(m)] for m in running_modules() if id(m) in self.modules)
            numbers = (x for x in (*args, *kwargs.values()) if isinstance(x, float))
            constants = [str(x) for x in numbers if not math.isfinite(x)]
            values = _words(given) if values is None else values
            values = "; ".join(filter(None, [values, *constants]))
            (module, kind), (file, line) = next(running, ("", "")), _line()
            finite = None if allocates else not (parents or constants)
            what = f"{name}, memory that no seen function wrote" if allocates else name
            row = NonFiniteCall(module, kind, what, False, file, line, _words(bad), values, finite)
            nan = any(map(_has_nan, bad))
            only_masks = bool(constants or parents) and all(made.is_mask for made in parents)
            prefilled = (allocates or name in _FILL) and not parents
            tensors = [t.detach() for t in bad]  # keep their shape if the model calls y.t_()
            made = _Made(row, nan, only_masks and not nan, prefilled, parents, tensors)
            if inplace and len(bad) == 1:
                made.where = _bad_values(bad[0] if written is None else written)
                made.before = self.made.get(storage_of(bad[0])[0])
            self.last = self.last if made.is_mask or allocates else made
            self.made.update((storage_of(t)[0], made) for t in bad)
        return out

    def _maker(self, t: Tensor) -> _Made:
        """Return the record of what made a bad tensor; make one if its maker was not seen."""
        key = storage_of(t)[0]
        while key in self.made and self.made[key].is_replaced:  # older values are left
            if (before := self.made.pop(key).before) is not None:
                self.made[key] = before
        if key not in self.made:
            row = NonFiniteCall("", "", self._names.get(key, _UNSEEN), made=_words([t]))
            # -inf alone, in an input or a buffer, is a mask
            plus, nan = bool((dense(t) == math.inf).any()), _has_nan(t)
            self.made[key] = _Made(row, nan, not (plus or nan), False, [], [t])
        return self.made[key]

    def counts(self, t: Tensor) -> bool:
        """Return whether a tensor is bad, and not a mask."""
        return is_bad(t) and not self._maker(t).is_mask

    def path_to(self, bad: list[Tensor]) -> list[NonFiniteCall]:
        """Return the calls that lead to one of `bad`, as they ran; [] if the first is not known."""
        # an error is preferred to a mask, and a NaN is followed to a NaN, an Inf to an Inf;
        # memory as it was before a write comes last, because a later write may replace its rest
        path = [min(map(self._maker, bad), key=lambda made: (made.is_mask, made.is_prefilled))]
        while parents := [p for p in path[-1].parents if not p.is_mask and p not in path]:
            nan = path[-1].nan
            path.append(max(parents, key=lambda p: (not p.is_prefilled, p.nan == nan)))
        known = path[-1].row.function != _UNSEEN
        return [made.row for made in reversed(path)] if known else []


def _line() -> tuple[str, int]:
    """Return file and line of the innermost frame outside of PyTorch and hookkit."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USERS):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


# --- the backward


class _Nodes:
    """Notes the bad gradients of each autograd node, and follows them back to the first.

    Attributes:
        owner: node → the name of the innermost module that made it.
        bad: node → for each of its results whether it is bad, in the order in which nodes ran.
        rows: the nodes that made something bad from finite gradients, or NaN from Inf.
    """

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.types = {name: class_name(m) for name, m in modules.items()}
        self.owner = dict[Any, str]()
        self.bad, self.rows = dict[Any, list[bool]](), dict[Any, NonFiniteCall]()

    def own(self, name: str, m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Note a module as the owner of the nodes that its call made, unless an inner call did.

        Inner calls end earlier, so they have noted their nodes already.
        """
        before = {t.grad_fn for t in tree_leaves((args, kwargs))}
        todo = [t.grad_fn for t in tree_leaves(out)]
        while todo:
            node = todo.pop()
            if node is not None and node not in before and node not in self.owner:
                self.owner[node] = name
                todo += [n for n, _ in node.next_functions]

    def _after(self, node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
        """Note which results of a node are bad, and make a row if its inputs do not explain it."""
        bad = self.bad[node] = [g is not None and is_bad(g) for g in grad_inputs]
        given = [g for g in grad_outputs if isinstance(g, Tensor)]
        made = [g for g, is_it in zip(grad_inputs, bad, strict=True) if is_it]
        finite = not any(map(is_bad, given))
        if made and (finite or (any(map(_has_nan, made)) and not any(map(_has_nan, given)))):
            self.rows[node] = self._row(node, _words(made), f"gradients {_words(given)}", finite)

    def _row(self, node: Any, made: str, given: str, finite: bool = True) -> NonFiniteCall:
        words = re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", op_name(node)).lower()
        name = self.owner.get(node, "")
        kind = self.types[name] if node in self.owner else ""
        file, line = "", 0
        # Private: the key "traceback_", under which anomaly mode keeps the lines that
        # `traceback.format_stack` gives (since 1.6). Without it the line is not known.
        for text in node.metadata.get("traceback_", []):
            if (found := _LINE.match(text)) and not found[1].startswith(_NOT_USERS):
                file, line = found[1], int(found[2])
        return NonFiniteCall(name, kind, words, True, file, line, made, given, finite)

    def run(self, leaves: list[Tensor], ends: list[Any]) -> dict[Any, NonFiniteCall]:
        """Run the backward; return the nodes that made the bad gradients of `leaves`, with rows.

        Args:
            leaves: parameters, and inputs that require a gradient.
            ends: pairs of a tensor at which the backward begins, and its gradient.
        """
        tensors, given = ([*column] for column in zip(*ends, strict=True))
        graph = [node for node, _ in graph_nodes(tensors)]
        if any(op_name(node) == "CheckpointFunction" for node in graph):
            raise ArgumentError(
                "find_nonfinite: a checkpoint hides its graph. Give it use_reentrant=False."
            )
        users, handles = dict[Any, list[tuple[Any, int]]](), []
        for node in graph:
            handles.append(node.register_hook(partial(self._after, node)))
            for i, (before, _n) in enumerate(node.next_functions):
                users.setdefault(before, []).append((node, i))
        try:  # not `.backward()`, which calls hooks that may step an optimizer
            made = torch.autograd.grad(tensors, leaves, given, allow_unused=True)
        finally:
            remove_all(handles)
        bad = {id(p) for p, g in zip(leaves, made, strict=True) if g is not None and is_bad(g)}
        todo = [node for node in users if id(getattr(node, "variable", None)) in bad]
        ended, reached = {t.grad_fn for t in tensors}, set(todo)
        while todo:  # from the bad leaves towards the loss, along bad gradients
            node = todo.pop()
            given_by = users.get(node, ())
            givers = {u for u, i in given_by if True in self.bad.get(u, [])[i : i + 1]}
            if not givers and node in ended:
                what = "the loss, outside of the model"
                return {node: NonFiniteCall("", "", what, True, given=f"outputs {_words(tensors)}")}
            if not givers:  # each gradient that the node got is finite
                self.rows[node] = self._row(node, "an overflow", "gradients whose sum it is")
            # a node that got only finite gradients is a maker: the search ends there
            makers = {u for u in givers if u in self.rows and self.rows[u].inputs_finite}
            todo += givers - reached - makers
            reached |= givers
        ran = dict.fromkeys([*self.bad, *self.rows])
        return {n: self.rows[n] for n in ran if n in reached and n in self.rows}
