"""`python -m hookkit.testing.demo`: real data, one command, clear about bad values."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from hookkit.testing import demo

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


def test_no_epoch_is_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        demo.main(["--epochs", "0", "--out", str(tmp_path / "out")])

    assert "--epochs 0: give 1 or more" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
