"""The ready-made callbacks."""

import sys
from typing import Any

import pytest
import torch
from learners import EventLog, plain, quiet
from torch import nn

from hookkit.callbacks import (
    Callback,
    GradientAccumulation,
    GradientClip,
    MixedPrecision,
    ProgressCallback,
    SchedulerCallback,
)
from hookkit.callbacks.events import CancelBatchException, CancelValidException
from hookkit.errors import MissingExtraError
from hookkit.testing import mlp, synth_learner

# --- TrainEvalCallback


def test_modes_follow_the_part_and_training_batches_of_the_fit_are_counted() -> None:
    seen: list[tuple[int, float]] = []
    modes: list[tuple[bool, bool]] = []
    count = Callback(before_batch=lambda cb: seen.append((cb.train_iter, round(cb.pct_train, 6))))
    look = Callback(after_pred=lambda cb: modes.append((cb.training, cb.learn.model.training)))
    count.run_valid = False
    learn = quiet(n_trn=2, n_val=1, cbs=[count, look])

    learn.fit(2)
    learn.validate()
    learn.fit(1)

    assert seen == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75), (0, 0.0), (1, 0.5)]
    assert learn.train_iter == 2
    assert learn.pct_train == pytest.approx(1)
    train, valid = (True, True), (False, False)
    assert modes == [train, train, valid] * 2 + [valid] + [train, train, valid]
    assert not learn.training
    assert not learn.model.training


# --- GradientAccumulation


def test_accumulated_gradients_are_those_of_the_large_batch_also_of_the_fewer_at_the_end() -> None:
    xs, ys = torch.randn(5, 4, 1), torch.randn(5, 4, 1)
    wholes = [
        (xs[part].flatten(0, 1), ys[part].flatten(0, 1))
        for part in (slice(0, 2), slice(2, 4), slice(4, 5))
    ]
    parts = [*zip(xs, ys, strict=True)]
    torch.manual_seed(0)
    a = quiet(data=(wholes, None), model=mlp(1, 4, 1))
    torch.manual_seed(0)
    b = quiet(data=(parts, None), model=mlp(1, 4, 1), cbs=GradientAccumulation(2))

    a.fit(2, lr=0.1)
    b.fit(2, lr=0.1)

    assert a.n_steps == b.n_steps == 6
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_no_step_event_fires_between_and_what_is_left_is_stepped_with() -> None:
    log = EventLog("before_step", "after_step")
    stepped: list[bool] = []
    look = Callback(after_batch=lambda cb: stepped.append(cb.stepped))
    look.run_valid = False
    learn = quiet(n_trn=5, cbs=[log, look, GradientAccumulation(2)])

    learn.fit(1)

    assert log.seen == ["before_step", "after_step"] * 3
    assert stepped == [False, True, False, True, True]


# --- GradientClip


def steps_of(batches: Any, *cbs: Callback, n_acc: int = 4, epochs: int = 1) -> list[Any]:
    """Each step's batch and gradient; that of a batch of ones is -2."""
    seen: list[Any] = []
    note = Callback(
        before_step=lambda cb: seen.append((cb.learn.iter, cb.learn.model.weight.grad.item()))
    )
    net = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(net.weight)
    both = [GradientAccumulation(n_acc), *cbs, note]
    learn = plain((batches, None), net, loss_func=nn.MSELoss(), lr=0.0, cbs=both)
    learn.fit(epochs)
    return seen


ONE = torch.ones(2, 1), torch.ones(2, 1)


@pytest.mark.parametrize(
    ("bad", "steps"), [(1, [4, 8, 11]), (3, [4, 8, 11]), (9, [3, 7, 11]), (11, [3, 7])]
)
def test_a_cancelled_batch_has_no_part_in_the_mean_of_a_step(bad: int, steps: list[int]) -> None:
    def cancel(cb: Any) -> None:
        if cb.learn.iter == bad:
            raise CancelBatchException

    seen = steps_of([ONE] * 12, Callback(after_loss=cancel))

    assert [i for i, _ in seen] == steps
    assert [grad for _, grad in seen] == pytest.approx([-2.0] * len(steps))


@pytest.mark.parametrize(("n", "said", "steps"), [(10, 7, [2, 5, 6, 9]), (7, 9, [2, 5])])
def test_steps_are_means_whatever_length_a_loader_says(n: int, said: int, steps: list[int]) -> None:
    class Says(list[Any]):
        def __len__(self) -> int:
            return said

    seen = steps_of(Says([ONE] * n), n_acc=3)

    assert [i for i, _ in seen] == steps
    assert [grad for _, grad in seen] == pytest.approx([-2.0] * len(steps))


