"""`find_nonfinite`: the function, and the line of source, that makes the first NaN or Inf.

In the forward a `TorchFunctionMode` looks at what each torch function is given and returns. The
first Inf by time is often a mask, which ends in a softmax. So only values with an effect count: the
search begins at the model's output and follows the tensors that are not finite back to the call
that made the first of them. Where no torch function was seen to make one (scripted code, another
library's kernels), the rule of `first_difference` names the module.

In the backward each node of the autograd graph is asked whether it made a gradient that is not
finite out of gradients that are. The search follows them from the parameters back to the loss.
Anomaly mode, without its checks, keeps the line of the forward that made each node.

"Bad" in names and comments here: holds NaN or Inf.
"""

from __future__ import annotations

import linecache
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from hookkit._core.graph import graph_nodes, op_name
from hookkit._core.modules import can_run, class_name, unwrap, walk
from hookkit._core.pytree import Inputs, tree_leaves, tree_leaves_with_path
from hookkit._core.text import harmless
from hookkit.errors import ArgumentError
from hookkit.hooks.attach import attach, remove_all
from hookkit.hooks.calls import recomputing
from hookkit.hooks.functions import plain_name, running_modules, writes_in_place
from hookkit.hooks.values import is_transforming
from hookkit.inspection.differences import dense
from hookkit.inspection.first_difference import Call, CallTree, Localisation
from hookkit.inspection.preserve import preserve_state, real_inputs
from hookkit.inspection.tree import storage_of

_HOME, _TORCH = (str(Path(p).parent) + os.sep for p in (__file__, torch.__file__))
_HOME = str(Path(_HOME).parent) + os.sep
_MODELS = f"{_HOME}testing{os.sep}"
_UNSEEN = "something that is no torch function"
_LINE = re.compile(r'\s*File "(.*)", line (\d+), in .*\n\s*(.*)')


@dataclass(frozen=True)
class NonFiniteCall:
    """A call that returned NaN or Inf, or a node of the backward that did.

    Attributes:
        name: the innermost module that was running, `""` for the model itself or none.
        type: that module's class, `""` for none.
        function: the torch function (`sqrt`, `div` for `/`), or the operation of a node. If the
            values were there before, where they came from: `the parameter 0.weight`.
        backward: the gradients are not finite.
        file: the source file of the innermost call outside of PyTorch; `""` if it is not known.
        line: its line, from 1.
        code: the text of the line.
        made: how many of the returned values are NaN and Inf, in words.
        given: the range of what it was given, in words.
        inputs_finite: whether all inputs (gradients) that it was given are finite; None where it
            was given none.
    """

    name: str
    type: str
    function: str
    backward: bool = False
    file: str = ""
    line: int = 0
    code: str = ""
    made: str = ""
    given: str = ""
    inputs_finite: bool | None = None

    @property
    def label(self) -> str:
        """The function, its line and its module: `sqrt (net.py:41) in blocks.1 (Block)`."""
        what = f"backward of {self.function}" if self.backward else self.function
        at = f" ({Path(self.file).name}:{self.line})" if self.file else ""
        where = f" in {self.name or 'the model'} ({self.type})" if self.type else ""
        return harmless(f"{what}{at}{where}")


