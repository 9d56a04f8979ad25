"""A model's inner outputs as an ordinary module, which runs the model only as far as needed.

Each call puts hooks on the wanted layers, runs the model, and removes them. What it collects
belongs to that call: threads do not interfere, and copies, pickles and state dicts hold nothing of
it. Layers are known by name, so a copy extracts from its own model.

Builds on `Wrapper` (the state dict has the model's own keys) and on `attach`. Not on `Hooks`: only
the first call of a layer is wanted, and outputs keep their graph without being copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from threading import get_ident
from types import GeneratorType
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from hookkit.checks import check_choice, check_flag
from hookkit.errors import HookError, NeverFiredWarning
from hookkit.hooks.block import StopForward
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.hooks.entries import Handle, attach, check_hookable, in_thread, is_exporting, part_at
from hookkit.hooks.snapshot import aliases_user_memory, inputs_and_buffers, snapshot
from hookkit.hooks.taps import tap
from hookkit.interrupts import block
from hookkit.modules import can_run, find
from hookkit.nested import tmap
from hookkit.selecting import Selector, select
from hookkit.swapping import Wrapper


def feature_extractor(
    model: nn.Module,
    *what: Selector,
    detach: bool = False,
    keep: str = "first",
    stop: bool = True,
) -> FeatureExtractor:
    """A module that gives the outputs of the layers `what` of `model`, as a dict by name.

    Calling it runs the model, with all its hooks, until the last wanted layer has returned. It
    shares the model's modules: train, move, save, copy or pickle it as any module; parameters
    behind the last wanted layer get no gradient. Compiled models run eagerly in it;
    `torch.export.export(extractor, (x,))` exports it.

    Args:
        model: any model; it is not changed.
        what: layers as in `select`: names, globs, leaf paths (`"lstm[1][0]"`), classes, and dicts
            that name the features: `{"layer2": "h"}`.
        detach: gives detached tensors; by default gradients flow through the features.
        keep: for layers that are called several times, the `"first"` call's output, the `"last"`
            one's, or a list of `"all"`; with these two the whole model runs.
        stop: False lets the whole model run in any case.

    Returns:
        A `FeatureExtractor`. Later in-place operations of the model do not change the features
        (copy-on-write on the CPU, a copy elsewhere). A layer that was not reached gives None, and
        a `NeverFiredWarning`. If the model returns a generator, it is run to its end.

    Raises:
        SelectionError: no such layer.
        HookError: a wanted module never runs, or is scripted.
        OptionError: `keep` is none of the three.
        ArgumentError: `detach` or `stop` is neither True nor False.

    >>> lenet = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.Flatten())
    >>> extract = feature_extractor(lenet, {"2": "conv2"})
    >>> extract(torch.ones(1, 1, 28, 28))["conv2"].shape
    torch.Size([1, 16, 20, 20])
    """
    chosen = select(model, *what)
    for name, module in chosen.items():
        check_hookable(module, "feature_extractor")
        if not can_run(module):
            cure = f'its entries: "{name}.*"' if module._modules else "the module around it"
            raise HookError(
                f'feature_extractor: "{name}" is a {type(module).__name__}, which is never called '
                f"and has no output. Select {cure}."
            )
    wanted = {key: (pick.name, pick.leaf) for key, pick in chosen.picks.items()}
    return FeatureExtractor(model, wanted, detach=detach, keep=keep, stop=stop)


class FeatureExtractor(Wrapper):
    """Gives the outputs of some layers of the model it wraps. Made by `feature_extractor`.

    Attributes:
        wrapped: the model.
        wanted: feature name → (the layer's name in the model, path into its output).
    """

    def __init__(
        self,
        wrapped: nn.Module,
        wanted: dict[str, tuple[str, str]],
        *,
        detach: bool = False,
        keep: str = "first",
        stop: bool = True,
    ):
        super().__init__(wrapped)
        who, hint = "feature_extractor", "Layers come first: feature_extractor(model, name)."
        self.wanted, self.detach = wanted, check_flag(who, "detach", detach, hint)
        self.keep = check_choice(who, "keep", keep, ("first", "last", "all"))
        self.stop = check_flag(who, "stop", stop, hint)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The features of these inputs (those of the model), by name in the order selected."""
        if torch.compiler.is_compiling():
            eager: Callable[..., Any] = torch.compiler.disable
            features: dict[str, Any] = eager(self._extract)(*args, **kwargs)
            return features
        return self._extract(*args, **kwargs)

    def _extract(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        with _collecting(self) as call:
            output = self.wrapped(*args, **kwargs)
            if isinstance(output, GeneratorType):
                deque(output, maxlen=0)
        return call.features()

    def extra_repr(self) -> str:
        """The features, and where they come from."""
        paths = {key: name + leaf for key, (name, leaf) in self.wanted.items()}
        return ", ".join(p if p == key else f"{key} = {p}" for key, p in paths.items())


@block
def _collecting(extractor: FeatureExtractor) -> Iterator[_Call]:
    """Hooks on the wanted layers during the `with` block, which ends quietly at their stop."""
    call, model = _Call(extractor), extractor.wrapped
    try:
        enter_eager(call)
        for key, (name, leaf) in extractor.wanted.items():
            _, module = find(model, name) or (name, select(model, name)[name])
            call.attach(module, key, leaf)
        yield call
    except StopForward as e:
        if e.owner is not call:
            raise
    finally:
        call.end()


class _Call:
    """What one call of an extractor has collected so far."""

    def __init__(self, extractor: FeatureExtractor):
        self.keep = extractor.keep
        self.detach = extractor.detach
        # torch.export needs the whole forward; operations without a use fall out of its graph
        self.stop = extractor.stop and extractor.keep == "first" and not is_exporting()
        self.found: dict[str, list[Any]] = {key: [] for key in extractor.wanted}
        self.n_missing = len(self.found)
        self.thread, self.elsewhere = get_ident(), False
        self.handles: list[Handle] = []

    def attach(self, module: nn.Module, key: str, leaf: str) -> None:
        """Puts a hook on `module` that stores its output, or the part of it at `leaf`."""

        def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.see(key, leaf, output, inputs_and_buffers(module, args, kwargs))

        self.handles.append(attach(module, see))

    def end(self) -> None:
        """Removes its hooks; one that is still called does nothing."""
        self.thread = -1
        leave_eager(self)
        for handle in self.handles:
            handle.remove()

    def see(self, key: str, leaf: str, output: Any, given: Any) -> None:
        """Stores what is wanted of `output`, and ends the forward if nothing else is missing."""
        found = self.found[key]
        if not in_thread(self.thread):
            self.elsewhere = True
            return
        if found and self.keep == "first":
            return
        self.n_missing -= not found
        if self.keep == "last":
            found.clear()
        part = part_at(output, leaf, "feature_extractor", lambda: f'"{key}"')

        def own(t: Tensor) -> Tensor:  # later in-place operations do not change it
            if self.detach:
                return snapshot(t, given)
            return t.clone() if aliases_user_memory(t, given) else tap(t)

        found.append(tmap(own, part))
        if self.stop and not self.n_missing:
            self.stop = False  # once: if the model swallows it, other forward passes still end
            raise StopForward(self)

    def features(self) -> dict[str, Any]:
        """What was collected, by name; None, with a warning, for layers that did not run."""
        if missing := [key for key, found in self.found.items() if not found]:
            shown = ", ".join(f'"{key}"' for key in missing[:5]) + (" …" if missing[5:] else "")
            if self.elsewhere:
                why = "ran only in other threads"
                cure = "In DataParallel, wrap the extractor: DataParallel(feature_extractor(…))."
            else:
                why = "were not reached by this input"
                cure = (
                    "Leave them out, or see which layers this input runs with print_sizes(model)."
                )
            warn(
                f"feature_extractor: {len(missing)} of {len(self.found)} layers {why}: {shown}. "
                f"The whole model ran, and they are None. {cure}",
                NeverFiredWarning,
                stacklevel=5,
            )
        if self.keep == "all":
            return dict(self.found)
        return {key: found[-1] if found else None for key, found in self.found.items()}
