"""Two gloo processes on the CPU; and one alone, where every function is the identity."""

import os
import re
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from processes import in_ranks
from torch import nn

from hookkit._core import distributed as ranks
from hookkit.errors import HookError
from hookkit.hooks import hook_output, hook_outputs
from hookkit.hooks.selection import select
from hookkit.recorders import ActivationStats
from hookkit.training import watch

Pair = namedtuple("Pair", ["a", "b"])


def test_alone_everything_is_the_identity() -> None:
    x = {"a": torch.ones(2, 3)}

    assert ranks.gather(x) is x
    assert ranks.gather_object(3) == [3]
    assert (ranks.rank(), ranks.world_size(), ranks.is_distributed()) == (0, 1, False)
    assert torch.equal(ranks.all_reduce_sum(x["a"]), x["a"])


def test_alone_a_gathering_hook_stores_what_any_hook_does() -> None:
    m = nn.Linear(2, 3)
    with hook_output(m, gather=True) as h, hook_output(m, grad=True, gather=True) as g:
        y = m(torch.ones(4, 2))
        y.sum().backward()

    assert torch.equal(h.stored, y)
    assert torch.equal(g.stored[0], torch.ones(4, 3))


def gathers_structures(r: int) -> None:
    own = Pair(torch.full((r + 1, 2), float(r)), [torch.tensor(r), None, "text"])
    both = ranks.gather(own)

    assert type(both) is Pair
    assert both.a.tolist() == [[0, 0], [1, 1], [1, 1]]
    assert both.b[0].tolist() == [0, 1]
    assert both.b[1:] == [None, "text"]
    kinds = (torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.int64)
    for dtype in (*kinds, torch.float64, torch.complex64):
        t = ranks.gather(torch.ones(2 - r, 1, 3).to(dtype))
        assert (t.dtype, tuple(t.shape)) == (dtype, (3, 1, 3))
        assert bool((t.to(torch.complex64) == 1).all())
    assert ranks.gather(torch.ones(0 if r else 2, 3)).shape == (2, 3)


def gathers_what_hooks_stored(r: int) -> None:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    whole = torch.randn(5, 2)
    part = whole[:3] if r == 0 else whole[3:]
    with hook_outputs(m, gather=True) as h, hook_outputs(m, grad=True, gather=True) as g:
        m(part).pow(2).sum().backward()

    stored = h.stored
    torch.testing.assert_close(stored[1], m(whole).detach())
    torch.testing.assert_close(g.stored[1][0], 2 * m(whole).detach())


def refuses_what_does_not_fit(r: int) -> None:
    with pytest.raises(
        HookError, match=r"different values \(rank 0: the value, 2×3; rank 1: the value, 2×4\)"
    ):
        ranks.gather(torch.ones(2, 3 + r))
    a, b = torch.ones(2, 3), torch.zeros(2, 3)
    with pytest.raises(
        HookError, match=r"rank 0: the value, {'a': 2×3, 'b': 2×3}; rank 1: the value, {'b'"
    ):
        ranks.gather({"b": b, "a": a} if r else {"a": a, "b": b})
    with pytest.raises(HookError, match="different values"):
        ranks.gather(torch.ones(2, dtype=torch.float64 if r else torch.float32))
    with pytest.raises(HookError, match="rank 0: the value, 2; rank 1: the value, scalar"):
        ranks.gather(torch.ones(()) if r else torch.ones(2))
    with pytest.raises(HookError, match="rank 0: the value, 2×3; rank 1: the value, None"):
        ranks.gather(None if r else torch.ones(2, 3))


def refuses_layers_in_another_order(r: int) -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3)
    order = ("1", "0") if r else ("0", "1")
    of = r"rank {}: what is stored of '{}' \(Linear\), 2×3"
    differs = f"{of.format(0, 0)}; {of.format(1, 1)}"

    with hook_outputs(select(net, *order), gather=True) as h:
        net(x)
    for _ in range(2):  # a refused value is not taken for the whole when it is read again
        with pytest.raises(HookError, match=differs):
            _ = h.stored
        with pytest.raises(HookError, match=differs):
            _ = h[0].stored

    whole = torch.cat(ranks.gather_object(net(x).detach()))
    torch.testing.assert_close(h["1"].stored, whole)


