import inspect

import pytest

from hookkit import errors
from hookkit.errors import HookkitError, HookkitWarning, missing_extra, nearest


@pytest.mark.parametrize(
    "kind",
    [k for k in vars(errors).values() if inspect.isclass(k) and k.__module__ == errors.__name__],
)
def test_every_kind_has_its_base_and_is_in_the_drawing(kind: type) -> None:
    assert issubclass(kind, (HookkitError, HookkitWarning))
    assert kind.__name__ in (errors.__doc__ or "")


def test_errors_derive_from_pythons_own() -> None:
    assert issubclass(errors.SelectionError, KeyError)
    assert issubclass(errors.OptionError, ValueError)
    assert issubclass(errors.ArgumentError, TypeError)
    assert issubclass(errors.HookError, RuntimeError)
    assert issubclass(errors.MissingExtraError, ImportError)


def test_a_selection_error_shows_its_message_as_it_is() -> None:
    assert str(errors.SelectionError('no "a"')) == 'no "a"'


def test_nearest_gives_the_likely_names_first() -> None:
    assert nearest("encoder.layer.0", ["encoder.layers.0", "mask", "head"]) == ["encoder.layers.0"]
    assert nearest("zzz", ["encoder", "head"]) == []


def test_a_missing_extra_prints_its_pip_command() -> None:
    with pytest.raises(ImportError, match=r'pip install "hookkit\[plot\]"'):
        raise missing_extra("matplotlib", "plot", "draw")
