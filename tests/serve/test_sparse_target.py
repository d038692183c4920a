"""A sparse target over HTTP: `/v1/models` says what it is, and greedy text is that of decoding in process."""

import shutil

import httpx
import pytest
import torch
from served_api import MODEL, served
from tiny_targets import make_sparse

from moray.decoding.generate import SpeculativeDecoder
from moray.decoding.params import SamplingParams
from moray.targets.model import Target
from moray.targets.sparse.measured import Measured
from moray.targets.sparse.predictor import Predictor
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

MESSAGES = [{"role": "user", "content": "ab ab ab ab"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, chat_target):
    folder = tmp_path_factory.mktemp("sparse") / "target"
    shutil.copytree(chat_target, folder)
    make_sparse(folder)
    return folder


def test_served_text_is_the_evaluated_text_and_the_model_says_that_it_is_sparse(folder):
    target = Target.load(TargetConfig(model=str(folder), device="cpu"))
    tokenizer = ChatTokenizer.load(str(folder))
    prompt, ends = tokenizer.encode_prompt(MESSAGES), [*target.eos_ids, *tokenizer.eos_ids]
    tokens = SpeculativeDecoder(target, None).generate(prompt, SamplingParams(), 24, ends).tokens
    text = tokenizer.decode([token for token in tokens if token not in ends])
    with served(folder, drafters={"lookup": {"type": "ngram"}}) as app:
        answer = app.client().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0)
        assert answer.choices[0].message.content == text
        model = httpx.get(f"{app.url}/v1/models").json()["data"][0]
        assert model["sparse"] == {"share": target.spec.routing.share, "agreement": None}


@pytest.mark.parametrize("select", ["path", "drafter"])
@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_text_does_not_depend_on_the_nodes_that_a_server_verifies(folder, select, max_num_seqs):
    target = Target.load(TargetConfig(model=str(folder), device="cpu"))
    weight = torch.linspace(-1, 1, target.spec.hidden_size)
    Predictor(2, weight, torch.tensor(0.3), target.spec.fingerprint).save(folder)
    tokenizer = ChatTokenizer.load(str(folder))
    prompt, ends = tokenizer.encode_prompt(MESSAGES), [*target.eos_ids, *tokenizer.eos_ids]
    tokens = SpeculativeDecoder(target, None).generate(prompt, SamplingParams(), 24, ends).tokens
    engine = {"select": select, "tree": {"type": "dynamic", "depth": 3, "breadth": 2, "nodes": 6}}
    drafters = {"lookup": {"type": "ngram"}}
    with served(folder, max_num_seqs=max_num_seqs, drafters=drafters, engine=engine) as app:
        answer = app.client().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=24, temperature=0)
        details = answer.usage.completion_tokens_details
    assert answer.choices[0].message.content == tokenizer.decode([token for token in tokens if token not in ends])
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


def test_what_was_measured_is_told_until_the_target_is_written_again(folder):
    fingerprint = Target.load(TargetConfig(model=str(folder), device="cpu")).spec.fingerprint
    figures = {"share": 0.52, "agreement": 0.71, "perplexity": 9.0, "dense_perplexity": 7.0, "num_tokens": 100}
    for written_for, told in ((fingerprint, {"share": 0.52, "agreement": 0.71}), ("another", None)):
        Measured(fingerprint=written_for, **figures).save(folder)
        with served(folder) as app:
            found = httpx.get(f"{app.url}/v1/models/{MODEL}").json()["sparse"]
            assert (found if told else found["agreement"]) == told


def test_a_dense_target_says_nothing_of_it(running):
    assert "sparse" not in running.client().models.list().data[0].model_dump()
