"""A model's inner outputs as an ordinary module, which runs the model only as far as needed.

Each call puts hooks on the wanted layers, runs the model, and removes them. The features belong to
that call: copies, pickles and state dicts hold none. Layers are known by name, so a copy extracts
from its own model.

Builds on `Wrapper` and on `attach`. Not on `Hooks`: only the first call of a layer is wanted, and
outputs keep their graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from hookkit._core.checks import check_flag
from hookkit._core.messages import warn
from hookkit._core.modules import find
from hookkit._core.pytree import tree_map
from hookkit.edits.swapping import Wrapper
from hookkit.errors import NeverFiredWarning
from hookkit.hooks.attach import attach, check_hookable
from hookkit.hooks.calls import call_kind
from hookkit.hooks.eager import EAGER, enter_eager
from hookkit.hooks.options import StopForward
from hookkit.hooks.selection import Selector, select
from hookkit.hooks.values import part_at, snapshot


def feature_extractor(
    model: nn.Module,
    *layers: Selector,
    detach: bool = False,
    stop: bool = True,
) -> FeatureExtractor:
    """Return a module that gives the outputs of some layers of `model`, as a dict by name.

    Calling it runs the model, with all its hooks, until the last wanted layer has returned. It
    shares the model's modules: train, move, save, copy or pickle it as any module; parameters
    behind the last wanted layer get no gradient. Compiled models run eagerly in it;
    `torch.export.export(extractor, (x,))` exports it.

    Args:
        model: any model; it is not changed.
        layers: as for `select`: names, globs, paths (`"lstm[1][0]"`), classes, and dicts
            that name the features: `{"layer2": "h"}`.
        detach: gives detached tensors; by default gradients flow through the features.
        stop: False lets the whole model run in any case.

    Returns:
        A `FeatureExtractor`. A layer that is called several times gives its first output. Later
        in-place operations of the model do not change features: they are copies, with `detach` on
        the CPU made at the first write. A layer that was not reached gives None, and a
        `NeverFiredWarning`.

    Raises:
        SelectionError: no such layer.
        HookError: a wanted module is scripted.
        ArgumentError: `detach` or `stop` is neither True nor False.

    >>> lenet = nn.Sequential(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.Flatten())
    >>> extract = feature_extractor(lenet, {"2": "conv2"})
    >>> extract(torch.ones(1, 1, 28, 28))["conv2"].shape
    torch.Size([1, 16, 20, 20])
    """
    chosen = select(model, *layers)
    for module in chosen.values():
        check_hookable(module, "feature_extractor")
    wanted = {key: chosen.place(key) for key in chosen}
    return FeatureExtractor(model, wanted, detach=detach, stop=stop)


class FeatureExtractor(Wrapper):
    """Runs the model it wraps and returns the outputs of some layers; see `feature_extractor`.

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
        """Run the model on its inputs; return the features by name, in the order selected."""
        if torch.compiler.is_compiling():
            eager: Callable[..., Any] = torch.compiler.disable
            features: dict[str, Any] = eager(self._extract)(*args, **kwargs)
            return features
        return self._extract(*args, **kwargs)

    def _extract(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        features, thread = dict[str, Any](), get_ident()
        # torch.export needs the whole forward; operations without a use fall out of its graph
        stop = self.stop and call_kind() != "exported"

        def seeing(key: str, path: str) -> Callable[..., None]:
            """Return the hook that stores the output of a layer, or the part of it at `path`."""

            def see(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                nonlocal stop
                # other threads may call the same model, in an extractor or not
                if key in features or call_kind(thread) == "other thread":
                    return
                part = part_at(output, path, "feature_extractor", lambda: f'"{key}"')
                # later in-place operations do not change it
                features[key] = tree_map(snapshot if self.detach else Tensor.clone, part)
                if stop and len(features) == len(self.wanted):
                    stop = False  # once: if the model swallows it, other forward passes still end
                    raise StopForward(features)

            return see

        with ExitStack() as stack:
            stack.callback(EAGER.end, features)
            enter_eager(features)
            for key, (name, path) in self.wanted.items():
                _, module = find(self.wrapped, name) or ("", select(self.wrapped, name)[name])
                stack.callback(attach(module, seeing(key, path)).remove)
            try:
                self.wrapped(*args, **kwargs)
            except StopForward as e:
                if e.owner is not features:
                    raise
        if missing := [key for key in self.wanted if key not in features]:
            few = ", ".join(f'"{key}"' for key in missing[:5]) + (" …" if missing[5:] else "")
            warn(
                f"feature_extractor: {len(missing)} of {len(self.wanted)} layers were not reached "
                f"by this input, in this thread: {few}. The whole model ran, and they are None. "
                "Leave them out, or see which layers this input runs with print_sizes(model). "
                "DataParallel runs threads of its own: wrap the extractor in it.",
                NeverFiredWarning,
            )
        return {key: features.get(key) for key in self.wanted}

    def extra_repr(self) -> str:
        """Return the features' names, and the layers that they come from."""
        paths = {key: name + path for key, (name, path) in self.wanted.items()}
        return ", ".join(p if p == key else f"{key} = {p}" for key, p in paths.items())
