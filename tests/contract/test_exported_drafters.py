"""Exported drafters: they draft in a fresh process without the target, are evaluated with it, and refuse another."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from drafting import state_at, tree_of
from safetensors.torch import load_file, save_file
from side_by_side import SHAPES
from tiny_batches import taps_of
from tiny_drafters import TRAINED, VARIANTS, build
from tiny_targets import TinyTarget, save_chat_target

from moray.config import validate
from moray.decoding.params import SamplingParams
from moray.distill.export.config import ExportConfig
from moray.distill.export.export import export_drafter, load_exported
from moray.distill.tracking.metrics import write_validation
from moray.drafters.checkpoint import load_drafter, read_contract, save_drafter
from moray.drafters.loading import fingerprints_of, load_drafters
from moray.errors import DataError, MismatchError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = ("platform", "tests", "tests/contract")
DRAFT_ALONE = """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from drafting import tree_of
from side_by_side import SHAPES
from moray.batch import Taps
from moray.decoding.params import SamplingParams
from moray.distill.export.export import load_exported
torch.set_num_threads(1)
for folder in map(Path, sys.argv[1:]):
    sample = load_file(folder.with_suffix(".sample"))
    hidden = {int(name[1:]): tensor for name, tensor in sample.items() if name.startswith("h")}
    drafter = load_exported(folder / "exported", device="cpu")
    tree = tree_of(drafter, sample["tokens"], Taps(sample.get("kv"), hidden), SHAPES["dynamic"], SamplingParams())
    save_file({"tokens": tree.tokens.contiguous(), "parents": tree.parents.contiguous()}, folder.with_suffix(".tree"))
