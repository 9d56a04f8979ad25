"""`TrainingProbes`: what the first steps of a loop show beyond statistics, for `diagnose`.

A loop holds one and calls it in few places. Everything is seen where it happens (batches, the loss
and its autograd graph, gradients that outlive a step), in the first steps only; nothing is read
from the device before `read`, which gives these keys of `Run.info`, each only where it is known:

    loss_func       str: the loss in the graph, such as "cross_entropy", if the loop has no own
    n_classes       int: size of the classes' dimension of a cross entropy
    loss_input      str: what it is given wrongly: "Softmax", "Sigmoid", "scores", "probabilities"
    softmax_dim     str: the dimension of the softmax before a loss, if it is not over the classes
    broadcast       str: the shapes of a prediction and a target that are compared all with all
    loss_graph      True: the graph of the loss was seen
    batches         [n, different]: of the first n steps, how many saw another batch
    kept_gradients  [k, n]: of the first n steps, how many used the gradient of the step before, too
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

from hookkit.devices import widest_float
from hookkit.hooks.values import is_transforming
from hookkit.nested import leaves
from hookkit.recorders.kept_gradients import KeptGradients
from hookkit.recorders.loss_graph import FOUND, is_found, loss_facts
from hookkit.recorders.moments import plain

MANY = 64
"""Steps whose batches are compared: later ones cost nothing."""

_TRIES = 3
"""Batches in which the loss's graph is looked for: the first may have no backward pass."""

_VALUES = 4096  # of each tensor, that its mark depends on
_DIGITS = 9  # decimal ones, that the marks of equal tensors share on any device


def loss_name(loss_func: Any) -> str | None:
    """A loss function's name, else its class's; None for None.

    >>> loss_name(torch.nn.functional.mse_loss), loss_name(torch.nn.MSELoss())
    ('mse_loss', 'MSELoss')
    """
    if loss_func is None:
        return None
    name = getattr(loss_func, "__name__", None)
    return name if isinstance(name, str) else type(loss_func).__name__


