"""Find the first layer that differs, by one rule, and give all such results one form.

The first row that differs often names an innocent layer: one whose inputs differ already, or one
that only contains the layer that makes the difference. So **first is the innermost call whose
inputs agree and whose output does not.** The rule needs the inputs of each call and the call around
it, which a `CallTree` has. `compare_models`, `check_invariance`, `compare_runs` and
`find_nonfinite` use it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from hookkit._core.messages import import_pandas, no_such
from hookkit.errors import OptionError
from hookkit.hooks.attach import Switch, attach
from hookkit.hooks.calls import recomputing

if TYPE_CHECKING:
    from pandas import DataFrame


class Call(NamedTuple):
    """Names one call of a module: the module's name, and the number of the call, from 0."""

    name: str
    n: int = 0


class CallTree:
    """Holds the calls of modules in a run, and the call around each.

    Attributes:
        begun: the calls in the order in which they began.
        ended: the calls that returned, in that order; calls that raised are left out.
        parent: call → the innermost call around it, or None.
    """

    def __init__(self) -> None:
        self.begun: list[Call] = []
        self.ended: list[Call] = []
        self.parent: dict[Call, Call | None] = {}
        self._open: list[Call] = []
        self._n = Counter[str]()

    def begin(self, name: str) -> Call:
        """Note that a call of the module `name` begins, and return it."""
        call = Call(name, self._n[name])
        self._n[name] += 1
        self.parent[call] = self._open[-1] if self._open else None
        self._open.append(call)
        self.begun.append(call)
        return call

    def end(self, name: str) -> Call | None:
        """Note that the innermost open call of the module `name` returns; return it, or None.

        Calls inside it that are still open raised an exception, which the model caught.
        """
        if not any(call.name == name for call in self._open):
            return None
        while (call := self._open.pop()).name != name:
            pass
        self.ended.append(call)
        return call

    @property
    def current(self) -> Call | None:
        """Return the innermost call that has begun and not returned; None if there is none."""
        return self._open[-1] if self._open else None

    def follow(
        self,
        modules: Mapping[str, nn.Module],
        before: Callable[[Call, nn.Module, Any, Any], None],
        after: Callable[[Call, nn.Module, Any], None],
        switch: Switch | None = None,
    ) -> Iterator[RemovableHandle]:
        """Register hooks that note each call of `modules`; yield their handles, to be removed.

        Args:
            modules: by name.
            before: called with the call, its module, its positional and its keyword inputs.
            after: called with the call, its module and its output.
            switch: turns the hooks off while its `on` is False.

        A forward that a checkpoint runs again is not noted.
        """

        def begins(name: str, m: nn.Module, args: Any, kwargs: Any) -> None:
            if not recomputing():
                before(self.begin(name), m, args, kwargs)

        def ends(name: str, m: nn.Module, _args: Any, _kwargs: Any, out: Any) -> None:
            if not recomputing() and (call := self.end(name)) is not None:
                after(call, m, out)

        for name, m in modules.items():
            yield attach(m, partial(begins, name), pre=True, prepend=True, switch=switch)
            yield attach(m, partial(ends, name), switch=switch)

    def around(self, call: Call) -> Iterator[Call]:
        """Yield the calls around `call`, the innermost first."""
        outer = self.parent.get(call)
        while outer is not None:
            yield outer
            outer = self.parent.get(outer)

    def first(
        self, inputs_differ: Collection[Call], outputs_differ: Collection[Call]
    ) -> Call | None:
        """Return the innermost call whose inputs agree and whose output differs; None if none is.

        If there are several that do not contain each other, the one that returned first.

        >>> tree = CallTree()
        >>> for name in ("block", "block.fc", "block.norm"):
        ...     _ = tree.begin(name), name == "block" or tree.end(name)
        >>> _ = tree.end("block")
        >>> fc, norm, block = tree.ended
        >>> tree.first(inputs_differ={norm}, outputs_differ={fc, norm, block}).name
        'block.fc'
        """
        return next(iter(self.makers(inputs_differ, outputs_differ)), None)

    def makers(
        self, inputs_differ: Collection[Call], outputs_differ: Collection[Call]
    ) -> list[Call]:
        """Return all innermost calls whose inputs agree and whose output differs, as they ended."""
        makers = [c for c in self.ended if c in outputs_differ and c not in inputs_differ]
        containers = {outer for call in makers for outer in self.around(call)}
        return [call for call in makers if call not in containers]

    def place(
        self,
        call: Call,
        inputs_differ: Collection[Call],
        judged: Collection[Call] | None = None,
    ) -> str:
        """Return in words where in `call` the difference begins; `""` if no calls are in it.

        Args:
            call: the call in which it begins.
            inputs_differ: the calls whose inputs differ.
            judged: the calls that were compared; others are skipped. By default all.

        >>> tree = CallTree()
        >>> for name in ("mix", "mix.dt", "mix.out"):
        ...     _ = tree.begin(name), name == "mix" or tree.end(name)
        >>> tree.place(Call("mix"), inputs_differ={Call("mix.out")})
        'in its own forward, after dt and before out'
        """
        known = [c for c in self.begun if judged is None or c in judged]
        those = {call, *known}
        inside = [c for c in known if next((o for o in self.around(c) if o in those), None) == call]
        if not inside:
            return ""

        def short(c: Call) -> str:
            return c.name.removeprefix(f"{call.name}.") + f" (call {c.n})" * bool(c.n)

        for i, c in enumerate(inside):
            if c in inputs_differ:
                after = f"after {short(inside[i - 1])} and " if i else ""
                return f"in its own forward, {after}before {short(c)}"
        return f"in its own forward, after {short(inside[-1])}, the last layer in it"


