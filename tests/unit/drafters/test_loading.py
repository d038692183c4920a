"""What a configuration names becomes drafters for the target at hand, or a message that says what is wrong."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_drafters import DRAFTERS, build
from tiny_targets import TinyTarget, save_chat_target

from moray.bench.configs import EvaluateConfig
from moray.config import validate
from moray.drafters.checkpoint import save_drafter
from moray.drafters.configs import NgramConfig, PretrainedConfig, TrainedConfig
from moray.drafters.loading import fingerprints_of, folder_of, load_drafters
from moray.errors import ConfigError, MismatchError
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

NGRAM = NgramConfig(type="ngram")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_chat_target(tmp_path_factory.mktemp("loading") / "target")


@pytest.fixture(scope="module")
def target(folder) -> Target:
    return Target.load(TargetConfig(model=str(folder), device="cpu"))


@pytest.fixture(scope="module")
def tokenizer(folder) -> ChatTokenizer:
    return ChatTokenizer.load(str(folder))


def test_drafters_come_in_order_under_the_names_of_folders_and_types(folder, target, tokenizer, tmp_path):
    save_drafter(
        tmp_path / "mine", build(TinyTarget("chat", folder, target), DRAFTERS["eagle"][0]), tokenizer.fingerprint
    )
    entries = (NGRAM, str(tmp_path / "mine"), PretrainedConfig(type="pretrained", model=str(folder)))
    drafters = load_drafters(entries, target, tokenizer)
    assert [(name, type(drafter).__name__) for name, drafter in drafters.items()] == [
        ("ngram", "Ngram"),
        ("mine", "Eagle"),
        ("pretrained", "Pretrained"),
    ]
    assert not any(drafter.training for drafter in drafters.values())
    assert {p.dtype for drafter in drafters.values() for p in drafter.parameters()} == {torch.float32}


@pytest.mark.parametrize("entries", [(NGRAM, NGRAM), ("a/same", "b/same"), (NGRAM, "runs/ngram")], ids=str)
def test_two_of_one_name_are_refused(entries, folder, target, tokenizer, tmp_path):
    named = []
    for entry in entries:
        if isinstance(entry, str):
            drafter = build(TinyTarget("chat", folder, target), DRAFTERS["eagle"][0])
            save_drafter(tmp_path / entry, drafter, tokenizer.fingerprint)
            entry = str(tmp_path / entry)
        named.append(entry)
    with pytest.raises(ConfigError, match=r"drafters holds two called '(ngram|same)'"):
        load_drafters(tuple(named), target, tokenizer)


def test_one_folder_is_measured_with_every_n_and_without(folder, target, tokenizer, tmp_path):
    where = str(tmp_path / "several")
    save_drafter(
        Path(where), build(TinyTarget("chat", folder, target), DRAFTERS["dynamic-moa"][0]), tokenizer.fingerprint
    )
    entries = (where, *(TrainedConfig(type="trained", folder=where, num_target_layers=n, name=f"N{n}") for n in (0, 2)))
    drafters = load_drafters(entries, target, tokenizer)
    assert {name: drafter.layer_counts for name, drafter in drafters.items()} == {
        "several": (0, 1, 2),
        "N0": (0,),
        "N2": (2,),
    }
    assert len(set(fingerprints_of(entries).values())) == 1
    assert [folder_of(entry) for entry in entries] == [Path(where)] * 3
    (unnamed,) = load_drafters((TrainedConfig(type="trained", folder=where),), target, tokenizer)
    assert unnamed == "several"
    with pytest.raises(ConfigError, match="num_target_layers is 5, but this drafter drafts with 0, 1, 2"):
        load_drafters((TrainedConfig(type="trained", folder=where, num_target_layers=5),), target, tokenizer)


def test_the_sizes_of_a_drafter_to_be_trained_are_refused_by_name():
    given = {"target": {"model": "m"}, "trees": [{"type": "chain", "depth": 2}], "questions": "q", "output": "o"}
    with pytest.raises(ConfigError, match=r"'drafters\.0\.type' is \"moa\": accepted are pretrained, ngram, trained"):
        validate(EvaluateConfig, given | {"drafters": [{"type": "moa"}]})
    with pytest.raises(
        ConfigError, match=r"unknown key 'drafters\.0\.max_ngrm'; did you mean 'drafters\.0\.max_ngram'"
    ):
        validate(EvaluateConfig, given | {"drafters": [{"type": "ngram", "max_ngrm": 3}]})
    with pytest.raises(ConfigError, match=r"drafters\.0\.model"):
        validate(EvaluateConfig, given | {"drafters": [{"type": "pretrained"}]})
    assert (
        validate(EvaluateConfig, given | {"drafters": ["runs/demo/moa", {"type": "ngram"}]}).drafters[0]
        == "runs/demo/moa"
    )


def test_a_model_of_another_vocabulary_is_refused(folder, target, tokenizer, tmp_path):
    """Two letters exchanged: the same size, other tokens."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    values = json.loads((other / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(MismatchError, match=r"other', whose vocabulary is not the target's, first at \('a', \d+\)"):
        load_drafters((PretrainedConfig(type="pretrained", model=str(other)),), target, tokenizer)


def test_added_tokens_may_be_named_differently(folder, target, tokenizer, tmp_path):
    """As the reserved special tokens of Llama 3 and 3.1 are."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    text = (other / "tokenizer.json").read_text().replace("<|system|>", "<|reserved|>")
    (other / "tokenizer.json").write_text(text)
    settings = (other / "tokenizer_config.json").read_text().replace("<|system|>", "<|reserved|>")
    (other / "tokenizer_config.json").write_text(settings)
    assert "one" in load_drafters(
        (PretrainedConfig(type="pretrained", model=str(other), name="one"),), target, tokenizer
    )


def test_a_drafter_of_another_tokenizer_is_refused(folder, target, tokenizer, tmp_path):
    save_drafter(tmp_path / "mine", build(TinyTarget("chat", folder, target), DRAFTERS["eagle"][0]), "another")
    with pytest.raises(MismatchError):
        load_drafters((str(tmp_path / "mine"),), target, tokenizer)
