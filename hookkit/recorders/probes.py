"""`TrainingProbes`: collects facts for `diagnose` in the first steps of a loop.

Each loop has one, and calls it at a batch, a loss and a step. It looks at batches, the autograd
graph of the loss, and gradients that outlive a step. It reads nothing from the device before
`read`, which returns these keys of `Run.info`, each only if it is known:

    loss_func       str: the loss in the graph, "cross_entropy", if the loop has no loss_func
    n_classes       int: size of the classes' dimension of a cross entropy
    loss_input      str: a wrong input of the loss: "Softmax", "Sigmoid", "scores", "probabilities"
    softmax_dim     str: the dimension of the softmax before a loss, if it is not over the classes
    broadcast       str: the shapes of a prediction and a target of which all pairs are compared
    loss_graph      True: the graph of the loss was seen
    batches         [n, different]: how many different batches the first n steps saw
    kept_gradients  [k, n]: of the first n steps, how many also used the last step's gradient
    eval_steps      [k, n]: of all n steps, how many were made in eval mode
    no_step         True: batches came, no optimizer stepped, and weights stayed as they were
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from threading import get_ident
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from hookkit._core.devices import widest_float
from hookkit._core.pytree import tree_leaves
from hookkit.hooks.values import is_transforming
from hookkit.recorders.kept_gradients import KeptGradients
from hookkit.recorders.loss_graph import FOUND, is_found, loss_facts
from hookkit.recorders.moments import plain

MANY = 64
"""How many first steps are looked at; later steps cost nothing."""

_TRIES = 3  # how many batches to wait for a backward pass: the first may have none
_VALUES = 4096  # how many values of a tensor its fingerprint reads
_DIGITS = 9  # how many decimal digits the fingerprints of equal tensors share on all devices


def loss_name(loss_func: Any) -> str | None:
    """Return a loss function's name, or its class's if it has none; None for None.

    >>> loss_name(torch.nn.functional.mse_loss), loss_name(torch.nn.MSELoss())
    ('mse_loss', 'MSELoss')
    """
    if loss_func is None:
        return None
    name = getattr(loss_func, "__name__", None)
    return name if isinstance(name, str) else type(loss_func).__name__


class TrainingProbes:
    """Looks at a loop's first steps; the loop calls the `see_` methods as things happen.

    Attributes:
        done: whether the first `MANY` steps are over. Then the loop need not call any method but
            `see_batch` for a forward in eval mode, which sets `done` to False until the step ends.
        other_loss: whether backward() was called on another loss than the model returned.

    >>> net, x = torch.nn.Linear(2, 3), torch.ones(4, 2)
    >>> opt, probes = torch.optim.SGD(net.parameters(), 0.1), TrainingProbes()
    >>> for _ in range(4):
    ...     probes.see_batch(x)
    ...     loss = torch.nn.functional.cross_entropy(net(x).softmax(1), torch.arange(4) % 3)
    ...     probes.see_loss(loss, net.parameters())
    ...     opt.zero_grad(); loss.backward(); probes.see_step(opt); opt.step(); probes.end_step()
    >>> facts = probes.read(n_steps=4)
    >>> facts["loss_input"], facts["n_classes"], facts["batches"], facts["kept_gradients"]
    ('Softmax', 3, [4, 1], [0, 3])
    """

    def __init__(self) -> None:
        self.done = self.other_loss = False
        self._kept = KeptGradients()
        self._n_batches = self._n_steps = self._n_eval = 0
        self._modes: set[bool] = set()  # training modes of the forwards since the last step
        self._batches: list[Tensor] = []  # the fingerprint of the batch of each first step
        self._batch: Tensor | None = None  # the fingerprint of the current step's batch
        # before the first step, weak references to the weights, and their fingerprints
        self._weights: list[tuple[Any, Tensor]] | None = None
        # facts from the graph of the reported loss, and of the tensor that backward() is called on
        self._of_reported: dict[str, Any] | None = None
        self._of_backward: dict[str, Any] | None = None
        self._model_returns = False  # a loss is among the model's outputs
        self._reports_returned = False  # `_of_reported` is about a loss that the model returned
        self._has_loss_func = False
        self._tries = _TRIES
        self._n_classes = 0

    def see_batch(self, xb: Any, training: bool = True) -> None:
        """Look at a forward with gradients as it begins.

        Args:
            xb: the inputs of the model, any structure.
            training: whether the model is in training mode.
        """
        self._modes.add(training)
        self._n_batches += 1
        self.done = self.done and training  # steps in eval mode are counted in the whole run
        if len(self._batches) >= MANY or torch.compiler.is_compiling() or is_transforming():
            return
        with torch.no_grad():
            for now in fingerprints(tree_leaves(xb)):
                # the maximum of a step, since a closure runs the same batch several times
                before = now if self._batch is None else self._batch.to(now.device)
                self._batch = torch.maximum(before, now)

    def see_scores(
        self, loss_func: Any, pred: Any, fed: bool = True, found: Tensor | None = None
    ) -> None:
        """Look at the model's output, or the loss function's input, with its graph.

        Args:
            loss_func: the loop's loss function, or None if it is not known.
            pred: any structure. A hook finds the tensor on which the first backward pass through it
                was called: also a loss that is reported as a number, or with another sign.
            fed: whether `pred` is the first input of the loss, so dimension 1 is the classes.
            found: the tensor in `pred` that was taken for the loss. If backward() is called on
                another one, `other_loss` becomes True.
        """
        node: Any
        self._has_loss_func |= loss_func is not None
        if self._of_backward is None:
            if self._tries > 0 and not is_transforming():
                self._tries -= 1
                for node in {t.grad_fn for t in tree_leaves(pred) if t.grad_fn is not None}:
                    node.register_prehook(partial(self._see_backward, get_ident()))
            if found is not None and found.grad_fn is not None:
                self._model_returns, node = True, found.grad_fn
                node.metadata.setdefault(FOUND, set()).add(found.output_nr)
        name = (loss_name(loss_func) or "").lower().replace("_", "")
        by_class = name.startswith("crossentropy") and isinstance(pred, Tensor)
        mean = getattr(loss_func, "reduction", "mean") == "mean"
        if by_class and mean and not pred.is_nested and (pred.ndim == 2 or (fed and pred.ndim > 2)):
            self._n_classes = self._n_classes or pred.shape[1]

    def _see_backward(self, thread: int, grads: Any) -> None:
        """Look at the loss of the backward pass that `thread` has called."""
        if self._of_backward is None and (root := _root(thread)) is not None:
            self._of_backward = loss_facts(root.grad_fn)
            if self._model_returns and not is_found(root):
                self.other_loss = True
                self._of_reported = None if self._reports_returned else self._of_reported

    def see_loss(self, loss: Tensor, params: Iterable[Tensor] = (), found: bool = False) -> None:
        """Look at the loss of a batch, and read the graph of the first one that has a graph.

        Args:
            loss: one number, with or without a graph.
            params: the parameters, to find out whether they change without a step that is seen.
            found: whether the model returned it, so that `see_scores` gets it too.
        """
        if self._of_reported is None and loss.grad_fn is not None:
            self._of_reported, self._reports_returned = loss_facts(loss.grad_fn), found
        if self._weights is None and not is_transforming():
            with torch.no_grad():
                self._weights = [(ref(p), mark) for p in params for mark in fingerprints([p])]

    def see_step(self, opt: Any) -> None:
        """Look at an optimizer that is about to step, and at its gradients."""
        self._weights = []
        self._kept.see_step(opt)

    def end_step(self) -> None:
        """End a step; the next call belongs to the next step."""
        self._n_steps += 1
        self._n_eval += self._modes == {False}
        self._modes = set()
        if self._batch is not None and len(self._batches) < MANY:
            self._batches.append(self._batch)
        self._batch = None
        self.done = self._n_steps >= MANY

    def remove(self) -> None:
        """Remove all hooks when the loop ends; a second call does nothing."""
        self._kept.remove()

    def read(self, n_steps: int, under_way: bool = False) -> dict[str, Any]:
        """Return the facts that are listed at the top of this file. Sync: a few small tensors.

        Args:
            n_steps: how many steps the loop has made.
            under_way: whether the loop goes on: then `no_step` needs 100 batches, since the first
                step may still accumulate gradients.
        """
        facts: dict[str, Any] = {"n_classes": self._n_classes} if self._n_classes else {}
        facts |= {**(self._of_backward or {}), **(self._of_reported or {})}
        if self._of_backward is not None or self._of_reported is not None:
            facts["loss_graph"] = True
        if self._has_loss_func:
            facts.pop("loss_func", None)
        if self._batches:
            together = [t.to(self._batches[0].device) for t in self._batches]
            seen = torch.stack(together).tolist()  # sync
            facts["batches"] = [len(seen), len({f"{mark:.{_DIGITS}g}" for mark in seen})]
        if self._n_eval:
            facts["eval_steps"] = [self._n_eval, n_steps]
        waits = under_way and self._n_batches < 100
        if self._n_batches and not (self._n_steps or waits) and self._stays():
            facts["no_step"] = True
        return facts | self._kept.read()

    def _stays(self) -> bool:
        """Return whether no weight has changed since the first loss. Sync: one per weight."""
        live = [(p, mark) for at, mark in self._weights or () if (p := at()) is not None]
        with torch.no_grad():
            same = [float(now) == float(mark) for p, mark in live for now in fingerprints([p])]
        return bool(live) and all(same)

    def __getstate__(self) -> dict[str, Any]:
        """Return plain values that load on any machine, without what is attached."""
        batches = [t.cpu() for t in self._batches]
        return {**vars(self), "_batches": batches, "_batch": None, "_weights": []}


def fingerprints(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield a number for each of `tensors` that can be read; equal tensors have equal numbers."""
    for t in tensors:
        # no subclasses: reading a part of a DTensor would wait for other ranks
        whole = type(t) in (Tensor, torch.nn.Parameter) and t.layout is torch.strided
        if whole and not t.is_nested and t.numel() and (values := plain(t)) is not None:
            wide = widest_float(t.device)
            stride = t.numel() // _VALUES | 1  # odd: an even one may read only an image's padding
            some = values.reshape(-1)[::stride][:_VALUES].to(wide)
            yield some @ torch.arange(len(some), dtype=wide, device=t.device).cos()


def _root(thread: int) -> Any:
    """Return the tensor on which `thread` has called the current backward pass; None if unknown.

    PyTorch has no hook for it. The tensor is read from the frame of `backward` in the stack of
    `thread`, which waits there while autograd runs hooks, on a GPU in threads of its own.
    """
    frame, given = sys._current_frames().get(thread), None
    while frame is not None:  # to the outermost call, the user's: checkpoints call it inside
        if frame.f_code is torch.autograd.backward.__code__:
            # The name of its first parameter. If PyTorch renames it, the root is unknown.
            given = frame.f_locals.get("tensors")
        frame = frame.f_back
    roots = [given] if isinstance(given, Tensor) else list(given or ())
    is_one = len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].grad_fn is not None
    return roots[0] if is_one else None
