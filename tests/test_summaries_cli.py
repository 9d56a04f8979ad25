"""`python -m hookkit`: a summary from a shell, with exit codes a script can use."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hookkit.summaries.cli import main

NETS = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))

ready = nn.Linear(4, 2)
words = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))
number = 3

def broken():
    raise OSError("no weights on this disk")

def needs(width):
    return nn.Linear(width, width)

def wordy():
    raise RuntimeError("Error(s) in loading:\\n\\tmissing key\\x1b[31m")

def silent():
    raise MemoryError

def leaves():
    raise SystemExit(3)

def stops():
    raise KeyboardInterrupt
"""


@pytest.fixture(autouse=True)
def nets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_nets.py").write_text(NETS)
    (tmp_path / "torn.py").write_text("def net(:\n")
    (tmp_path / "script.py").write_text("raise SystemExit(2)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_nets", raising=False)


def test_a_factory_and_a_shape_print_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["my_nets:net", "--input", "1,3,8,8", "--width", "90"])

    out = capsys.readouterr().out
    assert code == 0
    assert out.startswith("Sequential   1×3×8×8 float32 → 1×2 float32\n")
    assert "802 params" in out


def test_a_ready_model_ids_and_no_input_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["my_nets:ready"]) == 0
    assert "No input given" in capsys.readouterr().out
    assert main(["my_nets:words", "--input", "2,5:int64"]) == 0
    assert "2×5 int64" in capsys.readouterr().out


def test_json_and_html_for_machines_and_pages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "net.html"

    assert main(["my_nets:net", "--input", "1,3,8,8", "--json", "--html", str(page)]) == 0

    assert json.loads(capsys.readouterr().out)["totals"]["n_params"] == 802
    html = page.read_text()
    assert html.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
    assert '<meta name="color-scheme" content="light dark">' in html
    assert '<meta name="viewport"' in html
    assert "<title>Sequential</title>" in html


def test_options_shape_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["my_nets:net", "--input", "1,3,8,8", "--columns", "type,dtype", "--depth", "0"]

    assert main([*args, "--eval", "--no-fold"]) == 0

    assert "Layer     Type        Dtype" in capsys.readouterr().out


def test_macs_are_counted_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["my_nets:net", "--input", "1,3,8,8"]

    assert main(args) == 0
    assert "MACs" in capsys.readouterr().out
    assert main([*args, "--no-macs"]) == 0
    assert "MACs" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["my_nets"], "argument model: 'my_nets' is not of the form module:factory"),
        (["no_such:net"], "argument model: no module 'no_such' here or among the installed ones"),
        (["my_nets:nett"], "argument model: 'my_nets' has no 'nett': did you mean 'net'?"),
        (["my_nets:number"], "argument model: 'my_nets:number' is of type int, not an nn.Module"),
        (["my_nets:net", "--input", "1,x"], "argument --input: '1,x' is not a shape, such as"),
        (["my_nets:net", "--input", "1,0"], "argument --input: '1,0' is not a shape, such as"),
        (["my_nets:net", "--input", "1:text"], "argument --input: 'text' is not a dtype"),
        (["my_nets:net", "--depth", "-1"], "argument --depth:"),
        (["my_nets:net", "--columns", "size"], 'argument --columns: no column "size". There'),
        (["my_nets:net", "--columns", "macs", "--no-macs"], "argument --no-macs: --columns has"),
        (["my_nets:net", "--html", "my_nets.py"], "my_nets.py exists: name a new file"),
        (["..:conv"], "argument model: '..:conv' is not of the form module:factory"),
        (["my_nets:net", "--html", "no/x.html"], "--html: there is no folder no: make it first"),
        (["my_nets:net", "--html", "x" * 300], "--html: cannot write"),
        (["my_nets:net", "--width", "0"], "argument --width: '0' is not a whole number from 1"),
        ([], "the following arguments are required: model"),
        (["my_nets:net", "--input", "999999999999,3,32,32"], "3,32,32' cannot be made: "),
        (["my_nets:net", "--input", f"{2**70},1"], "cannot be made: "),
        (["my_nets:net", "--input", "1,-3"], "argument --input: '1,-3' is not a shape"),
        (["my_nets:net", "--input", "-1,3"], "argument --input: expected one argument"),
        (["my_nets:net", "--input", ""], "argument --input: '' is not a shape"),
        (["my_nets:net", "--input", "2,2:float31"], "'float31' is not a dtype"),
        (["my_nets:net", "--input", "2,2:float4_e2m1fn_x2"], "_e2m1fn_x2' cannot be made: "),
        (["my_nets.py:net"], "no module 'my_nets.py' here"),
        (["./my_nets:net"], "is not of the form module:factory"),
        (["nets/my_nets:net"], "no module 'nets/my_nets' here or among the installed ones: name a"),
        (["my_nets:net", "--html", "."], "argument --html: . exists: name a new file"),
        (["my_nets:net", "--html", "my_nets.py/x.html"], "--html: there is no folder my_nets.py"),
        (["my_nets:net", "--html", "a\x00b.html"], "cannot write a\\x00b.html: "),
        (["my_nets:net", "--what"], "unrecognized arguments: --what"),
        (["my_nets:net\nnet"], "'my_nets' has no 'net\\nnet'"),
    ],
)  # fmt: skip
def test_a_bad_argument_gets_one_line_and_exit_code_two(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(args)

    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["my_nets:broken"], "OSError: no weights on this disk"),
        (["my_nets:needs"], "TypeError: needs() missing 1 required positional argument: 'width'"),
        (["my_nets:wordy"], "RuntimeError: Error(s) in loading: missing key\\x1b[31m"),
        (["my_nets:silent"], "MemoryError: MemoryError"),
        (["my_nets:leaves"], "calling leaves ended by sys.exit(3). Call sys.exit only if the"),
        (["torn:net"], "SyntaxError: "),
        (["script:net"], "importing script ended by sys.exit(2). Call sys.exit only if t"),
        (["my_nets:net", "--input", "1,3,9,9"], "hookkit: RuntimeError: "),
    ],
)
def test_a_model_that_fails_gives_exit_code_one(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_an_interrupt_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["my_nets:stops"]) == 130
    assert capsys.readouterr().err == "python -m hookkit: interrupted\n"


def test_a_screen_that_has_few_characters_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))

    assert main(["my_nets:ready", "--input", "3,4"]) == 0

    assert b"3\\xd74 float32" in raw.getvalue()


@pytest.mark.slow
def test_a_closed_pipe_gets_no_traceback() -> None:
    command = [sys.executable, "-m", "hookkit", "my_nets:ready"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        err = running.stderr.read()

    assert err == b""


@pytest.mark.slow
def test_it_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "hookkit", "my_nets:ready", "--input", "3,4"]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    assert "10 params" in done.stdout
