"""Passes without training: `Learner.validate` and `Learner.get_preds`, which change nothing.

Builds on `loop`. `GatherPreds` is the callback behind `get_preds`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hookkit import ranks
from hookkit.callbacks import Callback
from hookkit.callbacks.runner import listed
from hookkit.data import DataLoaders
from hookkit.errors import ModelRunError
from hookkit.events import CANCEL_EXCEPTIONS, stray_cancel
from hookkit.interrupts import block
from hookkit.learner.checks import as_loaders
from hookkit.learner.loop import BATCH, Loop
from hookkit.nested import describe, leaves, tmap

_STATE = [*BATCH, "iter", "n_iter", "training", "stepped", "eval_pass", "final_record"]
_STATE += ["_in_batch", "_by_keyword", "_device"]


class Predicting(Loop):
    """The part of a Learner that does not train."""

    def validate(self, ds_idx: int = 1, dl: Any = None, cbs: Any = None) -> list[Any]:
        """The mean loss and the metrics on validation data: `[valid_loss, *metrics]`.

        Records, the modules' modes and the state of a surrounding fit do not change. Inside a fit
        only the events of validation fire.

        Args:
            ds_idx: which loader of `dls`.
            dl: batches to use instead: a loader or a list.
            cbs: further callbacks.
        """
        dl = self._loader(ds_idx, dl, "validate")
        with self._untouched(cbs, inner=False):
            self._do_epoch_validate(dl)
            record = list(self.final_record or [])
        self.final_record = record
        return record

    def get_preds(
        self,
        ds_idx: int = 1,
        dl: Any = None,
        *,
        with_input: bool = False,
        with_loss: bool = False,
        act: Callable[[Any], Any] | None = None,
        inner: bool = False,
        cbs: Any = None,
        concat_dim: int | None = 0,
    ) -> tuple[Any, ...]:
        """`([inputs,] preds, targets [, losses])` of all batches, on the CPU.

        Structures (tuples, dicts, model outputs) are joined leaf by leaf and keep their type.
        Records do not change. Under `distrib_ctx` every rank gets the whole, in the order of the
        data, and each has to call.

        Args:
            ds_idx, dl, cbs: as in `validate`.
            with_input: whether to return the inputs too.
            with_loss: whether to return the loss of each sample too, (n,), or of each batch if the
                loss function has no `reduction`.
            act: applied to each prediction.
            inner: whether to fire the events of validation only, not those of fit and epoch.
            concat_dim: the dimension batches are joined along; None gives lists of them.

        Raises:
            ModelRunError: there is no data, or the batches' shapes do not fit together.
        """
        dl = self._loader(ds_idx, dl, "get_preds")
        gather = GatherPreds(with_input, with_loss, act)
        with self._untouched([gather, *listed(cbs)], inner):
            self._do_epoch_validate(dl)
            if self.accelerator is not None and hasattr(dl, "end_of_dataloader"):
                with ranks.together(f"call get_preds{self._where()}"):
                    gather.of_all_ranks()
        self._past = [cb for cb in self._past if cb is not gather]  # or its tensors would live on
        return gather.result(concat_dim)

    def predict(self, item: Any, *, act: Callable[[Any], Any] | None = None) -> Any:
        """The model's output for one sample, on the CPU and without a batch dimension.

        The sample becomes a batch of one as the loader makes its batches (`collate_fn`), and goes
        through `get_preds`: nothing changes. Unlike fastai's it is not decoded.

        Args:
            item: what the data set has: inputs with targets, or an input alone.
            act: applied to the output: `lambda pred: pred.softmax(-1)`.

        >>> from hookkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> x, y = learn.dls.valid_ds[0]
        >>> learn.predict((x, y)).equal(learn.predict(x)), learn.predict(x).shape == x.shape
        (True, True)
        """
        loader: Any = next((dl for dl in self.dls or () if hasattr(dl, "collate_fn")), None)
        plain = loader is None or loader.batch_size is None  # its data set has batches
        batch = (default_collate if plain else loader.collate_fn)([item])
        preds, _ = self.get_preds(dl=[batch], act=act)
        return tmap(lambda t: t[0], preds)

    def to_detach(self, x: Any, cpu: bool = True, gather: bool = True) -> Any:
        """`x` with its tensors detached, on the CPU or where they are: for fastai's metrics."""
        return tmap(lambda t: t.detach().cpu() if cpu else t.detach(), x)

    def _needs_data(self, verb: str) -> None:
        if self.dls is None:
            raise ModelRunError(
                f"{verb}: this Learner has no data. Make it with DataLoaders(train, valid), set "
                f"`learn.dls`, or give batches: `learn.get_preds(dl=[…])`."
            )
        self.dls = as_loaders(self.dls)  # a user may have set it to anything that the Learner takes

    def _loader(self, ds_idx: int, dl: Any, verb: str) -> Any:
        if dl is None:
            self._needs_data(verb)
            return self.dls[ds_idx]
        loader = DataLoaders(dl).train  # its check
        known = self.accelerator is None or hasattr(loader, "end_of_dataloader")
        if known or not isinstance(loader, DataLoader):
            return loader
        return self.accelerator.prepare_data_loader(loader)  # for each rank a part of it

    @block
    def _untouched(self, cbs: Any, inner: bool) -> Iterator[None]:
        """Around a pass without training: afterwards state and modes are as before.

        Outside a fit the events of a fit and an epoch are fired around it, unless `inner`.
        """
        kept = {name: getattr(self, name) for name in _STATE}
        modes = [(m, m.training) for m in self.model.modules()]
        # this pass is no part of a batch that surrounds it
        paused = self._pause_recorders() if self._in_batch else []
        running, with_grad = [cb for cb in paused if cb.run], torch.is_grad_enabled()
        try:
            self.eval_pass = True
            for cb in running:
                cb.run = False
            with self.added_cbs(cbs):
                if inner or self.fitting:
                    yield
                else:
                    with self:
                        yield
        except CANCEL_EXCEPTIONS as stray:
            if not self.fitting:
                stray.add_note(stray_cancel(stray))
            raise
        finally:
            torch.set_grad_enabled(with_grad)  # Ctrl-C in torch's own `no_grad` leaves it off
            for name, value in kept.items():
                setattr(self, name, value)
            for module, mode in modes:
                module.training = mode
            for cb in running:
                cb.run = True
            for cb in paused:
                cb._record(True)