class TrainingProbes:
    """What a loop has shown so far; the loop calls the `see_` methods as things happen.

    Attributes:
        done: the first `MANY` steps are over. The loop then need not call any method, but
            `see_batch` of a forward in eval mode, which makes `done` False until the step's end.
        other_loss: backward() was called on another loss than the one that the model returned.

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
        self._kept = KeptGradients()
        self._reported: dict[str, Any] | None = None  # what the graph of the loss shows
        self._marked = self._returned = False  # losses that the model returned; `_reported` is one
        self.other_loss = False
        self._root: dict[str, Any] | None = None  # and that of what backward() is called on
        self._named = False
        self._tries = _TRIES
        self._n_classes = 0
        self._marks: list[Tensor] = []  # one for each of the first steps
        self._mark: Tensor | None = None  # of the step under way
        self._n_batches = self._n_steps = self._n_eval = 0
        self.done = False  # the first steps are over
        self._modes: set[bool] = set()  # of the forwards since the last step
        self._first: list[tuple[Any, Tensor]] | None = None

    def see_batch(self, xb: Any, training: bool = True) -> None:
        """A forward with gradients begins.

        Args:
            xb: what the model is given, any structure.
            training: whether the model is in training mode.
        """
        self._modes.add(training)
        self._n_batches += 1
        self.done = self.done and training  # a step in eval mode is counted, whenever it comes
        if len(self._marks) >= MANY or torch.compiler.is_compiling() or is_transforming():
            return
        with torch.no_grad():
            for mark in marks(leaves(xb)):
                # the largest: a closure evaluates the same batch again
                now = mark if self._mark is None else self._mark.to(mark.device)
                self._mark = torch.maximum(now, mark)

    def see_scores(
        self, loss_func: Any, pred: Any, fed: bool = True, found: Tensor | None = None
    ) -> None:
        """What the model returned, still in its graph, and before the backward pass if it can be.

        Args:
            loss_func: the loop's loss function, or None if it is not known.
            pred: any structure. The first backward pass through it is asked where it began: so a
                loss that is reported as a number is seen, and one whose sign is turned.
            fed: `pred` is the loss's own first input, so that dimension 1 is that of the classes.
            found: what was taken for the loss in `pred`. Where backward() is called on another,
                `other_loss` becomes True.
        """
        node: Any
        self._named |= loss_func is not None
        if self._root is None and self._tries > 0 and not is_transforming():
            self._tries -= 1
            for node in {t.grad_fn for t in leaves(pred) if t.grad_fn is not None}:
                node.register_prehook(partial(self._see_backward, get_ident()))
        if self._root is None and found is not None and found.grad_fn is not None:
            self._marked, node = True, found.grad_fn
            node.metadata.setdefault(FOUND, set()).add(found.output_nr)
        name = (loss_name(loss_func) or "").lower().replace("_", "")
        by_class = name.startswith("crossentropy") and isinstance(pred, Tensor)
        mean = getattr(loss_func, "reduction", "mean") == "mean"
        if by_class and mean and not pred.is_nested and (pred.ndim == 2 or (fed and pred.ndim > 2)):
            self._n_classes = self._n_classes or pred.shape[1]

    def _see_backward(self, thread: int, grads: Any) -> None:
        """A backward pass, called by a thread, has reached the model's output."""
        if self._root is None and (root := _root(thread)) is not None:
            self._root = loss_facts(root.grad_fn)
            if self._marked and not is_found(root):
                self.other_loss = True
                self._reported = None if self._returned else self._reported

    def see_loss(self, loss: Tensor, params: Iterable[Tensor] = (), found: bool = False) -> None:
        """The loss of a batch, in its graph: the first one that has a graph is read.

        Args:
            loss: one number, live or detached.
            params: what is trained: whether it changes without a step that was seen.
            found: the model returned it, and `see_scores` is told of it.
        """
        if self._reported is None and loss.grad_fn is not None:
            self._reported, self._returned = loss_facts(loss.grad_fn), found
        if self._first is None and not is_transforming():
            with torch.no_grad():
                self._first = [(ref(p), mark) for p in params for mark in marks([p])]

    def see_step(self, opt: Any) -> None:
        """An optimizer is about to step, with the gradients that there are."""
        self._first = []
        self._kept.see_step(opt)

    def end_step(self) -> None:
        """A step is over: what comes now belongs to the next."""
        self._n_steps += 1
        self._n_eval += self._modes == {False}
        self._modes = set()
        if self._mark is not None and len(self._marks) < MANY:
            self._marks.append(self._mark)
        self._mark = None
        self.done = self._n_steps >= MANY

    def remove(self) -> None:
        """The loop is over: takes off what was attached; can be called at any time, and twice."""
        self._kept.remove()

    def read(self, n_steps: int, under_way: bool = False) -> dict[str, Any]:
        """The facts, as listed at the top of this file. Sync: a few, for small tensors.

        Args:
            n_steps: how many steps the loop has made.
            under_way: the loop goes on, so the first step may still be accumulated: for 100
                batches.
        """
        facts: dict[str, Any] = {"n_classes": self._n_classes} if self._n_classes else {}
        facts |= {**(self._root or {}), **(self._reported or {})}
        if self._root is not None or self._reported is not None:
            facts["loss_graph"] = True
        if self._named:
            facts.pop("loss_func", None)
        if self._marks:
            seen = torch.stack([t.to(self._marks[0].device) for t in self._marks]).tolist()  # sync
            different = len({f"{mark:.{_DIGITS}g}" for mark in seen})
            facts["batches"] = [len(seen), different]
        if self._n_eval:
            facts["eval_steps"] = [self._n_eval, n_steps]
        waits = under_way and self._n_batches < 100
        if self._n_batches and not (self._n_steps or waits) and self._stays():
            facts["no_step"] = True
        return facts | self._kept.read()

    def _stays(self) -> bool:
        """Whether no weight has another value than at the first loss. Sync: one for each."""
        pairs = [(p(), mark) for p, mark in self._first or ()]
        now = [(p, mark) for p, mark in pairs if p is not None]
        with torch.no_grad():
            return bool(now) and all(float(m) == float(mark) for p, mark in now for m in marks([p]))

    def __getstate__(self) -> dict[str, Any]:
        """Plain values that load on any machine, without what is attached."""
        state = {
            **vars(self),
            "_marks": [t.cpu() for t in self._marks],
            "_mark": None,
            "_first": [],
        }
        del state["_kept"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _kept=KeptGradients())


def marks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """One number for each of `tensors` that can be read: equal tensors have equal ones."""
    for t in tensors:
        # no subclasses: reading a part of a DTensor would wait for other ranks
        whole = type(t) in (Tensor, torch.nn.Parameter) and t.layout is torch.strided
        if whole and not t.is_nested and t.numel() and (values := plain(t)) is not None:
            wide = widest_float(t.device)
            stride = t.numel() // _VALUES | 1  # odd: an even one may stay in the padding of images
            some = values.reshape(-1)[::stride][:_VALUES].to(wide)
            yield some @ torch.arange(len(some), dtype=wide, device=t.device).cos()


def _root(thread: int) -> Any:
    """The tensor on which a thread has called the backward pass under way; None if not known.

    PyTorch has no hook for that. Autograd runs hooks in threads of its own on a GPU; the thread
    that called `backward` waits in it, and its frame there has the tensor.
    """
    frame, given = sys._current_frames().get(thread), None
    while frame is not None:  # the outermost call is the user's: a checkpoint's are inside
        if frame.f_code is torch.autograd.backward.__code__:
            # Its first parameter, a tuple by then. By another name no root is known.
            given = frame.f_locals.get("tensors")
        frame = frame.f_back
    roots = [given] if isinstance(given, Tensor) else list(given or ())
    is_one = len(roots) == 1 and isinstance(roots[0], Tensor) and roots[0].grad_fn is not None
    return roots[0] if is_one else None