class Localisation:
    """Serves as the base of results that name the first layer, such as that of `compare_models`.

    A subclass is a frozen dataclass with `rows`, `first`, `not_judged` and `verdict`. It has no
    truth value: ask `result.first is None`.

    Attributes:
        rows: what was compared, in the order of execution.
        first: the row that answers; None if nothing differs.
        not_judged: what could not be judged, each with the reason.
        verdict: the answer in one line.
    """

    rows: tuple[Any, ...]
    not_judged: tuple[str, ...]
    _AGREES: ClassVar[str] = "nothing differs"

    @property
    def first(self) -> Any:
        """Return the row that answers, with the layer, what differs and by how much."""
        raise NotImplementedError

    @property
    def verdict(self) -> str:
        """Return the answer in one line."""
        raise NotImplementedError

    def text(self) -> str:
        """Return the verdict, and the lines that show it."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __bool__(self) -> NoReturn:
        raise OptionError(
            f"{type(self).__name__}: its truth value could mean that {self._AGREES}, or that there "
            "are rows. Ask `.first is None`, or `len(result)`."
        )

    def __getitem__(self, key: int | str) -> Any:
        if not isinstance(key, str):
            return self.rows[key]
        rows = tuple(r for r in self.rows if key in (r.name, getattr(r, "other_name", r.name)))
        if not rows:
            names = dict.fromkeys(r.name for r in self.rows)
            raise no_such(f'{type(self).__name__}: no row is called "{key}"', key, names)
        return rows

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__

    def to_df(self) -> DataFrame:
        """Return a pandas DataFrame with a line for each row.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return import_pandas().DataFrame([dataclasses.asdict(r) for r in self.rows])

    def to_dict(self) -> dict[str, Any]:
        """Return `verdict`, `first`, `rows` and `not_judged` as values that JSON can write.

        A number that is NaN or infinite is None.
        """
        first = None if self.first is None else _plain(dataclasses.asdict(self.first))
        rows = [_plain(dataclasses.asdict(r)) for r in self.rows]
        return {
            "verdict": self.verdict,
            "first": first,
            "rows": rows,
            "not_judged": list(self.not_judged),
        }


def _plain(x: Any) -> Any:
    """Return `x` with lists for tuples, and None for numbers that are not finite."""
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items()}
    if isinstance(x, list | tuple):
        return [_plain(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