@dataclass(frozen=True, repr=False)
class NonFinite(Localisation):
    """What made the first NaN or Inf in a run of a model. Ask `found.first is None`.

    Attributes:
        rows: the call that made it, and those that passed it on to the output, as they ran; in the
            backward each node that made one out of finite gradients, as they ran.
        not_judged: what could not be seen, each with the reason.
        ran_backward: whether the backward was run too.
    """

    rows: tuple[NonFiniteCall, ...]
    not_judged: tuple[str, ...] = ()
    ran_backward: bool = False
    _AGREES: ClassVar[str] = "everything is finite"

    @property
    def first(self) -> NonFiniteCall | None:
        """The call, or node of the backward, that made the first NaN or Inf; None for none."""
        return self.rows[0] if self.rows else None

    @property
    def verdict(self) -> str:
        """The function, its line, its module and whether its inputs were finite, in one line."""
        first = self.first
        if first is None:
            every = " and every gradient of a parameter" * self.ran_backward
            return f"no NaN or Inf: the output{every} is finite"
        given = "gradients" if first.backward else "inputs"
        finite = {None: "", True: f", of finite {given}", False: f", of {given} that are not"}
        return f"first non-finite: {first.label}{finite[first.inputs_finite]}"

    def text(self) -> str:
        """Return the verdict, the line of source, the values, and where they went from there."""
        lines, first = [self.verdict], self.first
        if first is not None:
            lines += [f"  {harmless(first.code)}"] * bool(first.code)
            lines += [f"  made {first.made}" + f", given {first.given}" * bool(first.given)]
            more = f" and {len(self.rows) - 4} more" if len(self.rows) > 4 else ""
            then = "also" if first.backward else "then"
            rest = ", ".join(row.label for row in self.rows[1:4]) + more
            lines += [f"  {then}: {rest}"] * bool(rest)
        return "\n".join([*lines, *(f"  not judged: {reason}" for reason in self.not_judged)])


def find_nonfinite(
    model: nn.Module,
    *inputs: Any,
    backward: bool = False,
    loss: Callable[[Any], Tensor] | None = None,
    **kwargs: Any,
) -> NonFinite:
    """Run a model once, and name the function and line that make the first NaN or Inf.

    What does not reach the output does not count: a mask of `-inf` that a softmax takes away. The
    model runs layer by layer, without compiled code, in the mode that it is in, and is put back as
    it was (see `preserve_state`). Enter `torch.autocast` around this call if you train in it.

    Args:
        model: any model; one inside wrappers (compile, DDP) runs without them.
        *inputs: of the model; they are copied.
        backward: if the forward is finite, run the backward too, and name what makes the first
            gradient that is not finite and reaches a parameter, or an input that requires one.
        loss: a function of the model's output that returns the loss, one number. Without it the
            loss in the output is taken; if there is none, the gradient of each output is 1.
        **kwargs: further inputs of the model, by keyword.

    Returns:
        A `NonFinite`; its `.first` is None if all is finite.

    Raises:
        ArgumentError: `model` is no module, or `backward=True` and no output has a gradient.

    Cost: each tensor is read and waited for; on a CPU about three forwards.

    >>> class Root(nn.Module):
    ...     def forward(self, x):
    ...         return torch.sqrt(x - 1)
    >>> found = find_nonfinite(nn.Sequential(nn.Identity(), Root()), torch.zeros(2))
    >>> found.first.function, found.first.name, found.first.made, found.first.inputs_finite
    ('sqrt', '1', '2 of 2 NaN', True)
    >>> find_nonfinite(nn.Linear(2, 2), torch.zeros(2), backward=True)
    no NaN or Inf: the output and every gradient of a parameter is finite
    """
    root = unwrap(check_module("find_nonfinite", model))
    check_flag("find_nonfinite", "backward", backward)
    if loss is not None and not callable(loss):
        raise ArgumentError("find_nonfinite: loss= is a function of the model's output.")
    given = Inputs(inputs, kwargs)

    def run(copied: list[Inputs]) -> list[Any]:
        return [root(*copied[0], **copied[0].kwargs)]

    return search(root, [("", given)], run, backward=backward or loss is not None, loss=loss)


