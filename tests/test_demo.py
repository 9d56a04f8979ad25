"""`python -m hookkit.demo`: real data, one command, clear about bad values."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from hookkit import demo

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, ("sklearn", "matplotlib", "tqdm"))), reason="needs hookkit[demo]"
)


@pytest.mark.slow
def test_the_demo_learns_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"

    code = demo.main(["--out", str(out), "--epochs", "2", "--device", "cpu"])

    text = capsys.readouterr().out
    assert code == 0
    assert "Total params: " in text
    assert "Diagnosis: " in text
    assert (out / "run.png").stat().st_size > 5_000
    assert text.splitlines()[0].split() == ["epoch", "train_loss", "valid_loss", "accuracy", "time"]
    assert "\nconv1 Conv2d " in text
    assert "head" in text
    assert "<html" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--epochs", "0"], "--epochs 0: give 1 or more"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--colour", "red"], "unrecognized arguments: --colour red"),
    ],
)
def test_a_bad_value_gets_its_reason_and_exit_code_two(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main([*args, "--out", str(tmp_path / "out")])

    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
