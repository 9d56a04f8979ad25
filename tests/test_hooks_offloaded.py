"""`cpu=True` on CUDA: copied into pinned memory, without waiting before somebody reads.

On a device where there is one. Else on a stand-in: tensors that say they are on one, whose copies
are made when their event is waited for and not before.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hookkit.hooks import Hook, hook_input, hook_output, hook_outputs


class Lying(Tensor):
    """A tensor of the CPU that says it is on a device; copies from it are put in that one's queue.

    `number` of the device, layout `said`, `queues` of copies to be made, `pinned` memory asked for.
    """

    number = 0
    said = torch.strided
    queues: dict[int, list[Callable[[], Any]]]
    pinned: list[bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        source = next(t for t in (*args, *kwargs.values()) if isinstance(t, Lying))
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return torch.device("cuda", source.number)
        if func == Tensor.layout.__get__:  # type: ignore[attr-defined]
            return source.said
        with torch._C.DisableTorchFunctionSubclass():
            bare = [a.as_subclass(Tensor) if isinstance(a, Lying) else a for a in args]
            if func is Tensor.copy_:
                assert kwargs.pop("non_blocking")
                seen = bare[1].clone()  # the queue's order: what is written later is not copied
                source.queues[source.number].append(lambda: bare[0].data.copy_(seen))
                return bare[0]
            if func is torch.empty_like:
                source.pinned.append(kwargs.pop("pin_memory"))
                return torch.empty_like(*bare, **kwargs).fill_(float("nan"))
            if func is Tensor.cpu:
                return bare[0].clone()
        out = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, Lying):
            out.__dict__.update(source.__dict__)
        return out


class LyingEvent:
    """Waiting for it makes the copies that were queued when it was recorded."""

    waits = 0

    def record(self, stream: Any) -> None:
        self.queue, self.n = stream, len(stream)

    def synchronize(self) -> None:
        LyingEvent.waits += 1
        for copy in self.queue[: self.n]:
            copy()


Device = Callable[..., Tensor]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Puts a tensor on device `number` of the stand-in."""
    queues: dict[int, list[Any]] = {0: [], 1: []}
    pinned: list[bool] = []

    def put(t: Tensor, number: int = 0) -> Tensor:
        lying = t.as_subclass(Lying)
        lying.number, lying.queues, lying.pinned = number, queues, pinned
        return lying

    monkeypatch.setattr(torch, "Event", lambda device: LyingEvent())
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: queues[device.index])
    monkeypatch.setattr(LyingEvent, "waits", 0)
    yield put
    assert all(pinned)


class Split(nn.Module):
    """Gives a structure whose parts are on two devices, as a net does that is spread over them."""

    def __init__(self, second: Device) -> None:
        super().__init__()
        self.second = second

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"here": x * 2, "there": (self.second(x.as_subclass(Tensor) * 3), None)}


def n_queued(x: Any) -> list[int]:
    return [len(queue) for queue in x.queues.values()]


def test_a_copy_is_queued_and_waited_for_at_the_first_read(device: Device) -> None:
    m, values = nn.ReLU(), torch.tensor([-1.0, 2.0, 3.0])
    x = device(values)

    with hook_output(m, cpu=True) as h:
        m(x)
        assert (n_queued(x), LyingEvent.waits) == ([1, 0], 0)

    assert torch.isnan(h._capture.last.value).all()  # nothing has arrived by the block's end
    assert LyingEvent.waits == 0
    assert type(h.stored) is Tensor
    assert h.stored.tolist() == [0.0, 2.0, 3.0]
    assert LyingEvent.waits == 1


def test_what_is_written_after_the_hook_is_not_copied(device: Device) -> None:
    m, x = nn.Identity(), device(torch.tensor([1.0, 2.0]))

    with hook_outputs([m], cpu=True, clone=False) as h:
        m(x).mul_(10)

    assert h[0].stored.tolist() == [1.0, 2.0]


