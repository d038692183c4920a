"""The page that trains a drafter on 50 chats in Python: its cells run, one after the other, with a tiny target."""

import re

import pytest
from documented_code import ROOT, python_blocks, run_block

PAGE = "docs/guide/train-on-50-chats.md"

pytestmark = pytest.mark.usefixtures("ray_session")

FETCH = 'model = fetch(runs / "smollm2")'
"""Downloads the target and converts it, which `make demo` does as well."""
START_RAY = "session.enter_context(ray_session(RayConfig()))"
"""Ray has been started for all tests of this process."""
EPOCHS = '"train.epochs=4"'
"""The tiny target has fewer tokens than the preset's draft vocabulary."""
CHATS = "max_chats=50"
"""Fewer are enough for the loss to fall, and take less time."""


def test_its_cells_run(tiny_target, tmp_path, monkeypatch, capsys):
    code = "\n".join(python_blocks(PAGE))
    for line in (FETCH, START_RAY, EPOCHS, CHATS):
        assert line in code
    monkeypatch.chdir(tmp_path)
    code = code.replace('Path("configs").absolute()', f"Path({str(ROOT / 'configs')!r})")
    code = code.replace(FETCH, f"model = Path({str(tiny_target)!r})").replace(START_RAY, "")
    code = code.replace(EPOCHS, f"{EPOCHS}, 'drafter.draft_vocab_size=null'").replace(CHATS, "max_chats=15")
    run_block(code, PAGE)
    said = capsys.readouterr().out
    assert re.search(r"[\d,]+ tokens in \d+ shard", said)
    losses = [float(loss) for loss in re.findall(r"^update \d+: .* loss ([\d.]+)$", said, re.M)]
    assert losses[-1] < losses[0]
    assert re.search(r"^\d+ tokens in \d+ target passes, \d\.\d\d per pass$", said, re.M)
