"""A model's inner outputs as an ordinary module, which runs the model only as far as needed.

Each call puts hooks on the wanted layers, runs the model, and removes them. What it collects
belongs to that call: copies, pickles and state dicts hold nothing of it. Layers are known by name,
so a copy extracts from its own model.

Builds on `Wrapper` (the state dict has the model's own keys) and on `attach`. Not on `Hooks`: only
the first call of a layer is wanted, and outputs keep their graph without being copied.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any
from warnings import warn

import torch
from torch import Tensor, nn

from hookkit.checks import check_flag
from hookkit.errors import NeverFiredWarning
from hookkit.hooks.attach import Handle, attach, check_hookable, in_thread
from hookkit.hooks.block import StopForward
from hookkit.hooks.calls import is_exporting, owned
from hookkit.hooks.compiling import enter_eager, leave_eager
from hookkit.hooks.parts import part_at
from hookkit.hooks.snapshot import snapshot
from hookkit.modules import find
from hookkit.nested import tmap
from hookkit.selecting import Selector, select
from hookkit.swapping import Wrapper


def feature_extractor(
    model: nn.Module,
    *what: Selector,
    detach: bool = False,
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
        stop: False lets the whole model run in any case.

    Returns:
        A `FeatureExtractor`. Of a layer that is called several times it gives the first output;
        later in-place operations of the model do not change it (copy-on-write on the CPU, a copy
        elsewhere). A layer that was not reached gives None, and a `NeverFiredWarning`.

    Raises:
        SelectionError: no such layer.
        HookError: a wanted module is scripted.
        ArgumentError: `detach` or `stop` is neither True nor False.

    >>> lenet = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.Flatten())
    >>> extract = feature_extractor(lenet, {"2": "conv2"})
    >>> extract(torch.ones(1, 1, 28, 28))["conv2"].shape
    torch.Size([1, 16, 20, 20])
    """
    chosen = select(model, *what)
    for module in chosen.values():
        check_hookable(module, "feature_extractor")
    wanted = {key: chosen.place(key) for key in chosen}
    return FeatureExtractor(model, wanted, detach=detach, stop=stop)


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
        stop: bool = True,
    ) -> None:
        super().__init__(wrapped)
        who, hint = "feature_extractor", "Layers come first: feature_extractor(model, name)."
        self.wanted, self.detach = wanted, check_flag(who, "detach", detach, hint)
        self.stop = check_flag(who, "stop", stop, hint)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The features of these inputs (those of the model), by name in the order selected."""
        if torch.compiler.is_compiling():
            eager: Callable[..., Any] = torch.compiler.disable
            features: dict[str, Any] = eager(self._extract)(*args, **kwargs)
            return features
        return self._extract(*args, **kwargs)

    def _extract(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        call, model = _Call(self), self.wrapped
        try:
            enter_eager(call)
            for key, (name, leaf) in self.wanted.items():
                _, module = find(model, name) or (name, select(model, name)[name])
                call.attach(module, key, leaf)
            model(*args, **kwargs)
        except StopForward as e:
            if e.owner is not call:
                raise
        finally:
            call.end()
        return call.features()

    def extra_repr(self) -> str:
        """The features, and where they come from."""
        paths = {key: name + leaf for key, (name, leaf) in self.wanted.items()}
        return ", ".join(p if p == key else f"{key} = {p}" for key, p in paths.items())


class _Call:
    """What one call of an extractor has collected so far, by name."""

    def __init__(self, extractor: FeatureExtractor) -> None:
        self.detach, self.wanted = extractor.detach, extractor.wanted
        # torch.export needs the whole forward; operations without a use fall out of its graph
        self.stop = extractor.stop and not is_exporting()
        self.values: dict[str, Any] = {}
        self.thread: int = get_ident()
        self.handles: list[Handle] = []

    def attach(self, module: nn.Module, key: str, leaf: str) -> None:
        """Puts a hook on `module` that stores its output, or the part of it at `leaf`."""

        def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # another thread's call of the same model, in a call of its own or in none
            if in_thread(self.thread) and key not in self.values:
                self.add(key, leaf, output, owned(module, args, kwargs))

        self.handles.append(attach(module, see))

    def end(self) -> None:
        """Removes its hooks; one that is still called does nothing."""
        self.thread = -1
        leave_eager(self)
        for handle in self.handles:
            handle.remove()

    def add(self, key: str, leaf: str, output: Any, inputs: Any) -> None:
        """Stores what is wanted of `output`, and ends the forward if nothing else is missing."""

        def own(t: Tensor) -> Tensor:  # later in-place operations do not change it
            if self.detach:
                return snapshot(t, inputs)
            return t.clone()

        part = part_at(output, leaf, "feature_extractor", lambda: f'"{key}"')
        self.values[key] = tmap(own, part)
        if self.stop and len(self.values) == len(self.wanted):
            self.stop = False  # once: if the model swallows it, other forward passes still end
            raise StopForward(self)

    def features(self) -> dict[str, Any]:
        """What was collected; None, with a warning, for layers that did not run."""
        if missing := [key for key in self.wanted if key not in self.values]:
            shown = ", ".join(f'"{key}"' for key in missing[:5]) + (" …" if missing[5:] else "")
            warn(
                f"feature_extractor: {len(missing)} of {len(self.wanted)} layers were not reached "
                f"by this input, in this thread: {shown}. The whole model ran, and they are None. "
                "Leave them out, or see which layers this input runs with print_sizes(model). "
                "DataParallel runs threads of its own: wrap the extractor in it.",
                NeverFiredWarning,
                stacklevel=5,
            )
        return {key: self.values.get(key) for key in self.wanted}
