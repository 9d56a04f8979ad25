"""One model of a comparison: its modules, and a run that shows what each of them gives.

Builds on `hooks` and `selecting`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hookkit.errors import ArgumentError
from hookkit.hooks import Hooks
from hookkit.hooks.entries import recomputing
from hookkit.hooks.snapshot import Options
from hookkit.interrupts import Undo
from hookkit.modelinfo import sandbox
from hookkit.modelinfo.tree import Tree
from hookkit.modules import unwrap
from hookkit.nested import Inputs, describe, leaves, tmap
from hookkit.selecting import Selection, select

WHO = "compare_models"


class Key(NamedTuple):
    """One value of a run: an output or a gradient, of one call of one module."""

    name: str
    what: str
    call: int


See = Callable[[Key, Any], Any]
Receive = Callable[[str, Inputs], Inputs | None]
Chosen = dict[str, tuple[nn.Module, str]]


class Side:
    """A model, and the modules of it whose values are compared.

    Args:
        which: `"first"` or `"second"`, for messages.
        model: as the user calls it.
        chosen: its modules by name, with the path of the part of the output that is meant.
        others: modules of which only is noted whether they run.

    Attributes:
        ran: the names of the others that ran.

    Raises:
        ArgumentError: parameters have no values.
    """

    def __init__(
        self, which: str, model: nn.Module, chosen: Chosen, others: Chosen | None = None
    ) -> None:
        if any(nn.parameter.is_lazy(p) or p.is_meta for p in model.parameters()):
            raise ArgumentError(
                f"{WHO}: the {which} model has parameters without values: on meta, or lazy. Load "
                "its weights, or run it once."
            )
        self.which, self.model, self.chosen, self.others = which, model, chosen, others or {}
        self.is_compiled = is_compiled(model)
        self.ran: dict[str, None] = {}  # an ordered set

    def run(
        self,
        given: Inputs,
        see: See,
        *,
        receive: Receive | None = None,
        loss: Callable[[Any], Tensor] | None = None,
    ) -> None:
        """Runs the model once and shows what its modules give, in the order in which they finish.

        The model and the random states are restored after each run, so that the next one begins
        as this one did, also where a forward writes into buffers.

        Args:
            given: its inputs, which are copied.
            see: called with each output, and with `loss` with the gradients; with `receive` it
                gives what is returned instead of an output, None for no change.
            receive: called as a module begins with its name and what it received; gives what it
                gets instead, None for no change.
            loss: gives what is differentiated.
        """
        with Undo() as stack:
            stack.enter_context(sandbox.restore_after(Tree(self.model), params=False))
            stack.enter_context(sandbox.preserve_random_states())
            hooks = {} if self.is_compiled else self.chosen
            order = _watch(stack, hooks, see, receive)
            kept = {
                name: _hook(stack, (name, *at), "grad", keep="all")
                for name, at in hooks.items()
                if loss is not None
            }
            for name, (m, _) in self.others.items():
                _hook(stack, (name, m, ""), "forward", hook_func=partial(self._note, name))
            out = self._called(given, see, differentiable=loss is not None)
            if self.is_compiled:
                see(Key("", "output", 0), out)
            if loss is not None:
                self._differentiate(loss(out), see, order, kept)

    def _note(self, name: str, _m: nn.Module, _i: Any, _o: Any) -> None:
        self.ran[name] = None

    def _called(self, given: Inputs, see: See, *, differentiable: bool) -> Any:
        copied = sandbox.real_inputs(given)
        if differentiable and not any(p.requires_grad for p in self.model.parameters()):
            for t in leaves(copied):
                t.requires_grad_(t.is_floating_point())
        self._inputs = copied
        try:
            out = self.model(*copied, **copied.kwargs)
            if isinstance(out, GeneratorType):  # whose layers run only now
                out = list(out)
                if "" in self.chosen:
                    see(Key("", "output", 0), out)
            return out
        except Exception as error:
            error.add_note(f"{WHO}: raised by the {self.which} model")
            raise

    def _differentiate(
        self, loss: Tensor, see: See, order: list[Key], hooks: dict[str, Hooks]
    ) -> None:
        """Shows the gradients of the outputs, the last one first, and of the parameters."""
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ArgumentError(
                f"{WHO}: loss gave {describe(loss)} for the output of the {self.which} model, and "
                "one number is differentiated. Give a function that returns a scalar tensor."
            )
        params = {
            f"{name}.{key}".lstrip(".").replace("_orig_mod.", ""): p
            for name, (m, _) in self.chosen.items()
            for key, p in m.named_parameters(recurse=[*self.chosen] == [""])
            if p.requires_grad
        }
        free = [t for t in leaves(self._inputs) if t.requires_grad]
        wanted = [*{id(p): p for p in self.model.parameters() if p.requires_grad}.values(), *free]
        if not loss.requires_grad:
            raise ArgumentError(
                f"{WHO}: grads=True, and the loss of the {self.which} model has no gradient. "
                "Give models with parameters that require one, and a loss that depends on them."
            )
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
        by_id = {id(p): grad for p, grad in zip(wanted, found, strict=True)}
        for name, _, call in reversed(order):
            if name in hooks:
                grads = hooks[name][0].calls[call]
                see(Key(name, "grad", call), grads[0] if len(grads or ()) == 1 else grads)
        for name, p in params.items():
            see(Key(name, "param_grad", 0), by_id.get(id(p)))


def _watch(stack: Undo, hooks: Chosen, see: See, receive: Receive | None) -> list[Key]:
    """Shows what modules receive and return until `stack` closes; the outputs as they come."""
    calls: Counter[str] = Counter()
    order: list[Key] = []

    def output(name: str, _m: nn.Module, _i: Any, out: Any) -> Any:
        if recomputing() or isinstance(out, GeneratorType):
            return None  # a checkpoint's second run; the model's own is shown when it has ended
        key = Key(name, "output", calls[name])
        calls[name] += 1
        order.append(key)
        return see(key, out)

    def inputs(name: str, _m: nn.Module, given: Inputs) -> Inputs | None:
        return receive(name, given) if receive and not recomputing() else None

    for name, (m, leaf) in hooks.items():
        if receive is not None:
            _hook(stack, (name, m, ""), "pre", hook_func=partial(inputs, name), edit=True)
        edit = receive is not None
        _hook(stack, (name, m, leaf), "forward", hook_func=partial(output, name), edit=edit)
    return order


def _hook(stack: Undo, named: tuple[str, nn.Module, str], kind: Any, **options: Any) -> Hooks:
    """A hook of one module until `stack` closes. Not by `with`, and not removed by `remove`, which
    both report what never fires.
    """
    keep = options.pop("keep", "none")
    hooks = Hooks.of_named([named], Options(WHO, kind, keep=keep, **options))
    stack.callback(hooks._remove)
    return hooks


def is_compiled(model: nn.Module) -> bool:
    """True if the model or a part of it is compiled: hooks inside would not see compiled code run.

    A model that is scripted as a whole is, too: it takes no hooks, and no module is around it.
    `_compiled_call_impl` is private, in torch 2.11 to 2.13: what `module.compile()` sets. Nothing
    public says so; without it such a model would run eagerly here.
    """
    return isinstance(unwrap(model), torch.jit.ScriptModule) or any(
        type(m).__name__ == "OptimizedModule" or getattr(m, "_compiled_call_impl", None) is not None
        for m in model.modules()
    )


def chosen_of(model: nn.Module, modules: Any) -> Chosen:
    """The modules that are compared by name: all that run and the model itself, or the selected.

    Scripted ones cannot be hooked; the module around them shows what they give.
    """
    root = unwrap(model)
    if modules is not None:
        what = modules if isinstance(modules, list | tuple) else [modules]
        return entries(select(root, *what))
    inner = entries(select(root)) if next(root.children(), None) is not None else {}
    every = {**inner, "": (root, "")}
    return {n: at for n, at in every.items() if not isinstance(at[0], torch.jit.ScriptModule)}


def entries(selection: Selection) -> Chosen:
    """The modules and paths of a selection by name."""
    return {name: (m, selection.leaf(name)) for name, m in selection.items()}


def adapted(given: Inputs, a: nn.Module | None, b: nn.Module) -> Inputs:
    """`given` for `b`: on its device, and in its dtype what was of the dtype of `a`."""
    (_, old), (device, new) = _home(a), _home(b)

    def fit(t: Tensor) -> Tensor:
        dtype = new if new is not None and t.dtype is old else t.dtype
        return t.to(device or t.device, dtype)

    fitted: Inputs = tmap(fit, given)
    return fitted


def _home(model: nn.Module | None) -> tuple[torch.device | None, torch.dtype | None]:
    """The device of a model's tensors, and the dtype of its parameters, where each is one."""
    if model is None:
        return None, None
    tensors = [*model.parameters(), *model.buffers()]
    devices = {t.device for t in tensors if not t.is_meta}
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    device = next(iter(devices)) if len(devices) == 1 else None
    return device, next(iter(dtypes)) if len(dtypes) == 1 else None
