"""What a loop shows beyond its statistics: batches, the loss's graph, gradients that are kept."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit import watch
from hookkit.recorders.probes import MANY, TrainingProbes, loss_name


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def info_of(loop, model=None, opt=None, **options):
    """The facts of a run of `loop(model, opt, w)`."""
    model = model or net()
    opt = opt or torch.optim.SGD(model.parameters(), 0.01)
    with watch(model, opt, **options) as w:
        loop(model, opt, w)
    params = list(model.parameters())
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in params)
    return w.run_record().info


# --- batches

ROWS = torch.randn(128, 4)
PARTS = ROWS.split(32)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (lambda i: [PARTS[i % 4]], 4),
        (lambda i: PARTS, 1),  # several in each step
        (lambda i: [PARTS[i % 2][torch.randperm(32)]], 20),  # rows change their places
        (lambda i: [PARTS[i % 2] + 1e-3 * torch.randn(32, 4)], 20),  # augmented
    ],
)
def test_batches_that_come_again_are_counted_once(data, expected):
    def loop(model, opt, w):
        for i in range(20):
            for x in data(i):
                model(x).mean().backward()
            opt.step()
            opt.zero_grad()

    assert info_of(loop)["batches"] == [20, expected]


@pytest.mark.parametrize(
    "given",
    [
        torch.rand(3) > 0.5,
        {"x": [torch.randn(2, 2), "text"], "mask": None},
        torch.randn(2, dtype=torch.complex64),
        torch.randn(300, 70).to(torch.bfloat16),
    ],
)
def test_any_structure_of_tensors_is_seen(given):
    probes = TrainingProbes()
    for _ in range(3):
        probes.see_batch(given)
        probes.end_step()

    assert probes.read(3) == {"batches": [3, 1]}


def test_after_the_first_steps_nothing_is_probed(monkeypatch):
    def loop(model, opt, w):
        for i in range(MANY + 3):
            if i == MANY:
                for name in ("see_batch", "see_scores", "see_loss", "see_step", "end_step"):
                    monkeypatch.delattr(TrainingProbes, name)
            loss = model(torch.randn(4, 4)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)

    assert info_of(loop)["batches"] == [MANY, MANY]


# --- the loss


def trained(report, **options):
    """The facts of a softmax before cross entropy, of which `report` tells `w`."""

    def loop(model, opt, w):
        for _ in range(3):
            loss = F.cross_entropy(model(torch.randn(6, 4)).softmax(1), torch.arange(6) % 3)
            opt.zero_grad()
            (loss / 2).backward()
            opt.step()
            report(w, loss)

    model = nn.Sequential(nn.Linear(4, 3))
    return info_of(loop, model, **options)


def test_the_graph_of_the_loss_is_seen_however_it_is_reported():
    for report in (lambda w, loss: w.loss(loss.item()), lambda w, loss: None):
        info = trained(report)
        assert info["loss_input"] == "Softmax"
        assert info["loss_graph"]


def test_the_name_that_the_user_gives_holds():
    assert trained(lambda w, loss: w.loss(loss), loss_func=F.nll_loss)["loss_func"] == "nll_loss"
    assert trained(lambda w, loss: w.loss(loss))["loss_func"] == "cross_entropy"
    assert loss_name(nn.MSELoss()) == "MSELoss"
    assert loss_name(None) is None


def known(loss_func, scores, fed=True):
    probes = TrainingProbes()
    probes.see_scores(loss_func, scores, fed)
    return probes.read(0).get("n_classes")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_the_number_of_classes_is_that_of_the_scores():
    ragged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)

    assert known(F.cross_entropy, torch.randn(4, 5)) == 5
    assert known(nn.CrossEntropyLoss(), torch.randn(4, 5, 7)) == 5
    assert known(F.cross_entropy, torch.randn(2, 7, 5), fed=False) is None  # or 7 steps
    assert known(nn.CrossEntropyLoss(reduction="sum"), torch.randn(4, 5)) is None
    assert known(F.binary_cross_entropy_with_logits, torch.randn(4, 5)) is None
    assert known(F.cross_entropy, ragged) is None
    assert known(None, torch.randn(4, 5)) is None


# --- steps


@pytest.mark.filterwarnings("ignore::hookkit.errors.NeverFiredWarning")
@pytest.mark.parametrize("by_hand", [False, True])
def test_batches_without_a_step_are_seen_if_weights_stay(by_hand):
    def loop(model, opt, w):
        for _ in range(5):
            loss = model(torch.randn(4, 4)).square().mean()
            opt.zero_grad()
            loss.backward()
            w.loss(loss)
            for p in model.parameters() if by_hand else ():
                p.data -= 0.1 * p.grad

    assert info_of(loop).get("no_step", False) is not by_hand


def test_a_first_step_that_is_still_accumulated_is_not_missed():
    found = []

    def loop(model, opt, w):
        for i in range(8):
            loss = model(torch.randn(4, 4)).mean()
            loss.backward()
            w.loss(loss)
            found.append(w.run_record().info.get("no_step"))
            if i == 7:
                opt.step()

    assert "no_step" not in info_of(loop)
    assert found == [None] * 8


@pytest.mark.filterwarnings("ignore::hookkit.errors.NeverFiredWarning")
@pytest.mark.parametrize(
    ("first_in_eval", "n", "expected"),
    [(2, 6, [4, 6]), (6, 6, None), (MANY + 2, MANY + 4, [2, MANY + 4])],
)
def test_steps_in_eval_mode_are_counted_and_validation_between_steps_is_not(
    first_in_eval, n, expected
):
    def loop(model, opt, w):
        for i in range(n):
            model.eval()
            model(torch.randn(4, 4))
            model.train(i < first_in_eval)
            model(torch.randn(4, 4)).mean().backward()
            opt.step()
            opt.zero_grad()

    assert info_of(loop).get("eval_steps") == expected


# --- gradients that are kept


def by_factor(model, opt):
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= 0


ZEROED = {
    "not": lambda model, opt: None,
    "to None": lambda model, opt: opt.zero_grad(),
    "to 0": lambda model, opt: opt.zero_grad(set_to_none=False),
    "by a factor": by_factor,
}


@pytest.mark.parametrize("zero", ZEROED)
@pytest.mark.parametrize(("first", "n_batches"), [(False, 1), (True, 3)])
def test_gradients_that_are_not_zeroed_are_counted(zero, first, n_batches):
    def loop(model, opt, w):
        for _ in range(6):
            if first:
                ZEROED[zero](model, opt)
            for _ in range(n_batches):
                model(torch.randn(4, 4)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            if not first:
                ZEROED[zero](model, opt)

    assert info_of(loop)["kept_gradients"] == [5 * (zero == "not"), 5]


def test_players_whose_gradients_are_zeroed_just_before_their_own_backward():
    g, d = nn.Linear(2, 2), nn.Linear(2, 1)
    of_g, of_d = (torch.optim.SGD(player.parameters(), 0.1) for player in (g, d))

    with watch([g, d], [of_g, of_d]) as w:
        for _ in range(6):
            of_d.zero_grad()
            (d(torch.randn(4, 2)) - d(g(torch.randn(4, 2)).detach())).mean().backward()
            of_d.step()
            of_g.zero_grad()
            d(g(torch.randn(4, 2))).mean().backward()  # adds to the gradients of d, too
            of_g.step()

    assert w.run_record().info["kept_gradients"] == [0, 10]


@pytest.mark.parametrize("own", [False, True])
def test_gradients_that_something_else_has_made_are_not_known(own):
    def loop(model, opt, w):
        params = list(model.parameters())
        for _ in range(6):
            before = [0 if p.grad is None else p.grad.clone() for p in params]
            loss = model(torch.randn(4, 4)).square().mean()
            if own:
                grads = torch.autograd.grad(loss, params)
            else:
                loss.backward()
                grads = [p.grad - grad for p, grad in zip(params, before, strict=True)]
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            opt.step()

    assert "kept_gradients" not in info_of(loop)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_ctrl_c_as_a_gradient_is_followed_leaves_no_hook_on_a_parameter(monkeypatch, register):
    net = nn.Linear(2, 2)
    opt, real = torch.optim.SGD(net.parameters(), 0.1), getattr(torch.Tensor, register)

    def interrupted(self, hook):
        real(self, hook)
        raise KeyboardInterrupt

    def loop():
        with watch(net, opt):
            net(torch.ones(4, 2)).sum().backward()
            monkeypatch.setattr(torch.Tensor, register, interrupted)
            opt.step()

    with pytest.raises(KeyboardInterrupt):
        loop()

    tables = [(p._backward_hooks, p._post_accumulate_grad_hooks) for p in net.parameters()]
    assert not any(hooks for pair in tables for hooks in pair)
