"""Every code block of the README runs, in order, and prints what the README says it prints."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hookkit
from hookkit import Fingerprint, ParamStats, watch

pytestmark = pytest.mark.slow

README = Path(__file__).parent.parent / "README.md"

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n?^```text\n(.*?)^```\n)?", re.M | re.S)


def blocks(text: str) -> list[tuple[str, str | None]]:
    """(code, the output shown directly below it or None) of each python block of a page."""
    return [(code, shown or None) for code, shown in BLOCK.findall(text)]


def stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def run(text: str, file: str = str(README)) -> list[tuple[str, str]]:
    """(shown, printed) of each python block of `text` with an output, all in one namespace, run as
    the code of `file`.
    """
    space: dict[str, object] = {"__name__": "readme"}
    pairs = []
    for code, shown in blocks(text):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, file, "exec"), space)
        if shown is not None:
            pairs.append((stripped(shown), stripped(printed.getvalue())))
    return pairs


@pytest.mark.parametrize("n", range(len(blocks(README.read_text()))))
def test_each_block_runs_alone_and_prints_what_is_shown(n: int, tmp_path: Path) -> None:
    code, shown = blocks(README.read_text())[n]
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"} | {"PYTHONUTF8": "1"}

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )

    assert done.stderr == ""
    assert stripped(done.stdout) == stripped(shown or "")


def test_a_wrong_output_is_seen() -> None:
    shown, printed = run("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")[0]

    assert shown != printed


def test_every_link_to_a_file_leads_somewhere() -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text())

    assert [link for link in links if not (README.parent / link).exists()] == []


def calls_of_the_problems() -> list[str]:
    """The calls in the table of problems."""
    table = README.read_text().split("| you say | you write |")[1].split("\n\n")[0]
    spans = [span for row in table.splitlines()[2:] for span in re.findall(r"`([^`]+)`", row)]
    return [span for span in spans if "(" in span and "…" not in span]


class Net(nn.Sequential):
    """A small language model that takes a mask, as those of transformers do."""

    def __init__(self) -> None:
        block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        super().__init__(nn.Embedding(9, 32), nn.TransformerEncoder(block, 2), nn.Linear(32, 9))

    def forward(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        hidden = None if attention_mask is None else ~attention_mask
        return self[2](self[1](self[0](ids), src_key_padding_mask=hidden))


@pytest.mark.parametrize("call", calls_of_the_problems())
def test_the_call_for_each_problem_runs(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = Net()
    ids, opt = torch.randint(1, 9, (2, 12)), torch.optim.Adam(model.parameters())
    ids[0, 8:] = 0
    for file in ("a.fp", "b.fp"):
        with watch(model, opt, Fingerprint(file), ParamStats()) as w:
            model(ids).mean().backward()
            opt.step()
    names = {
        "model": model.eval(),
        "reference": model,
        "ids": ids,
        "mask": ids != 0,
        "opt": opt,
        "w": w,
    }
    names |= {"y": 0, "loss_func": lambda out, y: (out - y).pow(2).mean()}

    exec(call, {**vars(hookkit), **names})
