"""hook_all, print_sizes and hook_tensor: blocks inside their own blocks, removals in any order."""

from typing import Any

import pytest
import torch
from hooked import n_hooks
from torch import Tensor, nn

import hookkit.hooks.eager as eager
from hookkit.hooks import hook_all, hook_tensor, print_sizes


@pytest.fixture
def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU())


@pytest.fixture
def x() -> Tensor:
    return torch.ones(4, 5)


def nothing(*seen: Any) -> None:
    pass


def is_clean() -> bool:
    """No global hook, the fused path allowed, no block of hookkit that holds the compiler back."""
    hooks = nn.modules.module._has_any_global_hook()
    return not hooks and torch.backends.mha.get_fastpath_enabled() and not eager.EAGER.owners


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_a_compiled_model_runs_eagerly_under_a_global_hook(net: nn.Sequential, x: Tensor) -> None:
    compiled = torch.compile(net, backend="eager")
    compiled(x)

    seen: list[Any] = []
    with hook_all(lambda m, i, o: seen.append(m), nn.Linear):
        compiled(x)

    assert seen == [net[0]]
    assert is_clean()


@pytest.mark.parametrize("first", [0, 1])
def test_global_hooks_leave_the_fused_path_as_it_was_in_any_order(first: int) -> None:
    hooks = [hook_all(nothing), hook_all(nothing)]
    assert not torch.backends.mha.get_fastpath_enabled()

    hooks[first].remove()
    hooks[first].remove()
    assert not torch.backends.mha.get_fastpath_enabled()
    hooks[1 - first].remove()

    assert is_clean()


def test_a_fused_path_that_was_off_stays_off() -> None:
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        hook_all(nothing).remove()
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_global_hooks_are_gone_after_an_exception(
    error: type[BaseException], net: nn.Sequential, x: Tensor
) -> None:
    def broken(*seen: Any) -> None:
        raise error

    with pytest.raises(error), hook_all(broken), hook_all(nothing), print_sizes(net):
        net(x)

    assert is_clean()
    assert n_hooks(net) == 0


def test_hook_tensor_refuses_what_has_no_gradient() -> None:
    with pytest.raises(RuntimeError, match="doesn't require gradient"):
        hook_tensor(torch.ones(2, 2))


def test_what_is_no_class_is_refused_at_once_and_leaves_no_hook() -> None:
    with pytest.raises(TypeError, match="arg 2 must be"):
        hook_all(nothing, "Linear")  # type: ignore[arg-type]

    assert is_clean()


def test_hook_all_sees_every_module_of_some_types_until_it_is_removed(
    net: nn.Sequential, x: Tensor
) -> None:
    seen: list[Any] = []
    with hook_all(lambda m, i, o: seen.append((type(m).__name__, o.requires_grad))):
        net(x)
        nn.MSELoss()(x, x)
    net(x)

    assert not nn.modules.module._has_any_global_hook()
    names = ["Linear", "ReLU", "Sequential", "MSELoss"]
    assert seen == [(n, False) for n in names]

    with hook_all(lambda m, i, o: seen.append(tuple(i[0].shape)), (nn.ReLU,)):
        net(x)
    assert seen[4:] == [(4, 10)]
