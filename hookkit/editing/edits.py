"""Change what a layer gives, takes, or gets as gradient, for the time of a `with`.

Built on `attach(edit=True)` and on tensor hooks (`gradients`). An edit is one more hook of the
layer, and hooks run in the order in which they were written: what captures a layer before the edit
sees the layer's own output, what captures it after the edit sees the edited one.

    with hook_output(layer) as own, edit_output(layer, zero()), hook_output(layer) as edited:
        model(x)

The ready-made edits (`zero`, `scale`, `add`, `replace`, `patch_from`) are in `changing`, what one
edit does to one module in `rewriting`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from threading import get_ident
from warnings import warn

from torch import nn

from hookkit.checks import check_function
from hookkit.editing.changing import add, patch_from, replace, scale, zero
from hookkit.editing.rewriting import Edit, Function, Kind
from hookkit.errors import ArgumentError, CompiledWarning, NeverFiredWarning
from hookkit.hooks.collection import named_modules_of
from hookkit.hooks.compiling import compiled_modules, enter_eager, leave_eager
from hookkit.hooks.entries import check_hookable
from hookkit.interrupts import Scope, uninterrupted

__all__ = [
    "Edits",
    "add",
    "edit_grad",
    "edit_grads",
    "edit_input",
    "edit_inputs",
    "edit_output",
    "edit_outputs",
    "patch_from",
    "replace",
    "scale",
    "zero",
]

Modules = Iterable[nn.Module] | Mapping[str, nn.Module]
_MAKERS: tuple[Function, ...] = (add, patch_from, replace, scale, zero)


def edit_output(module: nn.Module, f: Function) -> Edits:
    """Replaces what `module` returns by what `f(module, input, output)` returns.

    Put in place at once, taken out by `remove()` or at the end of its `with` block, which says so
    if the layer was never reached. In the block, calls from other threads are not edited, and
    compiled models run eagerly.

    Args:
        module: the layer.
        f: gets the positional and keyword inputs as an `Inputs` tuple, and the live output; gives
            the replacement, of the same structure, or None to leave it. A function of one argument
            gets the output alone. Or a ready-made edit: `zero`, `scale`, `add`, `replace`,
            `patch_from`. It must not write into the output.

    Raises:
        ArgumentError: `module` is no module, or `f` no function.
        HookError: `module` is scripted; later, in the forward: a replacement of another structure.

    >>> import torch
    >>> net = nn.Sequential(nn.Identity(), nn.Flatten())
    >>> with edit_output(net[0], lambda module, input, output: output + 1):
    ...     net(torch.zeros(1, 2))
    tensor([[1., 1.]])
    """
    return _edits("edit_output", [(None, module, "")], f, "output")


def edit_outputs(modules: Modules, f: Function) -> Edits:
    """`edit_output` for several modules: put in place all or none, taken out together.

    Args:
        modules: an iterable of modules, a Sequential (its children), or what `select` returns,
            which brings names and leaf paths: of `"lstm[0]"` only that tensor is given to `f`.
        f: as in `edit_output`.

    >>> import torch
    >>> from hookkit.selecting import select
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> with edit_outputs(select(net, nn.Linear), zero()) as edits:
    ...     net(torch.ones(1, 2)).sum().item(), edits.n_calls
    (0.0, {'0': 1, '2': 1})
    """
    return _edits("edit_outputs", named_modules_of(modules, "edit_outputs"), f, "output")


def edit_input(module: nn.Module, f: Function) -> Edits:
    """Replaces what `module` is called with by what `f(module, input)` returns.

    Otherwise as `edit_output`. `input` is an `Inputs`: a tuple of the positional inputs, keyword
    inputs by name (`input["mask"]`, `input.kwargs`). `f` gives the one positional input, a tuple of
    as many as there are (keyword inputs stay), an `Inputs` for all, or None.

    >>> import torch
    >>> with edit_input(layer := nn.Identity(), scale(2)):
    ...     layer(torch.ones(2))
    tensor([2., 2.])
    """
    return _edits("edit_input", [(None, module, "")], f, "input")


def edit_inputs(modules: Modules, f: Function) -> Edits:
    """`edit_input` for several modules, see `edit_outputs`; leaf paths are into the inputs.

    >>> import torch
    >>> net = nn.Sequential(nn.Identity(), nn.Identity())
    >>> with edit_inputs(net, scale(3)):
    ...     net(torch.ones(2))
    tensor([9., 9.])
    """
    return _edits("edit_inputs", named_modules_of(modules, "edit_inputs"), f, "input")


def edit_grad(module: nn.Module, f: Function) -> Edits:
    """Replaces the gradient of each tensor that `module` returns by what `f(module, grad)` returns.

    Backward goes on from there with the replacement. Forward and backward have to run inside the
    block. `f` is called for each tensor of the output by itself, when its gradient arrives, and
    gives a tensor of its shape, or None; it must not write into `grad`. It sees the gradient as
    edits and hooks that were written before it left it. Otherwise as `edit_output`.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> with edit_grad(layer := nn.Identity(), scale(5)):
    ...     layer(x).sum().backward()
    >>> x.grad
    tensor([5., 5.])
    """
    return _edits("edit_grad", [(None, module, "")], f, "grad")


def edit_grads(modules: Modules, f: Function) -> Edits:
    """`edit_grad` for several modules, see `edit_outputs`.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> with edit_grads(net := nn.Sequential(nn.Identity(), nn.Identity()), scale(5)):
    ...     net(x).sum().backward()
    >>> x.grad
    tensor([25., 25.])
    """
    return _edits("edit_grads", named_modules_of(modules, "edit_grads"), f, "grad")


_SEEN: dict[Kind, tuple[str, ...]] = {
    "output": ("module", "input", "output"),
    "input": ("module", "input"),
    "grad": ("module", "grad"),
}
"""What the function of each kind of edit is called with."""


class Edits(Scope):
    """Edits that are in place on some modules. What `edit_output` and its like return.

    Removed by `remove()` or by the end of a `with` block; entering a removed one registers it again
    and counts anew.
    """

    def __init__(
        self, who: str, modules: list[tuple[str | None, nn.Module, str]], f: Function, kind: Kind
    ):
        if any(f is maker for maker in _MAKERS):
            raise ArgumentError(
                f"{who}: {f.__name__} makes an edit, and is none itself. Call it: "
                f"{'zero()' if f is zero else f.__name__ + '(…)'}."
            )
        f = check_function(who, f, *_SEEN[kind], name="f")
        for _, module, _ in modules:
            check_hookable(module, who)
        self._who = who
        edits: dict[tuple[int, str], Edit] = {}
        self._by_name: list[tuple[str | None, Edit]] = []
        for name, module, leaf in modules:
            # once for a module that was given twice, by two names of it: scale(2) is not scale(4)
            edit = edits.setdefault((id(module), leaf), Edit(who, name, module, leaf, f, kind))
            self._by_name.append((name, edit))
        self._edits = [*edits.values()]

    def register(self) -> None:
        """Puts the edits on their modules, all or none; nothing where they are."""
        try:
            for edit in self._edits:
                edit.register()
        except BaseException:
            self._take_off()
            raise

    @uninterrupted
    def remove(self) -> None:
        """Takes the edits off; nothing where they are off."""
        try:
            self._warn_if_compiled()
        finally:
            self._take_off()

    def _take_off(self) -> None:
        for edit in self._edits:
            edit.remove()

    @property
    def removed(self) -> bool:
        """True when no edit is in place."""
        return all(edit.handle is None for edit in self._edits)

    @property
    def n_calls(self) -> dict[str, int]:
        """How often each layer was reached, by its name (or position): calls, or gradients.

        Calls that activation checkpointing repeats are edited and not counted; nor are those of a
        compiled graph, into which an edit is traced that was there before its first call.
        """
        self._warn_if_compiled()
        return {name or str(i): edit.n_calls for i, (name, edit) in enumerate(self._by_name)}

    def _begin(self) -> None:
        if self.removed:
            for edit in self._edits:
                edit.n_calls, edit.elsewhere, edit.traced = 0, False, False
            self.register()
        for edit in self._edits:
            edit.thread = get_ident()
        enter_eager(self)

    def _undo(self) -> None:
        leave_eager(self)
        self._take_off()
        for edit in self._edits:
            edit.thread = None

    def _ended(self, e: BaseException | None) -> None:
        idle = [edit for edit in self._edits if not (edit.n_calls or edit.traced)]  # by an export
        if e is None and idle:
            names = "; ".join(f"{edit.label()}: {edit.why()}" for edit in idle[:5])
            warn(
                f"{self._who}: {len(idle)} of {len(self._edits)} edits were never reached: {names}"
                f"{'; …' if len(idle) > 5 else ''}. Run what reaches them inside the block.",
                NeverFiredWarning,
                stacklevel=4,
            )

    def _warn_if_compiled(self) -> None:
        """Warns of an edit left in place that compiled code ignores."""
        pairs = [(edit, edit.module()) for edit in self._edits if edit.is_idle()]
        compiled = compiled_modules() if pairs else {}
        for edit, module in pairs:
            if module is None or id(module) not in compiled:
                continue
            warn(
                f"{self._who}: {edit.label()} was never reached, and is {compiled[id(module)]}: "
                f"torch.compile ignores what is added after its first call. Use the edit in a "
                f"`with` block, or add it before that call, after torch.compiler.reset().",
                CompiledWarning,
                stacklevel=3,
            )
            return

    def __len__(self) -> int:
        return len(self._by_name)

    def __repr__(self) -> str:
        few = "1 module" if len(self) == 1 else f"{len(self)} modules"
        return f"Edits({self._who}, {few}{', removed' if self.removed else ''})"


def _edits(
    who: str, modules: list[tuple[str | None, nn.Module, str]], f: Function, kind: Kind
) -> Edits:
    """Edits that are in place. They exist before that: no interrupt can part them."""
    edits = Edits(who, modules, f, kind)
    edits.register()
    return edits
