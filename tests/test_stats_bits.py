"""Whether a parameter has moved is an exact question, whatever sums up its norm."""

import pickle
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hookkit.health import diagnose
from hookkit.moments.numba_loader import machine
from hookkit.stats import ActivationStats, ParamStats
from hookkit.stats.parameters import checksum
from hookkit.watching import watch

KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)


# checksums


@pytest.mark.parametrize("dtype", [*KINDS, torch.int32, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("n", [0, 1, 7, (1 << 18) + 3])
def test_equal_values_have_equal_checksums(dtype, n):
    x = (torch.arange(n) % 13 - 6).to(dtype)

    assert checksum(x) == checksum(x.clone())
    assert checksum(x[:, None].expand(n, 3).t()) == checksum(x[:, None].expand(n, 3).t().clone())


@pytest.mark.parametrize("dtype", KINDS)
@pytest.mark.parametrize("i", [0, 5, 1 << 18])
def test_one_bit_changes_it(dtype, i):
    torch.manual_seed(0)
    x = torch.randn((1 << 18) + 3).to(dtype)
    bits = (torch.view_as_real(x) if dtype.is_complex else x).view(-1)
    bits = bits.view({8: torch.int64, 4: torch.int32, 2: torch.int16}[bits.element_size()])
    before = checksum(x)

    bits[i] ^= 1

    assert checksum(x) != before


def test_changes_do_not_make_up_for_each_other():
    x = torch.linspace(1, 2, 64)
    bits = x.clone().view(torch.int32)
    bits[3] += 1
    bits[9] -= 1

    assert checksum(bits.view(torch.float32)) != checksum(x)
    assert checksum(x.flip(0)) != checksum(x)


def test_minus_zero_is_zero():
    assert checksum(torch.tensor([0.0, 1.0])) == checksum(torch.tensor([-0.0, 1.0]))


# findings


def parts(case):
    """A net, the optimizer, and how it is called."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 257), nn.ReLU(), nn.Linear(257, 10))
    trained = net[0].parameters() if case == "not_in_optimizer" else net.parameters()
    opt = torch.optim.SGD(trained, 0.05)
    if case == "unmoved":
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.0}]
        opt = torch.optim.SGD(groups, 0.05)
    if case == "no_gradient":
        extra = net.add_module("extra", nn.Linear(257, 10)) or net.extra
        opt.add_param_group({"params": extra.parameters()})
        return net, opt, lambda x: net[2](net[1](net[0](x)))
    return net, opt, net


def run(case, meanwhile=None, every=None):
    net, opt, call = parts(case)
    x, y = torch.randn(64, 32), torch.randint(0, 10, (64,))
    with watch(net, opt, ActivationStats(include_paramless=True), ParamStats(every)) as w:
        for i in range(60):
            if i == 30 and meanwhile:
                meanwhile()
            loss = F.cross_entropy(call(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            w.loss(loss)
    return w


def found(w):
    return sorted((f.rule, f.layers) for f in diagnose(w.run_record()))


CASES = ("not_in_optimizer", "no_gradient", "unmoved")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("reader")
def test_findings_are_the_same_by_numpy_and_by_compiled_loops(case):
    assert case in dict(found(run(case)))


@pytest.mark.parametrize("case", CASES)
def test_they_are_the_same_where_the_reader_changes_meanwhile(case, monkeypatch):
    pytest.importorskip("numba")
    loops = import_module("hookkit.moments.numba_kernels")

    changed = run(case, lambda: monkeypatch.setattr(machine, "found", loops))

    monkeypatch.setattr(machine, "found", None)
    assert found(changed) == found(run(case))


def test_they_are_the_same_on_other_numbers_of_threads():
    n = torch.get_num_threads()

    def set_threads():
        torch.set_num_threads(3 - n if n < 3 else 1)

    try:
        changed = run("not_in_optimizer", set_threads)
    finally:
        torch.set_num_threads(n)

    assert found(changed) == found(run("not_in_optimizer"))


# what has moved


def test_what_moves_between_the_records_has_moved_though_its_norm_is_the_same():
    net, opt, _ = parts("not_in_optimizer")

    with watch(net, opt, stats := ParamStats(every=4)):
        for i in range(8):
            net(torch.ones(2, 32)).sum().backward()
            opt.step()
            if i == 5:
                net[2].weight.data.copy_(net[2].weight.data.flip(0))

    moved = dict(zip(stats.record().names, stats.record().meta["moved"], strict=True))
    assert moved == {"0.weight": True, "0.bias": True, "2.weight": True, "2.bias": False}


def test_what_has_moved_is_known_during_the_run_and_after_a_pickle():
    net, opt, _ = parts("not_in_optimizer")
    want = [True, True, False, False]

    with watch(net, opt, stats := ParamStats()):
        net(torch.ones(2, 32)).sum().backward()
        opt.step()
        assert stats.record().meta["moved"] == want
        net(torch.ones(2, 32)).sum().backward()
        opt.step()

    assert pickle.loads(pickle.dumps(stats)).record().meta["moved"] == want
    assert stats.record().meta["moved"] == want


def test_what_is_loaded_between_two_fits_has_not_moved():
    net, opt, _ = parts("not_in_optimizer")
    stats = ParamStats()

    for _ in range(2):
        with watch(net, opt, stats):
            net(torch.ones(2, 32)).sum().backward()
            opt.step()
        nn.init.normal_(net[2].weight)

    assert stats.record().meta["moved"] == [True, True, False, False]
