"""`collect`: runs a model over a loader and keeps what chosen layers give, a row for each sample.

Builds on `hooks`, `selecting` and `modelinfo.sandbox`. Hooks are on the model only while it runs,
so that what a loader does is not recorded. They pass rows on to a `Store` as the layers run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hookkit import ranks
from hookkit.checks import (
    check_choice,
    check_flag,
    check_function,
    check_module,
    check_number,
    check_path,
)
from hookkit.collecting.accumulators import Accumulators
from hookkit.collecting.batches import WHO, Field, Reading, fingerprint, sketch
from hookkit.collecting.parts import CODES, key_of
from hookkit.collecting.shards import Shards, Store
from hookkit.data import DataLoaders, n_batches, no_batches
from hookkit.errors import HookError, ModelRunError, OptionError
from hookkit.hooks import Hooks
from hookkit.hooks.entries import called
from hookkit.hooks.snapshot import FUNCTION_OF, Options
from hookkit.interrupts import Undo
from hookkit.modelinfo import sandbox
from hookkit.modelinfo.progress import Progress
from hookkit.modelinfo.tree import Tree
from hookkit.modules import unwrap
from hookkit.nested import describe, named_leaves
from hookkit.selecting import Selection, select

_SHARD_BYTES = 2**27
_OUTPUTS = 'Select one: "{name}" with one of {paths} behind it, or give hook= a function of it.'
_INPUTS = "Give hook= a function of the inputs, such as lambda i: i[0]; there are {paths}."


def collect(
    model: nn.Module,
    loader: Any,
    modules: Any,
    to: str | Path | None = None,
    *,
    per: str = "sample",
    mask: Field = None,
    hook: Callable[..., Any] | None = None,
    inputs: bool = False,
    dtype: torch.dtype | None = None,
    n: int | None = None,
    ids: Field = None,
    into: Any = None,
    stop: bool = False,
    shard_bytes: int = _SHARD_BYTES,
) -> Any:
    """What layers of a model give for all batches of a loader, a row for each sample or token.

    It is written to the folder `to` as safetensors files, as each layer runs, in bounded memory,
    and read by `Activations`. Called again, it goes on where it was interrupted; a folder that is
    complete is only opened. The model runs in the modes in which it is, without gradients;
    buffers, modes and random states are restored. A compiled model runs eagerly.

    Over several processes each writes the samples that its loader gives it, and none twice:
    `Activations` reads all parts as one, in the order of the ids.

    Args:
        model: any model.
        loader: gives batches: a tensor, or a tuple whose last item is the target, or a mapping,
            which goes by keyword, or an object that the model takes. They are moved to its device.
        modules: selectors, as for `select`. A module that is called k times for each batch is k
            layers, `name:0` to `name:k-1`.
        to: the folder, by default `acts`. With `into` the accumulators are kept there, to go on
            after an interruption; by default they are not.
        per: `"sample"`: dimension 0 of what a layer gives are samples. `"token"`: dimensions 0
            and 1 are samples and tokens, and each token is a row.
        mask: which tokens (or samples) count, those of padding not: a field of the batch by name
            or position, or a function of the batch. Not 0 is yes.
        hook: `f(module, input, output)`, or `f(output)`: what it returns is stored instead.
        inputs: stores what the modules receive in place of what they give; `hook` is then
            `f(module, input)` or `f(input)`.
        dtype: floating point rows are stored as this.
        n: stops after so many rows; for a single process only.
        ids: the samples' ids, whole numbers: a field or function as for `mask`. By default their
            positions in the order of the loader: of the data set if it does not shuffle. A field
            of ids is not passed to the model.
        into: an accumulator (`Mean()`, `Covariance()`, `TopK(k)`) in place of rows on disk. Merged
            over the processes.
        stop: each forward ends when all of `modules` have been called: what follows them is not
            run, nor its hooks, and what is called again gives its first call.
        shard_bytes: how many bytes of rows make a shard, or come between two states of
            accumulators. After an interruption those of the last whole shard on are run again.

    Returns:
        An `Activations`; with `into` a dict with an accumulator for each layer, on the CPU.

    Raises:
        SelectionError: no such layer.
        ArgumentError: `model`, `loader` or a field is of a kind that cannot work.
        OptionError: an option has a value that cannot work; the folder has rows of another model,
            other layers, settings or batches.
        HookError: a layer was not called for a batch, or gives no row for each sample.
        ModelRunError: there is no batch.

    >>> import tempfile
    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> batches = [*torch.randn(10, 2, 4)]
    >>> acts = collect(net, batches, nn.ReLU, to=tempfile.mkdtemp(), n=15)
    >>> acts["1"].shape
    (15, 3)
    >>> from hookkit.collecting import Mean
    >>> collect(net, batches, "1", into=Mean())["1"].mean.shape
    torch.Size([3])
    """
    check_module(WHO, model, "The model comes first: collect(model, loader, modules).")
    check_choice(WHO, "per", per, ("sample", "token"))
    kind: Any = "pre" if check_flag(WHO, "inputs", inputs) else "forward"
    n = n if n is None else check_number(WHO, "n", n, 1, whole=True, what="how many rows")
    size = check_number(WHO, "shard_bytes", shard_bytes, 1, whole=True, what="bytes in a shard")
    f = None if hook is None else check_function(WHO, hook, *FUNCTION_OF[kind], name="hook")
    stop = check_flag(WHO, "stop", stop)
    how = Options(WHO, kind, detach=False, dtype=dtype, keep="none", stop=stop)
    batches = DataLoaders(loader).train  # its check
    reading = Reading(model, batches, per, ids, mask)
    layers = select(unwrap(model), *(modules if isinstance(modules, list | tuple) else [modules]))
    if n is not None and reading.ranks > 1:
        raise OptionError(
            f"{WHO}(n={n}): how many rows each of {reading.ranks} processes would have to write is "
            "known after all of them. Give a smaller data set, such as torch.utils.data.Subset."
        )
    settings = {
        **fingerprint(model),
        "layers": [*layers],
        **{"per": per, "inputs": kind == "pre", "dtype": dtype and str(dtype), "n": n},
        **{"hook": _name(hook), "mask": _name(mask), "ids": _name(ids)},
        **{"rank": reading.rank, "ranks": reading.ranks},
    }
    if into is not None and to is None and size != _SHARD_BYTES:
        raise OptionError(
            f"{WHO}(shard_bytes={size}): with into= nothing is written. Give to= too, where the "
            "accumulators are kept each time they have seen so many bytes, or leave it out."
        )
    folder = None if to is None else check_path(WHO, to, "to")
    store: Store
    if into is None:
        store = Shards(folder or Path("acts"), settings, size)
    else:
        store = Accumulators(into, folder, settings, size)
    _Run(model, layers, f, how, reading, store, n).over(batches)
    return store.result()


def _name(x: Any) -> Any:
    """What stands for a function, whose code cannot be compared, in an index."""
    return getattr(x, "__qualname__", type(x).__name__) if callable(x) else x


class _Run:
    """Runs the model batch by batch. It is the hook on the layers that are wanted."""

    wants_hook = True
    hooks: Hooks
    _take: Callable[[str, Tensor, Tensor], None]

    def __init__(
        self, model: nn.Module, layers: Selection, f: Any, how: Options, reading: Reading,
        store: Store, n: int | None,
    ) -> None:  # fmt: skip
        self.model, self.f, self.reading = model, f, reading
        self.options = how
        how.func = self
        self.store, self.n = store, n
        self.modules = [(name, m, layers.leaf(name)) for name, m in layers.items()]
        self.places: dict[Any, list[int]] = {}  # of a module selected by two names, both
        for place, (_, m, leaf) in enumerate(self.modules):
            self.places.setdefault((id(m), leaf), []).append(place)

    def over(self, batches: Any) -> None:
        """Has the store take the rows of each batch that it has not, until there are n."""
        line, tree = Progress(n_batches(batches), unit="batches"), Tree(self.model)
        with Undo() as stack:
            stack.enter_context(sandbox.restore_after(tree, params=False))
            stack.enter_context(sandbox.preserve_random_states())
            stack.callback(line.close)
            self.hooks = Hooks.of_named(self.modules, self.options)
            self.hooks.remove()  # until a batch is there
            # within, since some random states are restored only if there is no other thread
            with self.store:
                self._each(batches, line)

    def _each(self, batches: Any, line: Progress) -> None:
        progress, start, number = self.store.progress, self.store.progress.batches, -1
        for number, batch in enumerate(batches):
            if number == 0:
                self.store.check_first(self.reading.digest(batch))
                if progress.batches:
                    self._check(batch)
            if progress.done:
                return
            if number >= start:
                self._batch(number, batch)
            if not ranks.rank():  # of several processes the first one shows how far it is
                line.called(number + 1)
            if self.n is not None and progress.n_rows >= self.n:
                break
        if number < 0:
            raise ModelRunError(no_batches(f"{WHO}: the loader"))
        self.store.finish()

    def _check(self, batch: Any) -> None:
        """Runs the first batch again: what the layers give is what the store has rows of.

        Rows that random numbers are part of are taken as they are.
        """
        again, before = dict[str, list[float]](), sandbox.random_states()
        self._take = lambda key, rows, ids: again.update({key: sketch(rows)})

        def end() -> None:
            if sandbox.random_states() == before:
                self.store.check_rows(again)

        self._forward(0, batch, 0, self.n, end)

    def _batch(self, number: int, batch: Any) -> None:
        progress = self.store.progress
        self._take = self.store.add
        left = None if self.n is None else self.n - progress.n_rows

        def end() -> None:
            self.store.end_batch(self.reading.n_samples, self.reading.ids)

        self._forward(number, batch, progress.samples, left, end)

    def _forward(
        self, number: int, batch: Any, first: int, left: int | None, end: Callable[[], None]
    ) -> None:
        given = self.reading.begin(batch, first, left)
        try:
            with torch.no_grad(), self.hooks as hooks:
                self.model(*given, **given.kwargs)
                if silent := hooks.silent:
                    label, why = next(iter(silent.items()))
                    raise HookError(
                        f"{WHO}: {len(silent)} of {len(hooks)} modules were not called: {label}: "
                        f"{why}. Leave out what does not run for every batch."
                    )
            end()
        except Exception as error:
            what = describe(given)
            error.add_note(f"{WHO}: in batch {number}, for which the model was given {what}")
            raise

    def __call__(self, module: nn.Module, *seen: Any, hook: Any = None) -> None:
        """Has the store take what a layer gives, as rows."""
        given = seen[-1] if self.f is None else called(self.f, module, *seen)
        rows = self.reading.rows(hook.name, self._tensor(hook.name, given))
        for place in self.places[id(module), hook.leaf]:
            self._take(key_of(place, hook.count), rows, self.reading.ids)

    def _tensor(self, name: str, given: Any) -> Tensor:
        """The only tensor in what a layer gives."""
        found = {"": given} if type(given) is Tensor else dict(named_leaves(given))
        if len(found) != 1:
            paths = ", ".join(f'"{path}"' for path in [*found][:6])
            hint = _INPUTS if self.options.kind == "pre" else _OUTPUTS
            cure = hint.format(name=name, paths=paths) if found else "Give hook= a function of it."
            words = ", ".join(map(describe, found.values())) or "none"
            raise HookError(
                f'{WHO}: of "{name}" one tensor is needed to make rows, and there is {words}. '
                f"{cure}"
            )
        t, dtype = next(iter(found.values())), self.options.dtype
        if dtype is not None and t.is_floating_point():
            t = t.to(dtype)
        if t.is_nested or t.layout is not torch.strided or str(t.dtype)[6:] not in CODES:
            raise HookError(
                f'{WHO}: "{name}" gives a tensor of {t.dtype} ({t.layout}), and rows are dense and '
                "real. Give hook= a function that returns such a tensor."
            )
        return t.detach() if t.requires_grad else t