def test_every_batch_steps_again_once_accumulation_is_removed() -> None:
    def remove(cb: Any) -> None:
        if cb.learn.train_iter == 6:
            cb.learn.remove_cbs(GradientAccumulation)

    seen = steps_of([ONE] * 8, Callback(before_batch=remove), epochs=2)

    assert [i for i, _ in seen] == [3, 6, 7, *range(8)]


@pytest.mark.parametrize("amp", [False, True])
def test_only_what_the_optimizer_holds_is_clipped(amp: bool) -> None:
    def trained(frozen: bool) -> Any:
        torch.manual_seed(0)
        net = mlp(2, 4, 1)
        net[0].requires_grad_(not frozen)
        x = torch.randn(6, 4, 2)
        cbs = [GradientClip(0.5), *([MixedPrecision(init_scale=1024.0)] if amp else [])]
        data = ([(b, b.sum(1, keepdim=True)) for b in x], None)
        options = {"loss_func": nn.MSELoss(), "splitter": lambda m: m[2].parameters(), "cbs": cbs}
        plain(data, net, lr=0.1, **options).fit(2)
        return [p.detach() for p in net[2].parameters()]

    torch.testing.assert_close(trained(frozen=False), trained(frozen=True), rtol=1e-3, atol=1e-5)


# --- schedules


def test_one_cycle_warms_up_and_anneals_as_torchs_does() -> None:
    learn = quiet(n_trn=10)

    learn.fit_one_cycle(2, 0.1)

    lrs = learn.recorder.lrs
    opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1, momentum=0.9)
    truth = torch.optim.lr_scheduler.OneCycleLR(
        opt, 0.1, total_steps=20, pct_start=0.25, div_factor=25, final_div_factor=1e5 / 25
    )
    expected = []
    for _ in range(20):
        expected.append(opt.param_groups[0]["lr"])
        opt.step()
        truth.step()
    assert lrs == pytest.approx(expected)
    assert (lrs[0], max(lrs), lrs[-1]) == pytest.approx((0.004, 0.1, 1e-6))


@pytest.mark.parametrize(
    ("opt_func", "key", "before", "cycled"),
    [
        (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), "momentum", 0.9, True),
        (torch.optim.SGD, "momentum", 0, False),
        (torch.optim.AdamW, "betas", (0.9, 0.999), True),
        (torch.optim.Adagrad, "lr_decay", 0, False),
    ],
)
def test_momentum_is_cycled_where_there_is_one_and_restored(
    opt_func: Any, key: str, before: Any, cycled: bool
) -> None:
    seen: set[Any] = set()
    look = Callback(after_step=lambda cb: seen.add(cb.opt.param_groups[0][key]))
    learn = quiet(n_trn=8, opt_func=opt_func, cbs=look)

    learn.fit_one_cycle(1, 0.01)

    assert (len(seen) > 2) == cycled
    assert learn.opt.param_groups[0][key] == before


def test_one_cycle_with_a_rate_for_each_group_and_with_accumulation() -> None:
    learn = quiet(n_trn=6, model=mlp(1, 2, 1), splitter=lambda m: [m[0], m[2]])
    tops: list[list[float]] = []
    look = Callback(after_step=lambda cb: tops.append([g["lr"] for g in cb.opt.param_groups]))

    learn.fit_one_cycle(2, slice(1e-3, 1e-1), cbs=[look, GradientAccumulation(2)])

    assert len(tops) == learn.n_steps == 6
    assert [max(r) for r in zip(*tops, strict=True)] == pytest.approx([1e-3, 1e-1], rel=0.1)
    assert tops[-1][1] < 1e-5


def test_one_cycle_anneals_under_accelerates_accumulation_too() -> None:
    pytest.importorskip("accelerate")
    rates = []
    for by_accelerate in (False, True):
        learn = quiet(n_trn=10)
        if by_accelerate:
            with learn.distrib_ctx(cpu=True, gradient_accumulation_steps=4):
                learn.fit_one_cycle(2, 1e-2)
        else:
            learn.fit_one_cycle(2, 1e-2, cbs=GradientAccumulation(4))
        rates.append(learn.recorder.lrs)
        assert learn.n_steps == 6

    assert rates[0] == rates[1]
    assert rates[0][-1] == pytest.approx(1e-7)


