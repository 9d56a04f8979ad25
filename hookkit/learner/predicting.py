"""Passes without training: `Learner.validate`, `get_preds` and `predict`, which change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    default_collate,
)

from hookkit.callbacks import Callback, ProgressCallback, Recorder
from hookkit.callbacks.metrics import gathered
from hookkit.callbacks.runner import listed
from hookkit.data import as_loaders, has_samples, no_batches
from hookkit.errors import ModelRunError
from hookkit.learner.loop import BATCH, Loop
from hookkit.nested import PLAIN, is_container, leaves, parts_of, rebuilt, tmap

_STATE = (*BATCH, "iter", "n_iter", "train_iter", "pct_train", "training", "stepped", "steps_now")
_STATE += ("autocast", "scaler", "eval_pass", "final_record", "_device", "_by_keyword")
"""What a pass sets that a fit around it, or a later one, goes on with."""

_OF_RECORDER = ("_metrics", "_n_added", "_cancelled")


class Predicting(Loop):
    """The part of a Learner that does not train."""

    _plain_loaders: list[Any]  # in `distrib_ctx`: those of the Learner itself

    def validate(self, ds_idx: int = 1, dl: Any = None, cbs: Any = None) -> list[Any]:
        """The mean loss and the metrics on validation data: `[valid_loss, *metrics]`.

        Records, the modules' modes and the state of a surrounding fit do not change.

        Args:
            ds_idx: which loader of `dls`. A torch DataLoader that shuffles, or drops its last
                batch, is read in order and whole.
            dl: batches to use instead: a loader or a list.
            cbs: further callbacks.

        Raises:
            ModelRunError: there is no data.
        """
        dl = self._loader(ds_idx, dl, "validate")
        with self._eval_pass(cbs):
            self._do_epoch_validate(dl)
            record: list[Any] = list(self.final_record or [])
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
        cbs: Any = None,
        concat_dim: int | None = 0,
    ) -> tuple[Any, ...]:
        """`([inputs,] preds, targets [, losses])` of all batches, on the CPU.

        Structures (tuples, dicts, model outputs) are joined leaf by leaf and keep their type; a
        list of strings, or of dicts, has an item for each sample. In `distrib_ctx` every rank gets
        all tensors, in the order of the data, and each has to call; other items are its own.

        Args:
            ds_idx, dl, cbs: as in `validate`.
            with_input: whether to return the inputs too.
            with_loss: whether to return the loss of each sample too, (n,), if the loss function
                has a `reduction`; else of each batch.
            act: applied to each prediction.
            concat_dim: the dimension batches are joined along; None gives lists of them.

        Raises:
            ModelRunError: there is no data, or no batch.
        """
        dl = self._loader(ds_idx, dl, "get_preds")
        keep = _Keep(with_input, with_loss, act)
        with self._eval_pass([keep, *listed(cbs)]):
            self._do_epoch_validate(dl)
        self._past = [cb for cb in self._past if cb is not keep]  # or its tensors would live on
        if not keep.batches:
            raise ModelRunError(no_batches("get_preds: the loader"))
        parts = [list(part) for part in zip(*keep.batches, strict=True)]
        return tuple(parts if concat_dim is None else [joined(p, concat_dim) for p in parts])

    def predict(self, item: Any, *, act: Callable[[Any], Any] | None = None) -> Any:
        """The model's output for one sample, on the CPU and without a batch dimension.

        Args:
            item: what the data set has: inputs with targets, or an input alone. It becomes a batch
                of one by the validation loader's `collate_fn`, or else the training loader's.
            act: applied to the output: `lambda pred: pred.softmax(-1)`.

        >>> from hookkit.testing import synth_learner
        >>> learn = synth_learner()
        >>> x, y = learn.dls.valid_ds[0]
        >>> learn.predict((x, y)).equal(learn.predict(x)), learn.predict(x).shape == x.shape
        (True, True)
        """
        train, *others = self.dls or (None,)
        loaders = [*others, train]  # that of training may augment
        loader: Any = next((dl for dl in loaders if hasattr(dl, "collate_fn")), None)
        plain = loader is None or loader.batch_size is None  # its data set has batches
        batch = (default_collate if plain else loader.collate_fn)([item])
        preds, _ = self.get_preds(dl=[batch], act=act)
        return tmap(lambda t: t[0], preds)

    def _needs_data(self, who: str) -> None:
        if self.dls is None:
            raise ModelRunError(
                f"{who}: this Learner has no data. Make it with DataLoaders(train, valid), set "
                f"`learn.dls`, or give batches: `learn.get_preds(dl=[…])`."
            )
        self.dls = as_loaders(self.dls)  # a user may have set it to anything that the Learner takes

    def _loader(self, ds_idx: int, dl: Any, who: str) -> Any:
        if dl is None:
            self._needs_data(who)
            dl = self.dls[ds_idx]
            plain = dl if self.accelerator is None else self._plain_loaders[ds_idx]
            if (whole := in_order(plain)) is plain:
                return dl
            dl = whole
        plain = isinstance(dl, DataLoader) and not hasattr(dl, "end_of_dataloader")
        if self.accelerator is None or not plain:
            return dl
        return self.accelerator.prepare_data_loader(dl)  # for each rank a part of it

    def __enter__(self) -> Self:
        """`with learn:` fires `before_fit`, `before_epoch`; at the end their `after_` events."""
        self._check_idle("`with learn` was entered")
        self._entered = self._fit_events()
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)

    @contextmanager
    def _fit_events(self) -> Iterator[None]:
        """The events of a fit and an epoch, around a pass that is not in a fit."""
        with self._run_under_way():  # at the end `run` is True again
            for cb in self.cbs:
                cb.run = cb.run and not cb._only_train_loop
            self("before_fit", "before_epoch")
            try:
                yield
            finally:
                self("after_epoch", "after_fit")

    @contextmanager
    def _eval_pass(self, cbs: Any) -> Iterator[None]:
        """Around a pass without training: afterwards state and modes are as before."""
        state = {name: vars(self)[name] for name in _STATE if name in vars(self)}
        modes = [(m, m.training) for m in self.model.modules()]
        paused = self._pause_recorders()
        # it is no part of a batch that surrounds it, and an epoch has a bar already
        bars = [cb for cb in self.cbs if self.fitting and isinstance(cb, ProgressCallback)]
        running = [cb for cb in [*paused, *bars] if cb.run]
        for cb in running:
            cb.run = False
        recorders = [cb for cb in self.cbs if isinstance(cb, Recorder)]
        sums = [(cb, {name: vars(cb)[name] for name in _OF_RECORDER}) for cb in recorders]
        for recorder in recorders if self.fitting else ():
            recorder._metrics = copy.deepcopy(recorder._metrics)  # a validation may be under way
        try:
            self.eval_pass = True
            with self.added_cbs(cbs), nullcontext() if self.fitting else self._fit_events():
                yield
        finally:
            for name in _STATE:
                vars(self).pop(name, None)
            vars(self).update(state)
            for module, mode in modes:
                module.training = mode
            for recorder, values in sums:
                vars(recorder).update(values)
            for cb in running:
                cb.run = True
            for cb in paused:
                cb._record(True)


class _Keep(Callback):
    """Keeps each batch's predictions and targets on the CPU; inputs and losses with `with_…`."""

    order = 70

    def __init__(self, with_input: bool, with_loss: bool, act: Callable[[Any], Any] | None) -> None:
        self.with_input, self.with_loss, self.act = with_input, with_loss, act
        self.batches: list[tuple[Any, ...]] = []

    def before_batch(self) -> None:
        """Copies the input before the model can change it."""
        if self.with_input:
            self._x = tmap(lambda t: t.detach().clone(), self.learn.x)

    def after_batch(self) -> None:
        """Keeps the batch, unless it was cancelled before there was a prediction."""
        learn = self.learn
        if learn.pred is None:
            return
        pred = learn.pred if self.act is None else self.act(learn.pred)
        batch = (*([self._x] if self.with_input else []), pred, learn.y)
        batch += (_losses(learn),) if self.with_loss else ()
        batch = gathered(learn, batch)
        self.batches.append(tmap(lambda t: t.detach().to("cpu", copy=True), batch))