_AT_A_TIME = 16  # batches of each rank in one exchange


class GatherPreds(Callback):
    """Keeps each batch's predictions and targets on the CPU; inputs and losses with `with_…`."""

    order = 70

    def __init__(self, with_input: bool, with_loss: bool, act: Callable[[Any], Any] | None) -> None:
        self.with_input, self.with_loss, self.act = with_input, with_loss, act
        self.batches: dict[int, tuple[Any, ...]] = {}  # by number: input, pred, targets, loss

    def before_batch(self) -> None:
        """Copies the input before the model can change it."""
        if self.with_input:
            self._x = kept(self.learn.x)

    def after_batch(self) -> None:
        """Keeps the batch, unless it was cancelled before there was a prediction."""
        learn = self.learn
        if learn.pred is None:
            return
        pred = learn.pred if self.act is None else self.act(learn.pred)
        self.batches[learn.iter] = (
            *([self._x] if self.with_input else []),
            kept(pred),
            kept(learn.y),
            *([kept(self._losses())] if self.with_loss else []),
        )

    def _losses(self) -> Any:
        learn = self.learn
        f = learn.loss_func
        if f is not None and learn.yb:
            if hasattr(f, "reduction"):
                before, f.reduction = f.reduction, "none"
                try:
                    return _by_sample(f(learn.pred, *learn.yb))
                finally:
                    f.reduction = before
            if "reduction" in _parameters(f):
                return _by_sample(f(learn.pred, *learn.yb, reduction="none"))
        return None if learn.loss is None else learn.loss

    def result(self, dim: int | None) -> tuple[Any, ...]:
        """`([inputs,] preds, targets [, losses])`, joined along `dim`; None leaves lists."""
        n = 2 + self.with_input + self.with_loss
        parts = [[batch[i] for batch in self.batches.values()] for i in range(n)]
        return tuple(parts if dim is None else [joined(part, dim) for part in parts])

    def of_all_ranks(self) -> None:
        """Puts the batches of all ranks in the place of this one's, in the order of the data.

        The first ones of all ranks come first, then the second ones, as accelerate shared them out.
        """
        own, found = self.batches, list[Any]()
        n = int(ranks.greatest(torch.tensor(max(own, default=-1) + 1, device="cpu")))
        for first in range(0, n, _AT_A_TIME):
            some = range(first, first + _AT_A_TIME)
            everyone = ranks.gather_object({i: own[i] for i in some if i in own})
            found += [batches[i] for i in some for batches in everyone if i in batches]
        self.batches = dict(enumerate(found))


def kept(x: Any) -> Any:
    """A detached copy of `x` on the CPU that later batches cannot change."""
    return tmap(lambda t: t.detach().to("cpu", copy=True), x)


def joined(batches: list[Any], dim: int = 0) -> Any:
    """Structures of the same kind as one: tensors concatenated along `dim`, scalars stacked.

    >>> joined([(torch.ones(2, 3), None), (torch.ones(1, 3), None)])[0].shape
    torch.Size([3, 3])
    """
    if not batches:
        return None
    columns = iter(zip(*[leaves(b) for b in batches], strict=True))

    def join(_: Tensor) -> Tensor:
        ts = next(columns)
        return torch.stack(ts) if ts[0].ndim == 0 else torch.cat(ts, dim)

    try:
        return tmap(join, batches[0])
    except (RuntimeError, ValueError, IndexError) as error:
        shapes = ", ".join(dict.fromkeys(describe(b) for b in batches))
        raise ModelRunError(
            f"get_preds: batches cannot be joined along dimension {dim}; their shapes are "
            f"{shapes}. Pad them to one size, or use get_preds(…, concat_dim=None) for lists."
        ) from error


def _by_sample(losses: Tensor) -> Tensor:
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def _parameters(f: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(f).parameters)
    except (TypeError, ValueError):
        return ()
