"""`FunctionCall`: the call of a torch function, run as a module runs its hooks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from hookkit.errors import HookError
from hookkit.hooks.entries import HookEntry, Placed
from hookkit.hooks.torch_functions import works_in_place, written


class FunctionCall(nn.Module):
    """The call of a torch function, as a module: `name` is its name, `function` what was called.

    One is made for each call that is stored, so it is a small object: the 15 dicts of a module,
    which take 3 µs to make, are empty ones of the class, and its hooks are in two lists instead.
    """

    name: str
    function: Any
    before: list[HookEntry]
    after: list[HookEntry]

    def __init__(self, name: str) -> None:
        self.__dict__.update(name=name, function=None, before=[], after=[])

    def put(self, entries: Iterable[Placed]) -> None:
        """Has `entries` called as if they were registered on a module."""
        for entry, where in entries:
            hooks = self.before if where.get("pre") else self.after
            hooks.insert(0 if where.get("prepend") else len(hooks), entry)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, or an edit in its place."""
        for hook in self.before:
            if (new := hook(self, args, kwargs)) is not None:
                args, kwargs = new
        output = self.function(*args, **kwargs)
        for hook in self.after:
            if (new := hook(self, args, kwargs, output)) is not None:
                output = new
        return output

    def __repr__(self) -> str:
        return self.name


for _name, _value in vars(nn.Module()).items():
    setattr(FunctionCall, _name, _value)


def run_edited(o: Any, call: FunctionCall, args: Any, kwargs: Any) -> Any:
    """What a call gives that is edited; of one that works in place, also written there."""
    in_place = works_in_place(call.function, args, kwargs)
    if in_place and isinstance(args[0] if args else kwargs.get("input"), Tensor):
        return written(call, args, kwargs)
    if in_place or kwargs.get("out") is not None:
        raise HookError(
            f"{o.who}: {call.name} writes its result into tensors that it is given (out=, or a "
            "list), where an edit has no effect. Edit what is computed from them."
        )
    return call(*args, **kwargs)