"""


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """A target with a tokenizer, and the fingerprint of its text."""
    folder = save_chat_target(tmp_path_factory.mktemp("target") / "target")
    target = Target.load(TargetConfig(model=str(folder), device="cpu"))
    return TinyTarget("chat", folder, target), ChatTokenizer.load(str(folder))


def trained(chat, folder: Path, name: str = "moa-1") -> Path:
    """A drafter in a folder as a run leaves it."""
    tiny, tokenizer = chat
    save_drafter(folder, build(tiny, VARIANTS[name]), tokenizer.fingerprint)
    return folder


def export(chat, drafter: Path, output: Path, **settings) -> Path:
    values = {"drafter": str(drafter), "target": {"model": str(chat[0].folder)}, "output": str(output), **settings}
    return export_drafter(validate(ExportConfig, values))


def test_every_drafter_drafts_the_same_in_a_fresh_process_without_the_target(chat, tmp_path):
    """Bit for bit: the trees, which the smallest difference of logits can change, of trained weights and real taps."""
    tiny, tokenizer = chat
    wanted = {}
    for name in TRAINED:
        folder = trained(chat, tmp_path / name, name)
        export(chat, folder, folder / "exported")
        drafter = load_drafter(
            folder, TargetHead.of(tiny.target, VARIANTS[name].num_target_layers), tokenizer.fingerprint
        )
        tokens = torch.tensor([tiny.prompt(0, 20)])
        taps = taps_of(tiny.target, tokens, drafter.needs)
        sample = {f"h{depth}": hidden for depth, hidden in taps.hidden.items()} | {"tokens": tokens}
        save_file(sample | ({} if taps.kv is None else {"kv": taps.kv}), folder.with_suffix(".sample"))
        wanted[name] = tree_of(drafter, tokens, taps, SHAPES["dynamic"], SamplingParams())
    hidden_target = tiny.folder.rename(tiny.folder.with_name("out-of-reach"))
    try:
        subprocess.run(
            [sys.executable, "-c", DRAFT_ALONE, *(str(tmp_path / name) for name in TRAINED)],
            env={**os.environ, "PYTHONPATH": ":".join(str(REPOSITORY / name) for name in SOURCES)},
            check=True,
            timeout=200,
        )
    finally:
        hidden_target.rename(tiny.folder)
    for name, tree in wanted.items():
        found = load_file((tmp_path / name).with_suffix(".tree"))
        assert torch.equal(found["tokens"], tree.tokens), name
        assert torch.equal(found["parents"], tree.parents), name


@pytest.mark.parametrize("name", ["moa-1", "eagle-1"])
def test_states_are_the_same_bits_and_logits_the_same(chat, tmp_path, name):
    tiny, tokenizer = chat
    folder = trained(chat, tmp_path / "run", name)
    alone = load_exported(export(chat, folder, tmp_path / "out"), device="cpu")
    paired = load_drafter(folder, TargetHead.of(tiny.target, VARIANTS[name].num_target_layers), tokenizer.fingerprint)
    assert all(torch.equal(value, paired.state_dict()[key]) for key, value in alone.state_dict().items())
    tokens = torch.tensor([tiny.prompt(0, 20)])
    taps = taps_of(tiny.target, tokens, paired.needs)
    with torch.no_grad():
        logits = [d.step(state_at(d, tokens, taps, 10), tokens[0, 10:11], None, 0) for d in (alone, paired)]
    # Files begin their weights anywhere, and what a product adds up first depends on where they lie in memory.
    torch.testing.assert_close(*logits, rtol=0.0, atol=2e-5)


def test_it_is_evaluated_like_the_run_and_the_files_are_as_said(chat, tmp_path):
    tiny, tokenizer = chat
    folder = trained(chat, tmp_path / "mine", "eagle-1")
    write_validation(
        folder, {"step": 20, "loss": 0.5, "real_tau": 2.0, "simulated_tau": 2.5, "tau_gap": 0.5, "chats": 4}
    )
    out = export(chat, folder, tmp_path / "out", license="mit", base_model="me/target")
    assert {path.name for path in out.iterdir()} >= {
        "README.md", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json", "chat_template.jinja",
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "all files have the same permissions"
    names = set(load_file(out / "model.safetensors"))
    assert {"head.lm_head.weight", "head.model.embed_tokens.weight", "head.model.norm.weight"} <= names
    assert "drafter.vocabulary.tokens" in names
    assert read_contract(out) == read_contract(folder)
    (drafter,) = load_drafters((str(out),), tiny.target, tokenizer).values()
    (other,) = load_drafters((str(folder),), tiny.target, tokenizer).values()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in drafter.state_dict().items())
    assert fingerprints_of((str(out),)).keys() == {"out"}
    assert ChatTokenizer.load(str(out)).fingerprint == tokenizer.fingerprint
    card = (out / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "mit"
    assert front["base_model"] == "me/target"
    assert {"speculative-decoding", "eagle"} <= set(front["tags"])
    assert "| 20 | 0.500 | 2.000 | 2.500 | 0.500 | 4 |" in card
    assert str(tmp_path) not in card, "a path of this machine"
    assert str(tmp_path) not in (out / "config.json").read_text()


def test_an_export_that_fails_at_last_leaves_the_one_before(chat, tmp_path, monkeypatch):
    folder = trained(chat, tmp_path / "run")
    out = export(chat, folder, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    replace = Path.replace

    def fails_into_place(path, goal):
        if Path(goal) == out and path.suffix == ".tmp":
            raise OSError(28, "No space left on device")
        return replace(path, goal)

    monkeypatch.setattr(Path, "replace", fails_into_place)
    with pytest.raises(DataError, match=r"out' cannot be written: No space left on device"):
        export(chat, folder, out, dtype="bfloat16")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    monkeypatch.undo()
    export(chat, folder, out, dtype="bfloat16")
    assert load_file(out / "model.safetensors")["head.lm_head.weight"].dtype == torch.bfloat16
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_dtype_and_head_are_as_asked(chat, tmp_path):
    tiny, tokenizer = chat
    folder = trained(chat, tmp_path / "run")
    out = export(chat, folder, tmp_path / "half", dtype="bfloat16")
    tensors = load_file(out / "model.safetensors")
    assert tensors["head.lm_head.weight"].dtype == torch.bfloat16
    alone = load_exported(out, device="cpu")
    assert {parameter.dtype for parameter in alone.parameters()} == {torch.bfloat16}
    assert tensors["drafter.feature_scale"].dtype == torch.float32, "buffers are no weights"
    small = export(chat, folder, tmp_path / "small", include_head=False)
    assert all(name.startswith("drafter.") for name in load_file(small / "model.safetensors"))
    with pytest.raises(DataError, match=r"exported without the target's head.*include_head=true"):
        load_exported(small)
    assert load_drafters((str(small),), tiny.target, tokenizer)


def test_what_cannot_be_exported_is_said_in_one_line(chat, tmp_path):
    with pytest.raises(DataError, match=r"holds no drafter: drafter.json is missing"):
        export(chat, tmp_path / "nothing", tmp_path / "out")
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "run.yaml").write_text("config: {}")
    with pytest.raises(DataError, match=r"holds a run that is not finished: run its pipelines.distill again"):
        export(chat, tmp_path / "unfinished", tmp_path / "out")
    folder = trained(chat, tmp_path / "run")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"output '.*taken' exists and holds something else than an export"):
        export(chat, folder, tmp_path / "taken")
    out = export(chat, folder, tmp_path / "out")
    assert export(chat, folder, out) == out, "the same drafter again"
    with pytest.raises(DataError, match=r"holds an export of another drafter"):
        export(chat, trained(chat, tmp_path / "other", "eagle-0"), out)
    with pytest.raises(DataError, match=r"holds no exported drafter"):
        load_exported(folder)
    with pytest.raises(DataError, match=r"report '.*config.json' is no report of pipelines.evaluate"):
        export(chat, folder, tmp_path / "more", report=str(out / "config.json"))
    assert not (tmp_path / "more").exists()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rope_theta", 123.0, r"RoPE theta \(rope_theta\) differs: 123.0 in training, 10000.0 here"),
        ("rope_scaling", "linear factor=2.0", r"RoPE scaling \(rope_scaling\) differs: linear factor=2.0 .*, default"),
        ("num_layers", 7, r"num_layers differs: 7 in training, 3 here"),
        ("fingerprint", "abc", r"weights and config \(fingerprint\) differs: abc in training, [0-9a-f]{32} here"),
    ],
)
@pytest.mark.parametrize("is_exported", [False, True])
def test_another_target_is_refused_with_the_field_and_both_values(chat, tmp_path, field, value, words, is_exported):
    folder = changed(chat, tmp_path, is_exported, lambda contract: contract["target"].update({field: value}))
    with pytest.raises(MismatchError, match=rf"trained for another target, whose {words}"):
        load_drafters((str(folder),), chat[0].target, chat[1])


@pytest.mark.parametrize("is_exported", [False, True])
def test_tokenizer_and_chat_template_are_told_apart(chat, tmp_path, is_exported):
    tiny, tokenizer = chat
    ours = tokenizer.fingerprint.split(".")
    for place, name in enumerate(("tokenizer", "chat template")):
        other = [*ours]
        other[place] = "f" * 32
        text = ".".join(other)
        folder = changed(
            chat, tmp_path / name, is_exported, lambda contract, text=text: contract.update(text_fingerprint=text)
        )
        words = rf"another {name}, whose fingerprint differs: {'f' * 32} in training, {ours[place]} here"
        with pytest.raises(MismatchError, match=words):
            load_drafters((str(folder),), tiny.target, tokenizer)


def test_other_taps_are_refused_with_both(chat, tmp_path):
    folder = changed(chat, tmp_path, True, lambda contract: contract["taps"].update(kv_layers=[0, 1]))
    with pytest.raises(MismatchError, match=r"kv_layers\) differ: \[0, 1\] in training, \[0, 1, 2\] here"):
        load_exported(folder, device="cpu")
    folder = changed(chat, tmp_path / "more", False, lambda contract: contract["taps"].update(hidden_depths=[-3]))
    with pytest.raises(MismatchError, match=r"hidden_depths\) differ: \[-3\] in training, \["):
        load_drafters((str(folder),), chat[0].target, chat[1])


def changed(chat, folder: Path, is_exported: bool, change) -> Path:
    """A drafter whose contract says something else."""
    run = trained(chat, folder / "run")
    where = export(chat, run, folder / "out") / "config.json" if is_exported else run / "drafter.json"
    description = json.loads(where.read_text())
    change(description["contract"] if is_exported else description)
    where.write_text(json.dumps(description))
    return where.parent