def test_the_parts_of_a_structure_are_waited_for_on_each_device(device: Device) -> None:
    m = Split(lambda t: device(t, 1))
    x = device(torch.tensor([1.0, 2.0]))

    with hook_output(m, cpu=True) as h:
        m(x)

    assert n_queued(x) == [1, 1]
    assert h.stored["here"].tolist() == [2.0, 4.0]
    assert h.stored["there"][0].tolist() == [3.0, 6.0]


def test_every_call_inputs_and_what_functions_give_are_queued_too(device: Device) -> None:
    m, x = nn.ReLU(), device(torch.tensor([-1.0, 2.0]))

    with (
        hook_output(m, cpu=True, keep="all", dtype=torch.float64) as every,
        hook_input(m, cpu=True) as inputs,
        Hook(m, lambda m, i, o: o + 1, cpu=True) as plus,
    ):
        m(x)
        m(-x)

    assert (n_queued(x), LyingEvent.waits) == ([6, 0], 0)
    assert [c.tolist() for c in every.calls] == [[0.0, 2.0], [1.0, 0.0]]
    assert every.calls[0].dtype == torch.float64
    assert inputs.stored[0].tolist() == [1.0, -2.0]
    assert plus.stored.tolist() == [2.0, 1.0]


def test_what_no_pinned_memory_holds_is_copied_at_once(device: Device) -> None:
    m, x = nn.Identity(), device(torch.eye(3))
    x.said = torch.sparse_coo

    with hook_output(m, cpu=True) as h:
        m(x)

    assert n_queued(x) == [0, 0]
    assert torch.equal(h.stored, torch.eye(3))


def test_on_a_device_the_forward_does_not_wait_and_the_read_does(cuda: torch.device) -> None:
    m, x = nn.Linear(256, 256).to(cuda), torch.randn(512, 256, device=cuda)
    with hook_output(m, cpu=True), torch.no_grad():
        wanted = m(x).cpu()  # and pinned memory of this size is there from now on
    torch.cuda.synchronize()

    with hook_output(m, cpu=True) as h, torch.no_grad():
        torch.cuda._sleep(1_000_000_000)
        torch.cuda.set_sync_debug_mode("error")
        m(x).zero_()
    (event,) = h._capture.last.events
    late = event.query()
    torch.cuda.set_sync_debug_mode("default")

    assert not late
    assert h.stored.is_pinned()
    assert event.query()
    torch.testing.assert_close(h.stored, wanted)


def test_on_a_device_gradients_and_every_call_arrive(gpu: torch.device) -> None:
    m, x = nn.Linear(4, 3).to(gpu), torch.randn(5, 4, device=gpu)

    with (
        hook_output(m, cpu=True, grad=True) as g,
        hook_output(m, cpu=True, keep="all") as every,
        hook_output(m, cpu=True, detach=False) as live,
    ):
        first = m(x)
        (m(-x) * torch.arange(3.0, device=gpu)).sum().backward()

    torch.testing.assert_close(every.calls[0], first.detach().cpu())
    torch.testing.assert_close(every.calls[1], m(-x).detach().cpu())
    torch.testing.assert_close(g.stored[0], torch.arange(3.0).expand(5, 3))
    assert live.stored.requires_grad
    assert live.stored.is_cpu


def test_on_a_device_copies_made_in_another_stream_are_waited_for(cuda: torch.device) -> None:
    m, x = nn.Identity(), torch.full((1 << 20,), 3.0, device=cuda)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    with hook_output(m, cpu=True) as h, torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        m(x * 2)

    assert torch.all(h.stored == 6)


def test_on_a_device_sparse_outputs_are_copied_too(gpu: torch.device) -> None:
    m, x = nn.Identity(), torch.eye(3, device=gpu).to_sparse()

    with hook_output(m, cpu=True) as h:
        m(x)

    assert torch.equal(h.stored.to_dense(), torch.eye(3))
