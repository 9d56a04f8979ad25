"""Each block of docs/how-to/loops.md runs beside its library, and records the same run."""

import copy
import pickle
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hooked import n_hooks
from test_readme import BLOCK, run

from hookkit.training import Watcher

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "loops.md"

# for each section its library, and what of it can be copied, and pickled, after the training
SECTIONS = {
    "PyTorch": ("torch", "model", "model"),
    "accelerate": ("accelerate", "model", "model"),
    "ignite": ("ignite", "model", "model"),
    "skorch": ("skorch", "net", "net"),
    "fastai": ("fastai", "learn", "learn"),
    "Lightning": ("lightning", "trainer", "trainer"),
    "Hugging Face": ("transformers", "trainer", "bridge"),  # no Trainer of theirs can be pickled
}


def sections() -> dict[str, list[str]]:
    """The python blocks under each heading, "" for those above the first."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.M)
    texts = {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}
    return {name: [code for code, _ in BLOCK.findall(text)] for name, text in texts.items()}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module for the blocks to run in, so that what they define can be pickled."""
    module = ModuleType("loops_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    return module


def ran(page: ModuleType, *codes: str) -> Watcher:
    for code in codes:
        exec(compile(code, str(PAGE), "exec"), vars(page))
    return page.w


def values(w: Watcher) -> dict[str, Any]:
    run = w.run_record()
    found = {f"{r.kind} {k}": v for r in (run.activations, run.params) for k, v in r.values.items()}
    return {**found, "losses": run.losses, "epochs": run.activations.epochs}


def test_every_section_is_tested() -> None:
    assert set(sections()) - {""} == set(SECTIONS)


def test_what_the_page_shows_is_printed() -> None:
    text = PAGE.read_text()

    ((shown, printed),) = run(text[: text.index("## accelerate")])

    assert printed == shown


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the libraries' own
@pytest.mark.parametrize("name", SECTIONS)
def test_each_library_records_what_the_plain_loop_does(
    name: str, page: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, copied, pickled = SECTIONS[name]
    imported = pytest.importorskip(library)
    if library == "transformers":  # the rows in order
        monkeypatch.setattr(imported.Trainer, "_get_train_sampler", lambda *_: None)
    wanted = values(ran(page, *sections()[""], *sections()["PyTorch"]))

    for code in sections()[name]:
        del page.w
        found = values(ran(page, code))

        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
        assert n_hooks(page.w.loop.model) == 0
        copy.deepcopy(vars(page)[copied])
        pickle.loads(pickle.dumps(vars(page)[pickled]))