def _losses(learn: Any) -> Any:
    """The loss of each sample, (n,), if the loss function has a `reduction`; else the batch's."""
    f = learn.loss_func
    if not hasattr(f, "reduction") or not learn.yb:
        return learn.loss
    before, f.reduction = f.reduction, "none"
    try:
        losses = f(learn.pred, *learn.yb)
    finally:
        f.reduction = before
    return losses.flatten(1).mean(1) if losses.ndim > 1 else losses


def joined(batches: list[Any], dim: int = 0) -> Any:
    """Join structures of one kind: tensors along `dim`, scalars stacked, lists one after another.

    Those are lists without tensors (names of files), and lists of dicts, which have an item for
    each sample. A number or text that is the same in all batches stays; anything else becomes a
    list with each batch's own.

    >>> joined([(torch.ones(2, 3), ["a", "b"]), (torch.ones(1, 3), ["c"])])[1]
    ['a', 'b', 'c']
    """
    try:
        return _joined(batches, dim)
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        error.add_note("get_preds(…, concat_dim=None) gives lists of the batches, not joined.")
        raise


def _joined(batches: list[Any], dim: int) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(batches, dim) if first.ndim else torch.stack(batches)
    if type(first) in (list, tuple) and (has_samples(first) or not leaves(first)):
        return type(first)(item for batch in batches for item in batch)
    if not is_container(first):
        constant = type(first) in PLAIN and all(batch == first for batch in batches)
        return first if constant else batches
    parts = [dict(parts_of(batch)) for batch in batches]
    if other := next((p for p in parts if p.keys() != parts[0].keys()), None):
        raise ValueError(f"a batch has {list(other)}, and the first one {list(parts[0])}")
    return rebuilt(first, [_joined([p[step] for p in parts], dim) for step in parts[0]])


def in_order(dl: Any) -> Any:
    """Return `dl`, or a torch DataLoader like it that gives every row, in the order of the data.

    A loader that shuffles is read in order, and so are the indices of a SubsetRandomSampler. Any
    other sampler, and a batch sampler, says what to read and stays.
    """
    if type(dl) is not DataLoader or dl.batch_size is None:
        return dl
    sampler: Any = dl.sampler
    if isinstance(sampler, RandomSampler):
        sampler = None
    elif isinstance(sampler, SubsetRandomSampler):
        sampler = sampler.indices
    elif not dl.drop_last:
        return dl
    return DataLoader(
        dl.dataset,
        dl.batch_size,
        sampler=None if isinstance(dl.dataset, IterableDataset) else sampler,
        collate_fn=dl.collate_fn,
        num_workers=dl.num_workers,
        pin_memory=dl.pin_memory,
        worker_init_fn=dl.worker_init_fn,
        multiprocessing_context=dl.multiprocessing_context,
    )
