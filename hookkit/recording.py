"""`HookCallback`: where hooks meet a training loop. Subclass it with `def hook(self, m, i, o)`.

It builds on `Callback` and `Hooks`, and is the one place that registers and removes a callback's
hooks: once per fit, whatever ends it. Whether a forward is recorded is decided in one
place (`_is_recorded`) when each batch begins, and stored in one `RecordSwitch` that all hooks of a
callback share. So `every` works at any `order`, and a compiled model, which guards on the switch
alone, has two graphs at most, unless it gets other modules meanwhile: these are hooked as the next
recorded batch begins.

The hooks store what `hook` returns. Those of recorders (`ActivationStats`, …) store nothing, and
hand what they see to something else: a recorder says in `_entries` what goes on one module. The
file is longer than 300 lines, since the options of hooks, their events and their life are read
together.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from threading import get_ident
from typing import Any, ClassVar
from weakref import WeakMethod, ref

import torch
from torch import nn

from hookkit.callbacks.callback import Callback, calls
from hookkit.checks import check_flag, check_function, check_number, shown
from hookkit.errors import ArgumentError, HookkitError, HookkitWarning, OptionError
from hookkit.hooks import Hooks
from hookkit.hooks.block import Block
from hookkit.hooks.compiling import forget_graphs
from hookkit.hooks.entries import Placed
from hookkit.hooks.snapshot import FUNCTION_OF, Kind, Options
from hookkit.interrupts import uninterrupted
from hookkit.modules import Parts
from hookkit.selecting import leaf_modules, select

_NEEDED = {
    "before_fit": "puts the hooks on",
    "before_batch": "decides whether a batch is recorded",
    "cleanup_fit": "takes the hooks off",
}


class RecordSwitch(Block):
    """Whether this forward is recorded, and by whom: shared by all hooks of one callback.

    Attributes:
        on: whether hooks record.
        late: the model's forward has returned. A layer that is called on its own now is recorded if
            it takes part in the loss.
        target: what recorders show tensors to.
        given: what they show the inputs of each layer in this batch; None: nobody.
    """

    __slots__ = ("given", "late", "target")

    def __init__(self) -> None:
        super().__init__(Options())
        self.on, self.late, self.target = False, False, None  # type: tuple[bool, bool, Any]
        self.given: Callable[[int, Any], None] | None = None


class HookCallback(Callback):
    """Hooks the modules of a model while it trains; the hooks are removed at the end.

    What `hook` returns for each module is in `self.hooks.stored`, in the order of `names`, and
    stays readable after the fit. Without a `hook` that is the output. Modules are looked up again
    for each fit, and at a recorded batch that finds others in the model than there were: `hooks`
    are then on those. As in fastai, the hooks run in validation too, unless `every` or
    `on_valid=False` is given; `self.recording` says whether they ran in this batch. A cancelled
    batch is not counted by `every`.

    Args:
        modules: which: a module, a name, a glob, a type, a predicate, or a list of these, as for
            `select`; None takes every module without children that has parameters, [] none.
        every: records every n-th training batch, beginning with the first of each fit, and no
            validation batch; None records all.
        remove_end: takes the hooks off at the end of the fit; after an error they go in any case.
        is_forward: calls `hook(m, inputs, outputs)` after each forward; False calls
            `hook(m, grad_inputs, grad_outputs)` in each backward, with tuples of gradients.
        detach: gives `hook` detached tensors.
        cpu: moves what `hook` returns to the CPU.
        include_paramless: with `modules=None`, takes modules without parameters too.
        hook: the function to call, `f(m, i, o)` or `f(o)`, instead of a subclass's method.
        on_train: whether training batches are recorded. With False, the events within a training
            batch (`before_batch` … `after_batch`) are not called either.
        on_valid: the same for validation batches. The recorders (`ActivationStats`, …) have False.

    Attributes:
        modules: the hooked modules, a list, from `before_fit` on; before, the argument as given.
        names: the hooked modules' names, parallel to `modules` and `hooks`.
        hooks: the `Hooks` of this fit, or of the last; None before the first.
        recording: whether the current batch is recorded.

    Raises:
        OptionError: `every` is below 1, or given with `on_train=False`.
        ArgumentError: `modules` or `hook` is of a kind that cannot work.
        SelectionError: as the fit begins: `modules` names what the model has not.

    >>> from hookkit.testing import synth_learner
    >>> shapes = HookCallback(hook=lambda m, i, o: tuple(o.shape))
    >>> with synth_learner(cbs=shapes).no_logging() as learn: learn.fit(1)
    >>> dict(zip(shapes.names, shapes.hooks.stored))
    {'': (16, 1)}
    """

    _renamed: ClassVar[Mapping[str, str]] = {"do_remove": "remove_end"}

    # Of recorders, a method `_entries(name, module, leaf)`: what goes on `module` in place of what
    # stores, each entry with its place. `leaf` is the path to the part of the output that was
    # selected; a subclass's `hook`, or one that is given, is in `_function`.
    _entries: Callable[[str, nn.Module, str], list[Placed]] | None = None

    _saved: ClassVar[tuple[str, ...]] = ("_batch_count", "_last_iter")
    hooks: Any = None
    _switch: RecordSwitch
    _parts: Parts | None = None
    _hooked: list[ref[nn.Module]] | None = None  # since `before_fit`
    _selectors: list[Any] | None  # the selectors
    _given: Any  # the same, as they were given

    def __init__(
        self,
        modules: Any = None,
        every: int | None = None,
        remove_end: bool = True,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = True,
        include_paramless: bool = False,
        hook: Callable[[nn.Module, Any, Any], Any] | None = None,
        *,
        on_train: bool = True,
        on_valid: bool = True,
    ) -> None:
        who = type(self).__name__
        self.modules, self.every = modules, _checked_every(who, every)
        self.remove_end = check_flag(who, "remove_end", remove_end)
        self.is_forward = check_flag(who, "is_forward", is_forward)
        self.detach, self.cpu = check_flag(who, "detach", detach), check_flag(who, "cpu", cpu)
        self.include_paramless = check_flag(who, "include_paramless", include_paramless)
        self.run_train = self.on_train = check_flag(who, "on_train", on_train)
        self.run_valid = self.on_valid = check_flag(who, "on_valid", on_valid)
        if self.every and not self.on_train:
            raise OptionError(
                f"{who}(every={every!r}, on_train=False): `every` counts training batches, and "
                f"none is recorded. Leave out `every`."
            )
        self._given_hook = None if hook is None else self._as_hook(hook)
        self.names: list[str] = []
        self._switch = RecordSwitch()
        self._batch_count, self._last_iter, self._ended = 0, -1, False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        is_own = cls.__module__.partition(".")[0] == "hookkit"
        for event, does in () if is_own else _NEEDED.items():
            if event in vars(cls) and not calls(vars(cls)[event], event):
                warnings.warn(
                    f"{cls.__name__}.{event} does not call super().{event}(), which {does}. "
                    f"Call it there.",
                    HookkitWarning,
                    stacklevel=2,
                )

    def hook(self, m: nn.Module, i: Any, o: Any) -> Any:
        """What to keep of one call of module `m` with inputs `i` and output `o`; override it.

        With `is_forward=False`, `i` and `o` are the gradients of the inputs and of the outputs.
        """
        return o if self._given_hook is None else self._given_hook(m, i, o)

    @property
    def recording(self) -> bool:
        """Whether the current batch is recorded."""
        return self._switch.on

    @property
    def modules(self) -> Any:
        """The hooked modules, a list, from `before_fit` on; before, the argument as given.

        Held weakly: the callback does not keep a model alive. Setting it selects others for the
        next fit.
        """
        if self._hooked is None:
            return self._given
        return [module for held in self._hooked if (module := held()) is not None]

    @modules.setter
    def modules(self, given: Any) -> None:
        self._selectors = _checked_modules(type(self).__name__, given)
        # a generator can be read only once
        self._given = self._selectors if isinstance(given, Iterator) else given
        self._hooked = None

    @property
    def _function(self) -> Callable[..., Any] | None:
        """What is called for each hooked module: `hook=`, else a subclass's method; None without.

        As in fastai, the function that an instance was given goes before its class's method.
        """
        if self._given_hook is not None:
            return self._given_hook
        own = getattr(self.hook, "__func__", self.hook)
        return None if own is HookCallback.hook else self._as_hook(self.hook)

    def _as_hook(self, hook: Any) -> Callable[..., Any]:
        seen = FUNCTION_OF["forward" if self.is_forward else "backward"]
        func: Callable[..., Any] = check_function(type(self).__name__, hook, *seen, name="hook")
        return func

    # --- events

    def before_fit(self) -> None:
        """Looks the modules up and hooks them."""
        if not (self.learn.fitting or self.on_valid):
            return  # a validation that is not recorded must not reset what was recorded before
        self._remove()
        self._batch_count, self._last_iter, self._ended = 0, -1, False
        self._hook_all(self.learn.model)
        self._parts = Parts(self.learn.model)

    def before_train(self) -> None:
        """Switches recording off: the batches to come switch it on, if they are recorded."""
        self._record(False)

    before_validate = before_train

    def before_batch(self) -> None:
        """Decides whether this batch is recorded."""
        on = self._is_recorded()
        if self.learn.training:
            self._batch_count, self._last_iter = self._batch_count + 1, self.learn.train_iter
        if on:
            self._follow()
        self._record(on)

    def _is_recorded(self) -> bool:
        """Whether the batch that begins is recorded."""
        if self.learn.training:
            return self.on_train and self._batch_count % (self.every or 1) == 0
        return self.on_valid and self.every is None  # as in fastai

    def after_cancel_batch(self) -> None:
        """Does not count a cancelled training batch."""
        if self.learn.training and self._last_iter == self.learn.train_iter:
            self._batch_count -= 1

    def after_fit(self) -> None:
        """Notes that the fit came to its end: without `remove_end` the hooks then stay."""
        self._ended = True

    def cleanup_fit(self) -> None:
        """Takes the hooks off."""
        self._parts = None
        if self.remove_end or not self._ended or self.learn._broken:
            self._remove()
        else:
            self._record(True)

    # --- hooks

    def _select(self, model: nn.Module) -> Any:
        """The modules to hook, by name."""
        if self._selectors is not None:
            return select(model, *self._selectors) if self._selectors else {}  # [] is none, not all
        leaves = leaf_modules(model)
        found: Any = {n: m for n, m in leaves.items() if next(m.parameters(), None) is not None}
        found = leaves if self.include_paramless else found or leaves
        # scripted modules run no Python hooks: hooked only if they were selected by name
        return {n: m for n, m in found.items() if not isinstance(m, torch.jit.ScriptModule)}

    def _hook_all(self, model: nn.Module) -> None:
        """Finds the modules and hooks them; all of them, or it raises."""
        found = self._select(model)
        self._register(found)
        self.names = list(found)
        self._hooked = [ref(module) for module in found.values()]
        forget_graphs(model)  # a compiled model that has run would not see the hooks

    def _follow(self) -> None:
        """Hooks what has come into the model since."""
        if self._parts is None or not self._parts.changed():
            return
        model = self.learn.model
        try:
            self._hook_all(model)
        except HookkitError as error:
            _warn_of_changed_model(type(self).__name__, error)
        self._parts = Parts(model)  # only now: it has kept what was hooked, so no id came twice

    @uninterrupted
    def _register(self, modules: Mapping[str, nn.Module]) -> None:
        """Hooks `modules`, all of them, or it raises and those that were hooked still are."""
        self._switch.thread = get_ident()
        if self.hooks is None or self.hooks.removed:
            self._switch.options = self._options()
            self.hooks = Hooks.of(modules, self._switch.options, self._switch)
        else:
            self.hooks._move_to(modules)
        self._record(False)

    def _options(self) -> Options:
        """What the hooks do: store what `hook` returns, or what a recorder has in `_entries`."""
        if self._entries is not None:
            # weak, or the callback and its hooks would keep each other alive
            entries: Any = WeakMethod(self._entries)
            who, of = type(self).__name__, lambda *what: entries()(*what)
            return Options(who, "recorder", keep="none", entries=of)
        kind: Kind = "forward" if self.is_forward else "both"
        func = self._function or (lambda m, i, o: o)
        return Options("HookCallback", kind, func, self.detach, self.cpu)

    @uninterrupted
    def _remove(self) -> None:
        """Removes whatever `_register` registered; called often, so nothing may be there."""
        self._switch.on = False
        if self.hooks is not None:
            self.hooks.remove()

    def _record(self, on: bool) -> None:
        """Switches recording for the batch that begins: so drivers pause a callback, too."""
        self._switch.on = on

    def __getstate__(self) -> dict[str, Any]:
        # a pickle needs neither hooks nor activations
        gone = dict.fromkeys(("hooks", "_hooked", "_parts"))
        return {**super().__getstate__(), **gone, "_switch": RecordSwitch()}


def _warn_of_changed_model(who: str, error: HookkitError) -> None:
    warnings.warn(
        f"{who} found other modules in the model than when the training began, and cannot hook "
        f"them, so what was hooked is recorded on: {error} Start again, with {who}(modules=…) "
        f"naming what is there.",
        HookkitWarning,
        stacklevel=2,
    )


def _checked_every(who: str, every: Any) -> int | None:
    what = "how many batches there are for each that is recorded, None for 1"
    return None if every is None else check_number(who, "every", every, 1, whole=True, what=what)


def _checked_modules(who: str, modules: Any) -> list[Any] | None:
    """`modules` as a list; a generator is read now, since each fit needs it again."""
    if modules is None:
        return None
    if isinstance(modules, (bool, int, float)):
        raise ArgumentError(
            f"{who}(modules={shown(modules)}): that selects no layers. Give a module, a name, a "
            f"glob, a type, a predicate, or a list of these."
        )
    if isinstance(modules, (nn.ModuleList, Iterator)) or type(modules) in (list, tuple):
        return list(modules)
    return [modules]
