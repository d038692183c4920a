"""The perplexity of a text is what Hugging Face's loss says of the same tokens."""

import math

import pytest
import torch
from tiny_targets import load_target
from transformers import AutoModelForCausalLM

from moray.bench.perplexity import perplexity, token_losses


def test_it_is_hugging_face_s_loss(tmp_path):
    tiny = load_target(tmp_path)
    context, text = tiny.prompt(0, 9), tiny.prompt(1, 7)
    found = token_losses(tiny.target, context, text)
    ids = torch.tensor([[*context, *text]])
    labels = ids.clone()
    labels[:, : len(context)] = -100
    with torch.no_grad():
        stock = AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation="eager")
        wanted = float(stock(ids, labels=labels).loss)
    assert sum(found) / len(found) == pytest.approx(wanted, rel=1e-4)
    assert perplexity(found) == pytest.approx(math.exp(wanted), rel=1e-4)
    assert token_losses(tiny.target, context, []) == []
    assert perplexity([]) is None
