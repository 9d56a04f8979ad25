"""`Hooks` holds many hooks, registers all or none of them, and saves what they stored in one file.

They are registered when they are made, and removed by `remove()` or at the end of a `with` block,
also after an error; entering the block again registers them again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from hookkit._core import distributed as ranks
from hookkit._core.checks import check_path
from hookkit._core.files import atomic_write
from hookkit._core.messages import missing_extra, no_such
from hookkit._core.modules import submodules, unwrap
from hookkit._core.pytree import tree_leaves_of_objects
from hookkit.errors import ArgumentError, HookError, OptionError, SelectionError
from hookkit.hooks.attach import check_hookable
from hookkit.hooks.hook import Hook
from hookkit.hooks.options import HookOptions, HookScope, hook_kind, silent_reasons
from hookkit.hooks.selection import Selection
from hookkit.hooks.values import Values

T = TypeVar("T")
Modules = Iterable[nn.Module] | Mapping[str, nn.Module]
Named = tuple[str | None, nn.Module, str]
"""A module's name, the module, and the path into its output, or ""."""


class Hooks:
    """Holds a `Hook` for each of several modules; they are registered and removed together.

    Supports `len`, `in`, iteration, `h[0]`, `h[1:3]`, and `h["fc"]` if the names are known. A
    `with` block records the calls of all threads.

    Args:
        ms: any number of modules. A Sequential stands for its children. If they come in a mapping,
            such as the result of `select`, the hooks can be read by name.
        hook_func: `f(module, input, output)`, or of one parameter `f(output)`; its result is
            stored. None stores the output.
        is_forward: False registers PyTorch's full backward hooks: `f(module, grad_in, grad_out)`.
        detach, cpu, gather, pre, edit, keep, clone, prepend: as for `Hook`.
        stop: in a `with`, the forward ends, and the block with it, when all of them have fired.

    Raises:
        ArgumentError, OptionError, HookError: as `Hook`; then none is registered.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    >>> with Hooks(net, lambda m, i, o: tuple(o.shape)) as h:
    ...     y = net(torch.randn(4, 5))
    >>> list(h.stored)
    [(4, 10), (4, 10), (4, 3)]
    """

    def __init__(
        self,
        ms: Modules,
        hook_func: Callable[..., Any] | None,
        is_forward: bool = True,
        detach: bool = True,
        cpu: bool = False,
        gather: bool = False,
        *,
        pre: bool = False,
        edit: bool = False,
        keep: str = "last",
        clone: bool = True,
        stop: bool = False,
        prepend: bool = False,
    ) -> None:
        kind = hook_kind("Hooks", is_forward, pre)
        more: Any = {"keep": keep, "clone": clone, "stop": stop, "prepend": prepend}
        options = HookOptions("Hooks", kind, hook_func, detach, cpu, gather, edit=edit, **more)
        self._init(named_modules_of(ms, "Hooks"), options, ms)

    def _init(
        self, named: list[Named], options: HookOptions, ms: Any, only_in_with: bool = False
    ) -> None:
        """Make the hooks and register them; `hooks_of` calls this without `__init__`."""
        for kind in {type(m) for _, m, _ in named}:  # isinstance(m, ScriptModule) is slow
            if nn.Module not in kind.__mro__ or ScriptModule in kind.__mro__:
                for _, m, _ in named:
                    check_hookable(m, options.who)
        positions = isinstance(ms, (nn.Sequential, nn.ModuleList))
        scope = HookScope(options, only_in_with=only_in_with, names_are_positions=positions)
        self.scope = scope
        self.hooks: list[Hook] = []
        for name, m, path in named:
            self.hooks.append(hook := Hook.__new__(Hook))
            hook._init(m, scope, name, path)
        if not only_in_with:
            self.register()

    @property
    def options(self) -> HookOptions:
        """Return the options that the hooks share."""
        return self.scope.options

    @property
    def removed(self) -> bool:
        """Return True while none of them is registered."""
        return all(not h.registered for h in self.hooks)

    def register(self) -> None:
        """Register all hooks, or none; registered hooks are not changed.

        Raises:
            HookError: a module is gone; or the hooks edit, and are not inside their `with`.
        """
        self.scope.register(self.hooks)

    def remove(self) -> None:
        """Remove all of them from their modules; stored values stay. Can be repeated."""
        try:
            for h in self.hooks if self.options.edit else ():
                h._warn_if_compiled()
        finally:
            self.scope.unregister(self.hooks)

    def __enter__(self) -> Self:
        self.scope.enter(self.hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> bool:
        return self.scope.exit(self.hooks, e)

    @property
    def names(self) -> tuple[str, ...]:
        """Return the modules' names, or their positions as text where no names are known."""
        return tuple(str(i) if h.name is None else h.name for i, h in enumerate(self.hooks))

    @property
    def stored(self) -> Values:
        """Return the value that each hook stored in its last call, in order; None without a call.

        An `L`, as fastai's, that is a list too: `torch.stack(h.stored)`.
        """
        options = self.options
        # fast path: there is nothing to wait for, to copy or to join
        plain = options.fast and options.detach and not options.gather
        values = [h.last for h in self.hooks]
        if plain and all([type(x) is Tensor and not x.is_inference() for x in values]):  # noqa: C419
            return Values(values)
        values = [h._stored_here() for h in self.hooks]
        if options.gather:
            names = [f"what is stored of {h.label}" for h in self.hooks]
            values = ranks.gather(values, names)
        return Values(values)

    def as_dict(self) -> dict[str, Any]:
        """Return the value that each hook stored in its last call, by its name (or position)."""
        return self._by_name(self.stored)

    def items(self) -> Iterable[tuple[str, Hook]]:
        """Return the pairs `(name, hook)`, or `(position, hook)` where no names are known.

        >>> import torch
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        >>> with Hooks(net, None) as h: y = net(torch.ones(1, 2))
        >>> [(name, tuple(hook.stored.shape)) for name, hook in h.items()]
        [('0', (1, 3)), ('1', (1, 3))]
        """
        return self._by_name(self.hooks).items()

    @property
    def n_calls(self) -> dict[str, int]:
        """Return how many forward calls each hook has seen, by its name or position."""
        return self._by_name(h.n_calls for h in self.hooks)

    def _by_name(self, values: Iterable[T]) -> dict[str, T]:
        """Return `values`, one for each hook, as a dict by name."""
        found = dict(zip(self.names, values, strict=True))
        if len(found) < len(self):
            several = [name for name, n in Counter(self.names).items() if n > 1]
            raise SelectionError(
                f"{self.options.who}: several hooks are called {several[0]!r}, so they cannot be "
                "read by name. Read them by position, or hook each model by itself."
            )
        return found

    @property
    def silent(self) -> dict[str, str]:
        """Return the hooks that never fired, each with the reason as far as it is known."""
        return silent_reasons(self.hooks)

    def save(self, path: str | Path) -> Path:
        """Write the stored tensors to a safetensors file, for `compare_models` or any other reader.

        Tensors are called `name`, or `name:call` with `keep="all"`, with `/path` behind it where a
        module returns a structure or an object, such as a cache, which is saved as it is by then.
        The metadata describe each key, in the order of the hooks; they have the modules' classes,
        the paths and the kind of the hooks. Values that are no tensors are left out.

        Args:
            path: of the file; one that exists is replaced as a whole.

        Returns:
            The path.

        Raises:
            HookError: nothing is stored; or a tensor that safetensors cannot hold.
            MissingExtraError: safetensors is not installed.
        """
        try:
            from safetensors.torch import save_file
        except ImportError:
            raise missing_extra("safetensors", "collect", "save a capture") from None
        path = check_path("Hooks.save", path)
        tensors, keys = dict[str, Tensor](), list[Any]()
        for key, name, call, value in self._values_by_key():
            for inner, t in tree_leaves_of_objects(value):
                if isinstance(t, Tensor):
                    text = key + (f"/{inner}" if inner else "")
                    tensors[text] = _dense(t)
                    keys.append((text, name, call, inner))
        if not tensors:
            raise HookError("Hooks.save: nothing was stored. Run the model in the block first.")
        by_name = dict(self.items())  # an error where two have the same name
        about = {
            "keys": keys,
            "types": {name: type(h.module).__name__ for name, h in by_name.items()},
            "paths": {name: h.path for name, h in by_name.items()},
            "kind": self.options.kind,
        }
        with atomic_write(path) as file:
            metadata = {key: json.dumps(value) for key, value in about.items()}
            try:
                save_file(tensors, file.name, metadata)
            except KeyError as e:  # the dtype
                dtype = e.args[0]
                key = next(key for key, t in tensors.items() if t.dtype == dtype)
                raise HookError(
                    f"Hooks.save: '{key}' is of {dtype}, which safetensors "
                    f"{version('safetensors')} cannot hold. Give its hook a function that returns "
                    "another dtype, or try a newer safetensors."
                ) from None
        return path

    def _values_by_key(self) -> Iterator[tuple[str, str, int | None, Any]]:
        """Yield the key in a file, the name, the number of the call (None: the last), the value."""
        for name, h in zip(self.names, self.hooks, strict=True):
            if self.options.keep != "all":
                yield name, name, None, h.stored
                continue
            for i, value in enumerate(h.calls):
                yield f"{name}:{i}", name, i, value

    if not TYPE_CHECKING:  # a checker shall see a misspelt name

        def __getattr__(self, name: str) -> Any:
            """Raise for an unknown name; often a layer is meant."""
            found = any(h.name == name for h in vars(self).get("hooks", ()))
            cure = f' Its hooks are read by name: h["{name}"].' if found else ""
            raise AttributeError(f"Hooks have no {name!r}.{cure}", name=name, obj=self)

    def __len__(self) -> int:
        return len(self.hooks)

    def __iter__(self) -> Iterator[Hook]:
        return iter(self.hooks)

    def __contains__(self, x: object) -> bool:
        return any(h is x or h.module is x or (h.name is not None and h.name == x) for h in self)

    @overload
    def __getitem__(self, i: int | str) -> Hook: ...
    @overload
    def __getitem__(self, i: slice) -> list[Hook]: ...
    def __getitem__(self, i: int | str | slice) -> Hook | list[Hook]:
        if not isinstance(i, str):
            return self.hooks[i]
        for h in self.hooks:
            if h.name == i:
                return h
        raise no_such(f'{self.options.who}: no hook is called "{i}"', i, self.names)

    def _ipython_key_completions_(self) -> list[str]:
        """Return the names, which IPython and Jupyter offer after `h["`."""
        return [h.name for h in self.hooks if h.name is not None]

    def __repr__(self) -> str:
        few = "1 hook" if len(self) == 1 else f"{len(self)} hooks"
        few += ", removed" if self.hooks and self.removed else ""
        pairs = zip(self.names, self.hooks, strict=True)
        held = [f"{name} {text}" for name, h in pairs if (text := h._stored_in_words())]
        shown = f": {', '.join(held[:4])}{', …' if held[4:] else ''}" if held else ""
        return f"Hooks({few}{shown})"


def hooks_of(
    named: list[Named], options: HookOptions, ms: Any = None, *, only_in_with: bool = False
) -> Hooks:
    """Return `Hooks` on named modules, registered unless they are to be on in their `with` only.

    Args:
        ms: the object that held the modules; names in a Sequential or ModuleList are positions.
    """
    hooks = Hooks.__new__(Hooks)
    hooks._init(named, options, ms, only_in_with)
    return hooks


def require_modules(named: list[Named], who: str) -> list[Named]:
    """Return `named`; raise if it is empty."""
    if named:
        return named
    raise OptionError(f"{who}: no module was given. Give some, such as select(model, nn.Linear).")


def named_modules_of(ms: Any, who: str) -> list[Named]:
    """Return the modules in `ms` with their names, or None where they have none, and paths."""
    if isinstance(ms, nn.Module):
        ms = unwrap(ms)
    if isinstance(ms, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        return [(name, m, "") for name, m in submodules(ms).items()]
    if isinstance(ms, Selection):
        return [(name, m, ms.path(name)) for name, m in ms.items()]
    if isinstance(ms, Mapping):
        return [(name, m, "") for name, m in ms.items()]
    if isinstance(ms, (str, nn.Module)) or not isinstance(ms, Iterable):
        by_name = isinstance(ms, str)
        what = f'the string "{ms}"' if by_name else type(ms).__name__
        select = f'select(model, "{ms:.60}")' if by_name else "select(model, ...)"
        several = "several " if who.endswith("s") else ""
        one = f"; {who.removesuffix('s')} takes a single module" if several else ""
        raise ArgumentError(
            f"{who}: expected {several}modules, found {what}. Pass {select}, a list of modules, or "
            f"model.children(){one}."
        )
    return [(*m, "") if isinstance(m, tuple) and len(m) == 2 else (None, m, "") for m in ms]


def _dense(t: Tensor) -> Tensor:
    """Return `t` as a file holds it: dense, contiguous, with memory of its own."""
    t = t.detach()
    if t.is_nested or t.is_quantized or t.layout is not torch.strided:
        kind = "nested" if t.is_nested else "quantized" if t.is_quantized else t.layout
        raise HookError(
            f"Hooks.save: safetensors holds dense tensors only, and this one is {kind}. Store "
            "what it is made of: give the hook a function that returns its values."
        )
    return t.cpu().clone(memory_format=torch.contiguous_format)
