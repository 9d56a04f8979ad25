"""Statistics are the same whatever the user's script has set for all of PyTorch and numpy."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hookkit.recorders import ActivationStats, FlightRecorder, GradientStats, ParamStats
from hookkit.training import watch


@contextmanager
def changed(setter: Callable[[Any], None], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


Setting = Callable[[], AbstractContextManager[Any]]
SETTINGS: dict[str, Setting] = {
    "default device": lambda: changed(torch.set_default_device, "meta", None),  # as if a GPU
    "device block": lambda: torch.device("meta"),
    "bfloat16": lambda: changed(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float64": lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: changed(torch.use_deterministic_algorithms, True, False),
    "numpy raises": lambda: np.errstate(all="raise"),
}


def recorded(dtype: torch.dtype, setting: Setting) -> Any:
    torch.manual_seed(0)
    conv, head = nn.Conv2d(1, 8, 3), nn.Linear(8 * 36, 5)
    model = nn.Sequential(conv, nn.ReLU(), nn.Flatten(), head).to(dtype)
    data = [torch.randn(16, 1, 8, 8).to(dtype) for _ in range(3)]
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    with setting():
        guests: list[Any] = [
            ActivationStats(with_hist=True, units=True, include_paramless=True),
            ActivationStats(with_hist=True, bins=(-1, 1, 4)),
            GradientStats(),
            ParamStats(),
        ]
        flight = FlightRecorder()
        with watch(model, opt, *guests, flight):
            for x in data:
                model(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
        values = [guest.record().values for guest in guests]
        guests[0].stats.tensor()
    assert not flight.incidents
    return values


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_change_no_record(name: str, dtype: torch.dtype) -> None:
    want = recorded(dtype, nullcontext)

    found: list[Any] = []
    there = threading.Thread(target=lambda: found.append(recorded(dtype, SETTINGS[name])))
    there.start()  # a thread's own work space is made under the setting, too
    there.join()

    (got,) = found
    for a, b in zip(got, want, strict=True):
        for key in b:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)
