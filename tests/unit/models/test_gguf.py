"""GGUF files as targets: the weights, the tokens and the text are those of the model they were made from, and what is
not understood is refused by name."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_gguf import TEXT, small_tokenizer, write_gguf
from tiny_targets import save_target
from transformers import AutoModelForCausalLM

from moray.errors import ConfigError
from moray.models import folder_of
from moray.models.gguf_file import RECORD
from moray.targets.loading import load_causal_lm
from moray.targets.model import Target
from moray.targets.spec import TargetConfig, read_spec
from moray.text import ChatTokenizer

NUM_TOKENS = 300
SIZES = {"vocab_size": NUM_TOKENS, "intermediate_size": 128}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer(NUM_TOKENS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose weights a file is made of."""
    return save_target(tmp_path_factory.mktemp("llama"), **SIZES)


@pytest.fixture
def file(folder, tokenizer, tmp_path) -> Path:
    return write_gguf(tmp_path / "model.gguf", folder, tokenizer)


def refused(file: Path) -> str:
    """What is said of a file, of which nothing is left behind."""
    with pytest.raises(ConfigError) as caught:
        folder_of(str(file))
    assert list(file.parent.iterdir()) == [file]
    text = str(caught.value)
    assert text.startswith(f"target.model '{file}'")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_weights_and_figures_are_those_of_the_model(family, tied, tokenizer, tmp_path):
    made = save_target(tmp_path / "made", family, tie_word_embeddings=tied, **SIZES)
    file = write_gguf(tmp_path / "model.gguf", made, tokenizer)
    target = Target.load(TargetConfig(model=str(file), device="cpu"))
    assert target.spec.family == ("llama" if family == "mistral" else family)
    stock = AutoModelForCausalLM.from_pretrained(made)
    tokens = torch.arange(40)[None] * 7
    with torch.no_grad():
        assert torch.equal(target.model(tokens).logits, stock(tokens).logits)
    assert target.eos_ids == (2,)


def test_quantised_weights_are_what_llama_cpp_makes_of_them(folder, tokenizer, tmp_path):
    kind = gguf.GGMLQuantizationType.Q8_0
    file = write_gguf(tmp_path / "model.gguf", folder, tokenizer, kind=kind)
    found = load_causal_lm(str(file), torch.float32, torch.device("cpu")).state_dict()
    for name, weight in load_file(folder / "model.safetensors").items():
        wanted = weight.numpy()
        if wanted.ndim == 2:
            wanted = gguf.dequantize(gguf.quantize(wanted, kind), kind)
            assert not np.array_equal(wanted, weight.numpy())
        assert torch.equal(found[name], torch.from_numpy(wanted)), name


def test_text_is_cut_as_the_model_s_own_tokenizer_cuts_it(file, tokenizer):
    ours = ChatTokenizer.load(str(file))
    for text in [*TEXT[:3], "x" * 3 + " 007\t\u00e9\u4e2d", "<|im_start|>user\n42<|im_end|>"]:
        assert ours.encode_text(text) == tokenizer.encode(text).ids
    prompt = ours.encode_prompt([{"role": "user", "content": "the 12th"}])
    wanted = "<|im_start|>user\nthe 12th<|im_end|>\n<|im_start|>assistant\n"
    assert list(prompt) == tokenizer.encode(wanted).ids


def test_a_file_is_converted_once_and_again_when_it_has_changed(file, folder, tokenizer, tmp_path):
    first = folder_of(str(file))
    assert first is not None
    record = json.loads((first / RECORD).read_text())
    assert record["license"] == "mit"
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    os.utime(file, ns=(1, 1))  # copied: the same bytes
    assert folder_of(str(file)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    before = read_spec(str(file)).fingerprint
    other = save_target(tmp_path / "other", seed=1, **SIZES)
    write_gguf(file, other, tokenizer)
    assert read_spec(str(file)).fingerprint != before
    assert folder_of(str(folder)) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"llama.expert_count": 8}, "has llama.expert_count = 8, which is not supported"),
        ({"llama.attention.sliding_window": 64}, "has llama.attention.sliding_window = 64"),
        ({"llama.rope.dimension_count": 8}, "llama.rope.dimension_count = 8; supported is 16"),
        ({"llama.rope.scaling.type": "longrope"}, "has the rotary scaling 'longrope'"),
        ({"tokenizer.ggml.pre": "grok-9"}, "has tokenizer.ggml.pre = 'grok-9', a way to split text that is not known"),
        ({"tokenizer.ggml.model": "rwkv"}, "has tokenizer.ggml.model = 'rwkv'; supported are 'gpt2' and 'llama'"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(fields, said, folder, tokenizer, tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    assert said in refused(write_gguf(inner / "model.gguf", folder, tokenizer, fields))


def test_other_architectures_and_tensors_are_refused(folder, tokenizer, tmp_path):
    for number, (changes, said) in enumerate(
        [
            (
                {"tensors": {"blk.0.ffn_gate_inp.weight": np.zeros((2, 2), np.float32)}},
                "'blk.0.ffn_gate_inp.weight' has no",
            ),
            ({"left_out": ("token_embd.weight",)}, "tensor 'token_embd.weight' is missing"),
            ({"tensors": {"rope_freqs.weight": np.full(8, 1.5, np.float32)}}, "none of Llama 3's"),
        ]
    ):
        inner = tmp_path / str(number)
        inner.mkdir()
        assert said in refused(write_gguf(inner / "model.gguf", folder, tokenizer, **changes))
    other = tmp_path / "gpt2"
    other.mkdir()
    writer = gguf.GGUFWriter(other / "model.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert "is of the architecture 'gpt2'; supported are llama" in refused(other / "model.gguf")


def test_a_missing_layer_is_named_when_the_target_is_loaded(folder, tokenizer, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", folder, tokenizer, left_out=("blk.1.ffn_up.weight",))
    with pytest.raises(ConfigError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"):
        Target.load(TargetConfig(model=str(file), device="cpu"))


@pytest.mark.parametrize("keep", [0, 3, 40, 5_000])
def test_a_file_that_is_cut_short_is_refused(keep, file, tmp_path):
    cut = tmp_path / "inner" / "cut.gguf"
    cut.parent.mkdir()
    cut.write_bytes(file.read_bytes()[:keep])
    assert "GGUF file that can be read" in refused(cut)


def test_llama_3_s_frequencies_become_its_parameters(tokenizer, tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    made = save_target(tmp_path / "made", rope_parameters=rope, max_position_embeddings=16_384, **SIZES)
    stock = AutoModelForCausalLM.from_pretrained(made)
    plain = 500_000.0 ** -(np.arange(0, 16, 2) / 16)
    factors = (plain / stock.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    file = write_gguf(tmp_path / "model.gguf", made, tokenizer, tensors={"rope_freqs.weight": factors})
    target = Target.load(TargetConfig(model=str(file), device="cpu"))
    torch.testing.assert_close(target.model.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)


def test_linear_scaling_is_kept(folder, tokenizer, tmp_path):
    fields = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    file = write_gguf(tmp_path / "model.gguf", folder, tokenizer, fields)
    made = folder_of(str(file))
    assert made is not None
    rope = json.loads((made / "config.json").read_text())["rope_parameters"]
    assert rope == {"rope_theta": 10_000.0, "rope_type": "linear", "factor": 4.0}
