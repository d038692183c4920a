"""The demo target: it learns, is an ordinary Hugging Face folder, and the same seed gives the same weights."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from moray.targets.demo import make as demo
from moray.targets.demo.chats import generate_chats
from moray.targets.demo.config import DemoModelConfig, DemoOptimConfig, DemoTargetConfig
from moray.targets.demo.data import build_tokenizer, pack
from moray.targets.demo.make import DemoTargetResult, read_result, train_demo_target
from moray.targets.demo.training import build_model


def _config(output: Path) -> DemoTargetConfig:
    return DemoTargetConfig(
        output=output,
        num_train_chats=200,
        num_heldout_chats=16,
        num_questions=26,
        model=DemoModelConfig(
            num_layers=2,
            hidden_size=64,
            num_heads=2,
            num_kv_heads=1,
            head_dim=32,
            intermediate_size=128,
            vocab_size=512,
        ),
        optim=DemoOptimConfig(num_steps=60, rows_per_step=2, row_length=128),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoTargetConfig, DemoTargetResult]:
    config = _config(tmp_path_factory.mktemp("demo"))
    return config, train_demo_target(config, Console(quiet=True))


def test_held_out_loss_falls_well_below_that_of_guessing(
    trained: tuple[DemoTargetConfig, DemoTargetResult],
) -> None:
    _, result = trained
    assert result.num_steps == 60
    assert result.heldout_loss < 4.6  # the uniform guess is log(512) = 6.24
    assert result.heldout_accuracy > 0.12


def test_folder_loads_like_any_other_and_holds_what_decoding_needs(
    trained: tuple[DemoTargetConfig, DemoTargetResult],
) -> None:
    folder = trained[0].output / "target"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert type(model) is LlamaForCausalLM
    assert model.config.num_hidden_layers == 2
    assert model.generation_config.eos_token_id == [tokenizer.convert_tokens_to_ids("<|end|>")]
    assert len(tokenizer) == model.config.vocab_size == 512
    assert tokenizer.decode(tokenizer("Ça va? 12 + 3 = 15\n").input_ids) == "Ça va? 12 + 3 = 15\n"


def test_chat_template_round_trips_and_marks_exactly_the_answers(
    trained: tuple[DemoTargetConfig, DemoTargetResult],
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(trained[0].output / "target")
    messages = [
        {"role": "user", "content": "Count from 1 to 3."},
        {"role": "assistant", "content": "1, 2, 3."},
        {"role": "user", "content": "Now backwards."},
        {"role": "assistant", "content": "3, 2, 1."},
    ]
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert tokenizer.decode(encoded["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
    answers = [i for i, flag in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if flag]
    assert tokenizer.decode(answers) == "1, 2, 3.<|end|>3, 2, 1.<|end|>"
    asked = tokenizer.apply_chat_template(messages[:3], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert asked == encoded["input_ids"][: len(asked)]


def test_chats_and_questions_are_written_and_disjoint(trained: tuple[DemoTargetConfig, DemoTargetResult]) -> None:
    output = trained[0].output
    train, heldout = (
        [json.loads(line) for line in (output / "chats" / name).read_text(encoding="utf-8").splitlines()]
        for name in ("train.jsonl", "heldout.jsonl")
    )
    questions = [json.loads(line) for line in (output / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert (len(train), len(heldout), len(questions)) == (200, 16, 26)
    assert set(train[0]) == {"prompt", "prompt_id", "messages"}
    assert set(questions[0]) == {"question_id", "category", "turns"}
    asked = {row["prompt"] for row in heldout} | {row["turns"][0] for row in questions}
    assert asked.isdisjoint(row["prompt"] for row in train)


def test_same_seed_same_weights_other_seed_other_weights(
    trained: tuple[DemoTargetConfig, DemoTargetResult], tmp_path: Path
) -> None:
    again = trained[0].model_copy(update={"output": tmp_path / "again"})
    other = trained[0].model_copy(update={"output": tmp_path / "other", "seed": 1})
    for config in (again, other):
        train_demo_target(config, Console(quiet=True))
    weights = [(config.output / "target" / "model.safetensors").read_bytes() for config in (trained[0], again, other)]
    assert weights[0] == weights[1]
    assert weights[0] != weights[2]


def test_processes_without_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_processes 3 must divide optim.rows_per_step 2"):
        DemoTargetConfig(num_processes=3, optim=_config(tmp_path).optim)


def test_two_processes_train_what_one_would(trained: tuple[DemoTargetConfig, DemoTargetResult], tmp_path: Path) -> None:
    short = trained[0].optim.model_copy(update={"num_steps": 3})
    models = []
    for num_processes in (1, 2):
        config = trained[0].model_copy(
            update={"output": tmp_path / str(num_processes), "num_processes": num_processes, "optim": short}
        )
        train_demo_target(config, Console(quiet=True))
        models.append(AutoModelForCausalLM.from_pretrained(config.output / "target").state_dict())
    for name, one in models[0].items():
        # Muon orthogonalises in bfloat16: what float32 sums differ by comes out a little larger.
        torch.testing.assert_close(models[1][name], one, rtol=0.02, atol=2e-3, msg=lambda text, n=name: f"{n}: {text}")


def test_a_finished_output_counts_only_for_its_own_configuration_and_recipe(
    trained: tuple[DemoTargetConfig, DemoTargetResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, result = trained
    assert read_result(config) == result
    assert read_result(config.model_copy(update={"num_questions": 27})) is None
    marker = config.output / demo.MARKER
    text = marker.read_text(encoding="utf-8")
    marker.write_text(text[: len(text) // 2], encoding="utf-8")
    assert read_result(config) is None
    marker.write_text(text, encoding="utf-8")
    assert read_result(config) == result
    monkeypatch.setattr(demo, "RECIPE", demo.RECIPE + 1)
    assert read_result(config) is None


def test_a_slow_machine_drops_steps_and_says_so(tmp_path: Path) -> None:
    config = _config(tmp_path).model_copy(update={"max_seconds": 0.2})
    console = Console(record=True, quiet=False, file=(tmp_path / "log").open("w", encoding="utf-8"), width=200)
    result = train_demo_target(config, console)
    assert 1 <= result.num_steps < 60
    assert f"{result.num_steps} of 60 steps" in console.export_text()
    assert dataclasses.replace(result) == read_result(config)


def test_chats_in_one_row_do_not_see_each_other(tmp_path: Path) -> None:
    config = _config(tmp_path)
    chats = list(generate_chats(40, seed=0, heldout=False))
    tokenizer = build_tokenizer(chats, config.model)
    model = build_model(tokenizer, config.model, seed=0)
    rows = pack(tokenizer, chats, row_length=512, num_tokens=512)
    starts = (rows.positions[0] == 0).nonzero().flatten().tolist()
    assert len(starts) >= 3
    changed = rows.tokens[:1].clone()
    changed[0, : starts[1]] = 7
    with torch.no_grad():
        before, after = (
            model.model(input_ids=tokens, position_ids=rows.positions[:1], use_cache=False).last_hidden_state[0]
            for tokens in (rows.tokens[:1], changed)
        )
    assert not torch.allclose(before[: starts[1]], after[: starts[1]])
    torch.testing.assert_close(before[starts[1] :], after[starts[1] :])