def test_the_next_schedule_begins_with_its_own_rate() -> None:
    step = SchedulerCallback(lambda opt, n: torch.optim.lr_scheduler.StepLR(opt, 1, 0.1))
    learn = quiet(n_trn=2, cbs=step)

    learn.fit(1, lr=0.1)
    learn.fit(1, lr=0.5)

    assert learn.recorder.lrs == pytest.approx([0.1, 0.01, 0.5, 0.05])


def test_a_scheduler_by_epoch_also_where_a_run_was_interrupted() -> None:
    half = SchedulerCallback(
        lambda opt, n: torch.optim.lr_scheduler.ExponentialLR(opt, 0.5), by_epoch=True
    )
    learn = quiet(n_trn=2, cbs=half)

    learn.fit(3, lr=0.08)
    learn.fit(4, lr=0.08, start_epoch=2)

    rates = [0.08, 0.08, 0.04, 0.04, 0.02, 0.02]
    assert learn.recorder.lrs == pytest.approx([*rates, 0.02, 0.02, 0.01, 0.01])


@pytest.mark.parametrize("n_acc", [1, 2])
def test_one_cycle_goes_on_where_a_run_was_interrupted(n_acc: int) -> None:
    whole = quiet(n_trn=5, cbs=GradientAccumulation(n_acc))
    rest = quiet(n_trn=5, cbs=GradientAccumulation(n_acc))

    whole.fit_one_cycle(4, 0.1)
    rest.fit_one_cycle(4, 0.1, start_epoch=3)

    assert rest.recorder.lrs == pytest.approx(whole.recorder.lrs[-5:])
    assert rest.pct_train == pytest.approx(1)


def plateau(opt: Any, n: int) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.9)


@pytest.mark.parametrize("n_val", [0, 2])
def test_a_plateau_is_of_the_epochs_loss(n_val: int) -> None:
    learn = quiet(n_trn=1, lr=1e-6, cbs=SchedulerCallback(plateau, by_epoch=True))
    learn.dls.loaders[1] = learn.dls.valid if n_val else None

    learn.fit(3)

    assert learn.recorder.lrs == [1e-6, 1e-6, 5e-7]
    assert learn.scheduler.scheduler.best == learn.recorder.values[0][-1]


def test_a_plateau_waits_for_an_epoch_that_is_validated() -> None:
    def skip(cb: Any) -> None:
        if cb.learn.epoch in (1, 2):
            raise CancelValidException

    cbs = [SchedulerCallback(plateau, by_epoch=True), Callback(before_validate=skip)]
    learn = quiet(n_trn=1, lr=1e-6, cbs=cbs)

    learn.fit(5)

    assert learn.recorder.lrs == [1e-6, 1e-6, 1e-6, 1e-6, 5e-7]


# --- ProgressCallback


def test_rows_are_printed_as_without_the_bar_which_shows_in_a_terminal_and_is_closed(
    capsys: Any, monkeypatch: Any
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True, raising=False)
    for cbs in ([], [ProgressCallback]):
        torch.manual_seed(0)
        learn = synth_learner(n_trn=2, cbs=cbs)
        learn.fit(2)

    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert [line.split()[0] for line in lines] == ["epoch", "0", "1"] * 2
    assert lines[:3] == lines[3:]
    assert "epoch 1/2 train" in shown.err
    assert "0/2" in shown.err
    assert learn.progress._bar is None


def test_the_progress_reads_no_loss_by_the_batch(monkeypatch: Any) -> None:
    pytest.importorskip("tqdm")
    learn = quiet(n_trn=50, cbs=ProgressCallback)
    reads: list[int] = []
    read = property(lambda self: reads.append(1) or 0.0)
    monkeypatch.setattr(type(learn.recorder), "smooth_loss", read)

    learn.fit(1)

    assert len(reads) < 10


def test_an_error_closes_the_bar_and_puts_the_logger_back(monkeypatch: Any) -> None:
    pytest.importorskip("tqdm")
    learn = synth_learner(cbs=ProgressCallback)

    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=Callback(after_batch=lambda cb: 1 / 0))
    assert (learn.logger, learn.progress._bar) == (print, None)

    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(MissingExtraError, match=r'pip install "hookkit\[progress\]"'):
        ProgressCallback()