def search(
    root: nn.Module,
    given: list[tuple[str, Inputs]],
    run: Callable[[list[Inputs]], list[Any]],
    *,
    backward: bool,
    loss: Callable[[Any], Tensor] | None = None,
    grads: Sequence[Any] | None = None,
    layer: str | None = None,
) -> NonFinite:
    """Make calls of `root`, or of modules in it, and name what makes the first NaN or Inf.

    Args:
        root: the model, without wrappers.
        given: of each call, the module's name and its inputs.
        run: makes these calls with copies of the inputs, and returns what each returned.
        backward: goes on with the backward if all is finite.
        loss: as in `find_nonfinite`; of the last output.
        grads: in place of a loss: what each call's outputs got as gradients, a list that is
            parallel to the tensors in the outputs; None for those that got none.
        layer: a module whose outputs count too, if they reach the model's output or not.
    """
    modules = {name: m for name, m, first in walk(root) if first and can_run(m)}
    functions, tree = _Functions(root), CallTree()
    bad_inputs, bad_outputs = set[Call](), set[Call]()
    candidates = list[Tensor]()
    nodes = _Nodes(root)

    def before(call: Call, _: nn.Module, args: Any, kwargs: Any) -> None:
        if any(map(functions.counts, tree_leaves((args, kwargs)))):
            bad_inputs.add(call)

    def after(call: Call, _: nn.Module, out: Any) -> None:
        if bad := [t for t in tree_leaves(out) if functions.counts(t)]:
            bad_outputs.add(call)
            candidates.extend(bad if call.name == layer else ())

    with ExitStack() as undo:
        undo.enter_context(preserve_state(root))
        copied = [real_inputs(inputs) for _, inputs in given]
        for (name, _), own in zip(given, copied, strict=True):
            functions.know(f"the input{{}} of {name or 'the model'}", tree_leaves_with_path(own))
        if backward:
            undo.enter_context(torch.enable_grad())
            # keeps the line that made each node
            undo.enter_context(torch.autograd.set_detect_anomaly(True, check_nan=False))
            undo.callback(
                remove_all, [attach(m, partial(nodes.own, n)) for n, m in modules.items()]
            )
        undo.callback(remove_all, [*tree.follow(modules, before, after)])
        value, failed = None, tuple[str, ...]()
        try:
            with functions:
                outputs = run(copied)
                if loss is not None:
                    value = loss(outputs[-1])
        except Exception as error:
            if functions.last is None:
                raise
            # the model's own check, or an index: the last call before it is the likely cause
            failed = (f"what follows: {type(error).__name__}: {error}"[:200],)
            outputs = [functions.last.tensors]
        candidates += [t for t in tree_leaves([outputs, value]) if is_bad(t)]
        if candidates:
            rows = functions.path_to(candidates)
            call = tree.first(bad_inputs, bad_outputs)
            if rows is None and call is not None:
                rows = [_of_module(modules[call.name], call, tree.place(call, bad_inputs))]
            rows = rows or [NonFiniteCall("", "", _UNSEEN)]
            return NonFinite(tuple(rows), failed)
        if not backward:
            return NonFinite(())
        ends = _ends(outputs, value, grads)
        if not ends:
            raise ArgumentError(
                "find_nonfinite(backward=True): no output of the model has a gradient. Its "
                "parameters may all be frozen, or the forward may run in torch.no_grad()."
            )
        inputs = [t for t in tree_leaves(copied) if t.requires_grad]
        found = nodes.run([p for p in root.parameters() if p.requires_grad] + inputs, ends)
        return NonFinite(tuple(found), (), True)


def is_bad(t: Tensor) -> bool:
    """Return whether a tensor holds NaN or Inf; False if its values cannot be read."""
    if not (t.is_floating_point() or t.is_complex()) or t.is_meta or is_transforming():
        return False
    try:
        t = dense(t)
        t = t.float() if t.itemsize == 1 else t  # float8 has no arithmetic
        return not bool(t.isfinite().all())  # sync: one for each tensor
    except (RuntimeError, NotImplementedError):  # nested and fake tensors
        return False


def _words(tensors: Iterable[Tensor]) -> str:
    """Return the range of the values of the first three tensors, and how many are NaN and Inf."""
    words = []
    for t in [t for t in tensors if t.is_floating_point() and t.numel() and not t.is_meta][:3]:
        values = dense(t).float()
        finite, n = values[values.isfinite()], values.numel()
        low_high = f"{float(finite.min()):.4g} to {float(finite.max()):.4g}" if len(finite) else ""
        nan, inf = int(values.isnan().sum()), int(values.isinf().sum())
        bad = f"{nan} of {n} NaN" * bool(nan), f"{inf} of {n} Inf" * bool(inf)
        kind = f" ({str(t.dtype)[6:]})" if t.dtype is not torch.float32 else ""
        words.append(" and ".join(filter(None, [low_high, *bad])) + kind)
    return "; ".join(words)