def refuses_calls_and_gradients_that_only_some_ranks_have(r: int) -> None:
    net, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3)

    with hook_output(net[0], keep="all", gather=True) as h:
        for _ in range(2 + r):
            net(x)
    with pytest.raises(HookError, match=r"rank 0: nothing; rank 1: .* in call 2"):
        _ = h.calls
    with hook_output(net[0], grad=True, gather=True) as g:
        y = net(x)
        if r:
            y.sum().backward()
    with pytest.raises(HookError, match=r"rank 0: .*None; rank 1: .*2×3"):
        _ = g.stored
    with hook_output(net[0], grad=True, gather=True) as g:
        net(x).sum().backward()
    torch.testing.assert_close(g.stored[0], torch.ones(4, 3))
    with hook_output(net[0], keep="all", gather=True) as h:
        net(x)
    assert [tuple(call.shape) for call in h.calls] == [(4, 3)]
    assert ranks.gather(None) is None


def reduces(r: int) -> None:
    t = torch.tensor([1.0, 2.0], dtype=torch.float64) * (r + 1)

    assert ranks.all_reduce_sum(t).tolist() == [3, 6]
    assert t.tolist() == [r + 1, 2 * (r + 1)]
    assert ranks.all_reduce_max(t - 3).tolist() == [-1, 1]
    assert ranks.gather_object({"rank": r}) == [{"rank": 0}, {"rank": 1}]
    assert ranks.world_size() == 2


CHECKS = (
    gathers_structures,
    gathers_what_hooks_stored,
    refuses_what_does_not_fit,
    refuses_layers_in_another_order,
    refuses_calls_and_gradients_that_only_some_ranks_have,
    reduces,
)


def work(rank: int, folder: Path) -> None:
    for check in CHECKS:
        check(rank)


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_with_unequal_batches_get_the_whole(tmp_path: Path) -> None:
    in_ranks(work, tmp_path)


def reads_alone(rank: int, folder: Path) -> None:
    """Rank 1 reads once rank 0 has said that it waits."""
    with hook_output(layer := nn.Identity(), gather=True) as h:
        layer(torch.ones(2, 3))
    said = folder / "said"
    if rank == 0:
        sys.stderr = said.open("w")
    while rank and not (said.exists() and said.read_text()):
        time.sleep(0.01)
    assert h.stored.shape == (4, 3)


@pytest.mark.slow
@pytest.mark.ranks
def test_who_reads_a_gathered_value_alone_hears_that_every_rank_has_to(tmp_path: Path) -> None:
    in_ranks(reads_alone, tmp_path)

    assert (tmp_path / "said").read_text() == (
        "hookkit: rank 0 of 2 waits: every rank has to read what is stored of "
        "Identity(), gathered.\n"
    )


def loses_the_other(rank: int, folder: Path) -> None:
    if rank == 1:
        (folder / "left1").touch()
        os._exit(0)
    with pytest.raises(RuntimeError, match="one's own") as own, ranks.collective("come"):
        raise RuntimeError("one's own")
    assert not isinstance(own.value, HookError)
    stats = ActivationStats()
    net = nn.Sequential(nn.Linear(3, 2))
    opt = torch.optim.SGD(net.parameters(), 0.1)
    with watch(net, opt, stats) as w:
        for _ in range(3):
            net(torch.ones(2, 3)).sum().backward()
            opt.step()
    try:
        w.gather()
    except HookError as e:
        (folder / "error").write_text(str(e))
    assert "rank 0 of 2 alone" in str(w.diagnose()).splitlines()[0]


@pytest.mark.slow
@pytest.mark.ranks
def test_a_rank_that_ends_ends_those_that_wait_for_it_with_where_they_were(tmp_path: Path) -> None:
    in_ranks(loses_the_other, tmp_path)

    assert re.match(
        r"rank 0 of 2 waited for the other ranks: every rank has to gather what "
        r"ActivationStats\(1 layers × 3\) recorded in 3 steps\. One of "
        r"them has ended or did not come in time\. Look for the first error of the other ranks\.",
        (tmp_path / "error").read_text(),
    )