def users_line() -> tuple[str, int, str]:
    """Return file, line and text of the innermost frame that is not PyTorch's or hookkit's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_users(file):
            return file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip()
        frame = frame.f_back
    return "", 0, ""


def _is_users(file: str) -> bool:
    own = file.startswith((_TORCH, "<frozen")) or (
        file.startswith(_HOME) and not file.startswith(_MODELS)
    )
    return not own


def _of_module(m: nn.Module, call: Call, place: str) -> NonFiniteCall:
    """Return the row of a module in which no torch function was seen to make what is not finite."""
    what = f"{_UNSEEN}{f', {place}' * bool(place)}"
    return NonFiniteCall(call.name, class_name(m), what, inputs_finite=True)


# --- the forward


@dataclass(eq=False)
class _Made:
    """A call that returned something bad, or a tensor that was bad before the run.

    Attributes:
        nan: NaN is in it, not only Inf.
        is_mask: an Inf that the user wrote as a constant, or made of nothing but such.
        parents: what made the bad tensors that it was given.
        tensors: the bad ones that it returned. They stay alive, so that no memory is used twice.
    """

    row: NonFiniteCall
    nan: bool
    is_mask: bool
    parents: list[_Made] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)


class _Functions(TorchFunctionMode):
    """Notes each torch function that returns something bad, and which bad tensors it was given."""

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.names = {id(m): name for name, m, first in walk(root) if first}
        self.made = dict[Any, _Made]()  # by the memory of what was returned
        self.last: Any = None
        self._before = dict[Any, tuple[str, Tensor]]()  # tensors from before the run, by memory
        self.know("the parameter {}", root.named_parameters())
        self.know("the buffer {}", root.named_buffers())

    def know(self, text: str, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Remember tensors that are there before the run, and what to call them."""
        for name, t in tensors:
            self._before[storage_of(t)[0]] = text.format(name), t

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` in PyTorch's place, and note it if it returns something bad."""
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        bad_given = [t for t in given if is_bad(t)]
        parents = [*{id(made): made for made in map(self._maker, bad_given)}.values()]
        name, inplace = plain_name(func), writes_in_place(getattr(func, "__name__", ""))
        range_before = _words(given) if inplace else None
        out = func(*args, **kwargs)
        bad = [t for t in tree_leaves([out, args[0] if name == "setitem" else None]) if is_bad(t)]
        if not inplace:  # a view of a bad tensor is that tensor
            views = {storage_of(t)[0] for t in bad_given}
            bad = [t for t in bad if storage_of(t)[0] not in views]
        if bad:
            m = next((m for m in running_modules() if id(m) in self.names), None)
            where = ("", "") if m is None else (self.names[id(m)], class_name(m))
            constants = [x for x in _numbers(args, kwargs) if not math.isfinite(x)]
            values = _words(given) if range_before is None else range_before
            values = "; ".join(filter(None, [values, *map(str, constants[:1])]))
            finite = not bad_given and not constants
            row = NonFiniteCall(*where, name, False, *users_line(), _words(bad), values, finite)
            nan = any(bool(dense(t).isnan().any()) for t in bad)
            written = bool(constants or parents) and all(p.is_mask for p in parents)
            made = _Made(row, nan, written and not nan, parents, bad)
            self.last = self.last if made.is_mask else made
            self.made.update((storage_of(t)[0], made) for t in bad)
        return out

    def _maker(self, t: Tensor) -> _Made:
        """Return what made a bad tensor."""
        key = storage_of(t)[0]
        if key not in self.made:
            text, own = self._before.get(key, ("", t))
            nan = bool(dense(t).isnan().any())
            row = NonFiniteCall("", "", text or _UNSEEN, made=_words([own]))
            # a mask of -inf in an input or a buffer is meant
            is_mask = not nan and not bool((dense(t) == math.inf).any())
            self.made[key] = _Made(row, nan, is_mask, tensors=[t])
        return self.made[key]

    def path_to(self, bad: list[Tensor]) -> list[NonFiniteCall] | None:
        """Return the calls from the first maker to one of the bad tensors, in the order of the run.

        None if the maker is not known.
        """
        makers = [self._maker(t) for t in bad]
        makers.sort(key=lambda m: m.is_mask)  # an output with a mask, and one that has an error
        path = [makers[0]]
        while parents := [p for p in path[-1].parents if not p.is_mask and p not in path]:
            path.append(max(parents, key=lambda p: p.nan == path[-1].nan))
        return None if path[-1].row.function == _UNSEEN else [made.row for made in reversed(path)]

    def counts(self, t: Tensor) -> bool:
        """Return whether a tensor is bad, and not a mask."""
        return is_bad(t) and not self._maker(t).is_mask


def _numbers(*x: Any) -> Iterator[float]:
    """Yield the floats in nested tuples, lists and dicts."""
    for v in x:
        if isinstance(v, tuple | list | dict):
            yield from _numbers(*(v.values() if isinstance(v, dict) else v))
        elif isinstance(v, float):
            yield v


# --- the backward


def _ends(outputs: list[Any], loss: Tensor | None, grads: Sequence[Any] | None) -> list[Any]:
    """Return where the backward begins: pairs of a tensor and its gradient, None for a loss."""
    if grads is not None:
        pairs = zip((t for out in outputs for t in tree_leaves(out)), grads, strict=True)
        return [(t, g) for t, g in pairs if t.requires_grad and g is not None]
    found = loss if loss is not None else loss_in(outputs[-1])[0]
    if found is not None:
        return [(found, None)] if found.requires_grad else []
    # not the gradient of their sum, which may overflow
    return [(t, torch.ones_like(t)) for t in tree_leaves(outputs) if t.requires_grad]


class _Nodes:
    """Notes which nodes of an autograd graph make bad gradients, and follows these to the first.

    Attributes:
        owner: the innermost module that made each node in its forward.
        users: for each node the nodes that hand it gradients, with the number of theirs that it
            gets.
        seen: for each node that ran, in that order, whether it was given something bad, and which
            of the gradients that it returned are bad.
        rows: of the nodes that made something bad of what is finite.
    """

    def __init__(self, root: nn.Module) -> None:
        self.types = {name: class_name(m) for name, m, first in walk(root) if first}
        self.owner = dict[Any, str]()
        self.users = dict[Any, list[tuple[Any, int]]]()
        self.seen = dict[Any, tuple[bool, list[bool]]]()
        self.rows = dict[Any, NonFiniteCall]()
        self._followed, self._handles = set[Any](), list[Any]()

    def own(self, name: str, m: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        """Note the nodes that a call of a module has made. Those inside it have returned before."""
        before = {t.grad_fn for t in tree_leaves((args, kwargs))}
        todo = [t.grad_fn for t in tree_leaves(out)]
        while todo:
            node = todo.pop()
            if node is not None and node not in before and node not in self.owner:
                self.owner[node] = name
                todo += [n for n, _ in node.next_functions]
        if recomputing():  # a checkpoint has a graph of its own, with a backward of its own
            self.follow(tree_leaves(out))

    def follow(self, tensors: list[Tensor]) -> None:
        """Look at each node of the graph that made these tensors as soon as it has run."""
        for node, _ in graph_nodes(tensors):
            if node not in self._followed:
                self._followed.add(node)
                self._handles.append(node.register_hook(partial(self._after, node)))
                for i, (before, _n) in enumerate(node.next_functions):
                    if before is not None:
                        self.users.setdefault(before, []).append((node, i))

    def _after(self, node: Any, grad_inputs: Any, grad_outputs: Any) -> None:
        """Note what a node of the backward has made of what."""
        bad = [g is not None and is_bad(g) for g in grad_inputs]
        given = [g for g in grad_outputs if isinstance(g, Tensor)]
        taken = any(map(is_bad, given))
        self.seen[node] = taken, bad
        if any(bad) and not taken:
            made = [g for g, is_it in zip(grad_inputs, bad, strict=True) if is_it]
            values = ", of values ".join(filter(None, [_words(given), _words(_saved(node))]))
            self.rows[node] = self._row(node, _words(made), f"gradients {values}", True)

    def _row(self, node: Any, made: str, given: str, finite: bool) -> NonFiniteCall:
        name, words = self.owner.get(node), re.sub("(?<=[a-z0-9])(?=[A-Z])", "_", op_name(node))
        where = ("", "") if name is None else (name, self.types[name])
        return NonFiniteCall(*where, words.lower(), True, *_line_of(node), made, given, finite)

    def run(self, leaves: list[Tensor], ends: list[Any]) -> list[NonFiniteCall]:
        """Run the backward; return the nodes that made what is bad in the gradients of `leaves`.

        Args:
            leaves: parameters, and inputs that require a gradient.
            ends: pairs of a tensor where the backward begins, and its gradient.
        """
        tensors, given = ([*column] for column in zip(*ends, strict=True))
        self.follow(tensors)
        # Private: `_post_accumulate_grad_hooks` (since 2.1), which only a backward that fills
        # `.grad` calls. Without it they are called: an optimizer in them makes a step.
        hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in leaves)
        reentrant = any(op_name(node) == "CheckpointFunction" for node in self._followed)
        if reentrant and hooked:
            raise ArgumentError(
                "find_nonfinite: a checkpoint with use_reentrant=True needs a backward that fills "
                ".grad, and the hooks on the parameters would step the optimizer. "
                "Use use_reentrant=False."
            )
        try:
            if reentrant:
                for p in leaves:
                    p.grad = None  # put back by `preserve_state`
                torch.autograd.backward(tensors, given)
                made = tuple(p.grad for p in leaves)
            else:
                made = torch.autograd.grad(tensors, leaves, given, allow_unused=True)
        finally:
            remove_all(self._handles)
        bad = {id(p) for p, g in zip(leaves, made, strict=True) if g is not None and is_bad(g)}
        todo = [node for node in self.users if id(getattr(node, "variable", None)) in bad]
        ended, reached, found = {t.grad_fn for t in tensors}, set(todo), set[Any]()
        while todo:
            node = todo.pop()
            users = self.users.get(node, ())
            givers = [u for u, i in users if u in self.seen and self.seen[u][1][i]]
            if not givers and node in ended:
                what = "the loss, outside of the model"
                return [NonFiniteCall("", "", what, True, given=f"outputs {_words(tensors)}")]
            if not givers and self.rows:  # the end of a checkpoint's own graph
                found.add(next(iter(self.rows)))
            elif not givers:  # the sum of what several nodes gave left the range of its dtype
                self.rows[node] = self._row(node, "", "finite gradients, whose sum is not", True)
            found.update(u for u in [node, *givers] if u in self.rows)
            new = [u for u in givers if u not in reached and u not in self.rows]
            reached.update(new)
            todo += new
        return [row for node, row in self.rows.items() if node in found]


def _saved(node: Any) -> Iterator[Tensor]:
    """Yield the tensors that a node has kept from the forward."""
    # Private: `_saved_NAME`, where autograd keeps what it needs (since 1.9). Without it the values
    # are not in the text.
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except RuntimeError:  # freed, or kept in a form that Python cannot read
                continue
            if isinstance(value, Tensor):
                yield value


def _line_of(node: Any) -> tuple[str, int, str]:
    """Return file, line and text of the line of the forward that made a node."""
    # Private: the key "traceback_", under which anomaly mode keeps the lines that
    # `traceback.format_stack` gives (since 1.6). Without it the line is not known.
    for text in reversed(node.metadata.get("traceback_", [])):
        found = _LINE.match(text)
        if found and _is_users(found[1]):
            return found[1], int(found[2]), found[3].strip()
    return "", 0, ""
