"""Drafters in published layouts: others compute the same from them, and a way there and back changes nothing."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import scrambled
from safetensors.torch import load_file, save_file
from tiny_batches import batch_of
from tiny_drafters import build
from tiny_targets import TinyTarget, save_chat_target
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from moray.config import validate
from moray.distill.export.config import ExportConfig, ImportDrafterConfig
from moray.distill.export.export import export_drafter
from moray.distill.export.importing import import_drafter
from moray.drafters.base import Drafter
from moray.drafters.checkpoint import load_drafter, save_drafter
from moray.drafters.config_base import BlockConfig, DrafterConfigBase
from moray.drafters.configs import Eagle3Config, EagleConfig, IndependentConfig, MedusaConfig, NgramConfig
from moray.drafters.learner import DraftView
from moray.drafters.published.folders import engine_limitations, published_form
from moray.errors import ConfigError, DataError
from moray.targets.head import TargetHead
from moray.targets.model import Target
from moray.targets.spec import TargetConfig
from moray.text import ChatTokenizer

LAYER = BlockConfig(num_heads=4, num_kv_heads=2, intermediate_size=96)
SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": 16, "layer": LAYER, "num_layers": 2}
CONFIGS: dict[str, DrafterConfigBase] = {
    "eagle3": Eagle3Config(type="eagle3", layer=LAYER),
    "eagle3, reduced": Eagle3Config(type="eagle3", layer=LAYER, hidden_layers=(0, 1, 2), draft_vocab_size=90),
    "eagle": EagleConfig(type="eagle", layer=LAYER, bias=False, reads_first_token=False),
    "medusa": MedusaConfig(type="medusa", num_heads=2, num_blocks=2),
    "medusa, reduced": MedusaConfig(type="medusa", num_heads=2, draft_vocab_size=90),
    "medusa, frozen": MedusaConfig(type="medusa", num_heads=2, projections="frozen"),
    "independent": IndependentConfig(type="independent", **SIZES),
    "independent, narrow": IndependentConfig(type="independent", **SIZES | {"hidden_size": 48, "head_dim": 12}),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> TinyTarget:
    folder = save_chat_target(tmp_path_factory.mktemp("published") / "target")
    return TinyTarget("chat", folder, Target.load(TargetConfig(model=str(folder), device="cpu")))


def made(tiny: TinyTarget, config: DrafterConfigBase) -> Drafter:
    return scrambled(build(tiny, config), 0.2)


def exported(tiny: TinyTarget, drafter: Drafter, folder: Path, name: str = "published") -> Path:
    save_drafter(folder / "run", drafter, ChatTokenizer.load(str(tiny.folder)).fingerprint)
    return export(tiny, folder / "run", folder / name)


def export(tiny: TinyTarget, drafter: Path, output: Path, **others: Any) -> Path:
    target = {"model": str(tiny.folder)}
    values = {"drafter": str(drafter), "target": target, "output": str(output), "format": "hf", **others}
    return export_drafter(validate(ExportConfig, values))


def imported(tiny: TinyTarget, source: Path, output: Path) -> Drafter:
    values = {"source": str(source), "target": {"model": str(tiny.folder)}, "output": str(output)}
    import_drafter(validate(ImportDrafterConfig, values))
    return load_drafter(output, TargetHead.of(tiny.target), ChatTokenizer.load(str(tiny.folder)).fingerprint)


def logits_of(tiny: TinyTarget, drafter: Drafter) -> list[Tensor]:
    """Of training's pass over one text, prediction by prediction."""
    batch = batch_of(tiny.target, [tiny.prompt(1, 24)], 6, drafter.needs)
    start = torch.arange(-1, 23).clamp(min=0)[None]
    with torch.no_grad():
        found = drafter(batch, DraftView(start, None)).predictions
        return [drafter.vocabulary.expand(each.score(each.hidden[0])) for each in found]


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_again_is_the_same_drafter_and_the_same_bytes(tiny, tmp_path, name):
    drafter = made(tiny, CONFIGS[name])
    folder = exported(tiny, drafter, tmp_path)
    again = imported(tiny, folder, tmp_path / "imported")
    for ours, theirs in zip(logits_of(tiny, drafter), logits_of(tiny, again), strict=True):
        assert torch.equal(ours, theirs)
    second = export(tiny, tmp_path / "imported", tmp_path / "second")
    for file in ("model.safetensors", "config.json"):
        assert (second / file).read_bytes() == (folder / file).read_bytes(), file


def rotation(config: LlamaConfig, length: int) -> tuple[Tensor, Tensor]:
    return LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])


def causal(length: int) -> Tensor:
    return torch.full((length, length), -torch.inf).triu(1)[None, None]


def llama_layer(described: dict[str, Any], tensors: dict[str, Tensor], prefix: str, width: int) -> LlamaDecoderLayer:
    """transformers' own layer with the published weights; projections may read more than the hidden size."""
    config = LlamaConfig(**{key: value for key, value in described.items() if key != "architectures"})
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0)
    for name in ("q_proj", "k_proj", "v_proj"):
        own = getattr(layer.self_attn, name)
        setattr(layer.self_attn, name, torch.nn.Linear(width, own.out_features, bias=False))
    wanted = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    left = layer.load_state_dict({k: v for k, v in wanted.items() if k != "hidden_norm.weight"}, strict=False)
    assert not left.unexpected_keys
    assert set(left.missing_keys) <= {"input_layernorm.weight"}
    return layer


def read_back(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", ["eagle3", "eagle3, reduced"])
def test_eagle3_is_what_other_engines_compute(tiny, tmp_path, name):
    """Two steps of a chain for every root, from the published tensors and with transformers' attention."""
    drafter = made(tiny, CONFIGS[name])
    described, tensors = read_back(exported(tiny, drafter, tmp_path))
    assert described["eagle_aux_hidden_state_layer_ids"] == list(drafter.hidden_layers)
    assert described["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [k - 1 for k in drafter.hidden_layers]
    layer = llama_layer(described, tensors, "midlayer.", 2 * 64)
    norm, hidden_norm = LlamaRMSNorm(64, described["rms_norm_eps"]), LlamaRMSNorm(64, described["rms_norm_eps"])
    norm.weight.data, hidden_norm.weight.data = tensors["norm.weight"], tensors["midlayer.hidden_norm.weight"]
    tokens = torch.tensor(tiny.prompt(1, 24))
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation="eager")
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True).hidden_states
        picked = [states[k] for k in described["eagle_aux_hidden_state_layer_ids"]]
        feature = F.linear(torch.cat(picked, dim=-1), tensors["fc.weight"])[:, :-1]
        embedded = model.get_input_embeddings()(tokens[None, 1:])
        both = torch.cat([layer.input_layernorm(embedded), hidden_norm(feature)], dim=-1)
        length = both.shape[1]
        attended, _ = layer.self_attn(
            both, position_embeddings=rotation(layer.self_attn.config, length), attention_mask=causal(length)
        )
        hidden = feature + attended
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        logits = F.linear(norm(hidden), tensors["lm_head.weight"])[0]
        root = 10  # drafts after it: its own hidden state is the feature of the first drafted token
        drafted = layer.input_layernorm(model.get_input_embeddings()(tokens[None, root + 2 : root + 3]))
        more = torch.cat([drafted, hidden_norm(hidden[:, root : root + 1])], dim=-1)
        seen = torch.cat([both[:, : root + 1], more], dim=1)
        turned = rotation(layer.self_attn.config, root + 2)
        last = layer.self_attn(seen, position_embeddings=turned, attention_mask=causal(root + 2))[0][:, -1:]
        second = hidden[:, root : root + 1] + last
        second = second + layer.mlp(layer.post_attention_layernorm(second))
        second_logits = F.linear(norm(second), tensors["lm_head.weight"])[0, 0]
    targets = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
    assert tensors["t2d"].nonzero()[:, 0].tolist() == targets.tolist()
    found = logits_of(tiny, drafter)
    torch.testing.assert_close(found[0][1:, targets], logits, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(found[1][root + 2, targets], second_logits, atol=2e-5, rtol=2e-5)


def test_eagle_is_what_other_engines_compute(tiny, tmp_path):
    drafter = made(tiny, CONFIGS["eagle"])
    described, tensors = read_back(exported(tiny, drafter, tmp_path))
    layer = llama_layer(described, tensors, "layers.0.", 64)
    layer.register_module("input_layernorm", torch.nn.Identity())
    tokens = torch.tensor(tiny.prompt(1, 24))
    model = AutoModelForCausalLM.from_pretrained(tiny.folder, attn_implementation="eager")
    with torch.no_grad():
        last = model(tokens[None], output_hidden_states=True).hidden_states[-1][:, :-1]
        x = F.linear(torch.cat([model.get_input_embeddings()(tokens[None, 1:]), last], dim=-1), tensors["fc.weight"])
        length = x.shape[1]
        out = layer(x, attention_mask=causal(length), position_embeddings=rotation(layer.self_attn.config, length))
        logits = model.get_output_embeddings()(out if isinstance(out, Tensor) else out[0])[0]
    torch.testing.assert_close(logits_of(tiny, drafter)[0][1:], logits, atol=5e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["medusa", "medusa, reduced", "medusa, frozen"])
def test_medusa_is_what_other_engines_compute(tiny, tmp_path, name):
    drafter = made(tiny, CONFIGS[name])
    described, tensors = read_back(exported(tiny, drafter, tmp_path))
    batch = batch_of(tiny.target, [tiny.prompt(1, 24)], 6, drafter.needs)
    known = tensors.get("token_map", torch.arange(262))
    for head, found in enumerate(logits_of(tiny, drafter)):
        x = batch.taps.hidden[-1][0]
        for block in range(described["num_hidden_layers"]):
            prefix = f"blocks.{head}.layers.{block}"
            x = x + F.silu(F.linear(x, tensors[f"{prefix}.weight"], tensors[f"{prefix}.bias"]))
        logits = F.linear(x, tensors[f"lm_heads.{0 if described['original_lm_head'] else head}.weight"])
        torch.testing.assert_close(found[head + 1 :, known], logits[: -head - 1], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["independent", "independent, narrow", "frozen and reduced"])
def test_an_independent_drafter_is_an_ordinary_model(tiny, tmp_path, name):
    reduced = IndependentConfig(type="independent", **SIZES, embeddings="frozen", draft_vocab_size=90)
    drafter = made(tiny, CONFIGS.get(name, reduced))
    folder = exported(tiny, drafter, tmp_path)
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.tensor([tiny.prompt(1, 24)])
    with torch.no_grad():
        (theirs,), (ours,) = model(tokens).logits, logits_of(tiny, drafter)
    known = ours.isfinite()
    torch.testing.assert_close(ours[known], theirs[known], atol=2e-5, rtol=2e-5)
    target = AutoModelForCausalLM.from_pretrained(tiny.folder)
    prompt = torch.tensor([tiny.prompt()])
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    assisted = target.generate(prompt, assistant_model=model, **options)
    assert torch.equal(assisted, target.generate(prompt, **options))
    assert ChatTokenizer.load(str(folder)).fingerprint == ChatTokenizer.load(str(tiny.folder)).fingerprint


def test_the_layouts_of_the_authors_are_read(tiny, tmp_path):
    """Medusa heads with names of their own, and an EAGLE head in a pickle, beside the target's embeddings."""
    drafter = made(tiny, CONFIGS["medusa"])
    form = published_form(drafter)
    authors = {}
    for name, tensor in form.tensors.items():
        kind, head, *rest = name.split(".")
        authors[f"{head}.{rest[1]}.linear.{rest[2]}" if kind == "blocks" else f"{head}.2.weight"] = tensor
    (tmp_path / "medusa").mkdir()
    torch.save(authors, tmp_path / "medusa" / "medusa_lm_head.pt")
    (tmp_path / "medusa" / "config.json").write_text(json.dumps({"medusa_num_heads": 2, "medusa_num_layers": 2}))
    again = imported(tiny, tmp_path / "medusa", tmp_path / "medusa-imported")
    assert all(torch.equal(a, b) for a, b in zip(logits_of(tiny, drafter), logits_of(tiny, again), strict=True))
    folder = exported(tiny, made(tiny, CONFIGS["eagle"]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    head = {
        "embed_tokens.weight": tiny.target.model.model.embed_tokens.weight.bfloat16(),
        "fc.bias": torch.full((64,), 0.5),
    }
    torch.save(tensors | head, folder / "pytorch_model.bin")
    assert imported(tiny, folder, tmp_path / "eagle").state_dict()["fc.bias"].tolist() == [0.5] * 64
    torch.save(tensors | {"embed_tokens.weight": torch.zeros(262, 64)}, folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"its embed_tokens.weight is not the target's"):
        imported(tiny, folder, tmp_path / "other")


FROZEN_AND_REDUCED = MedusaConfig(type="medusa", num_heads=2, projections="frozen", draft_vocab_size=90)


def test_frozen_projections_are_exported_whole(tiny, tmp_path):
    """vLLM 0.32 loads no token_map. The tokens that ours proposes have the same logits."""
    drafter = made(tiny, FROZEN_AND_REDUCED)
    folder = exported(tiny, drafter, tmp_path)
    described, tensors = read_back(folder)
    assert described["truncated_vocab_size"] == described["vocab_size"] == len(tensors["lm_heads.0.weight"]) == 262
    assert not any(name in tensors for name in ("token_map", "lm_heads.1.weight"))
    whole = logits_of(tiny, imported(tiny, folder, tmp_path / "imported"))
    for ours, theirs in zip(logits_of(tiny, drafter), whole, strict=True):
        known = ours.isfinite()
        assert 0 < known.sum() < known.numel()
        torch.testing.assert_close(ours[known], theirs[known], atol=2e-5, rtol=2e-5)


def test_export_lists_what_vllm_cannot_load(tiny, tmp_path):
    whole, own = CONFIGS["medusa"], CONFIGS["medusa, reduced"]
    assert engine_limitations(whole) == engine_limitations(CONFIGS["eagle"]) == []
    for config in (FROZEN_AND_REDUCED, CONFIGS["eagle"].model_copy(update={"draft_vocab_size": 90})):
        (ignored,) = engine_limitations(config)
        assert "scores the whole vocabulary" in ignored
    (limit,) = engine_limitations(own)
    assert "vLLM 0.32 cannot load" in limit
    card = (exported(tiny, made(tiny, own), tmp_path) / "README.md").read_text()
    assert limit in card
    assert "vllm serve" not in card


def test_a_shared_projection_of_another_target_is_refused(tiny, tmp_path):
    folder = exported(tiny, made(tiny, CONFIGS["medusa, frozen"]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_heads.0.weight"] += 1.0
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"lm_heads\.0\.weight is not the target's lm_head"):
        imported(tiny, folder, tmp_path / "imported")


class _Command:
    def __reduce__(self):
        return (Path("executed").touch, ())


def test_a_pickle_is_never_executed(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": _Command()}))
    with pytest.raises(DataError, match="has damaged weights"):
        imported(tiny, tmp_path, tmp_path / "out")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (EagleConfig(type="eagle", layer=LAYER, reads_first_token=False), "fc has a bias, .* drafter.bias=false"),
        (EagleConfig(type="eagle", layer=LAYER, bias=False), "it reads the first token; train .*reads_first_token"),
        (IndependentConfig(type="independent", **SIZES, draft_vocab_size=90), "its own vocabulary projection has 90"),
        (NgramConfig(type="ngram"), "drafter.type ngram: other engines run eagle3, eagle, medusa and independent"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(tiny, config, message):
    with pytest.raises(ConfigError, match=message):
        published_form(build(tiny, config))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"vocab_size": 5}, ConfigError, "has vocab_size 5, the target"),
        ({"hidden_size": 32}, ConfigError, "has hidden_size 32, the target 64"),
        ({"rope_theta": 5.0}, ConfigError, "has rope_theta 5, the target"),
        ({"norm_before_residual": True}, DataError, "has norm_before_residual True; False is accepted"),
        ({"hidden_act": "gelu"}, DataError, "has hidden_act 'gelu'; 'silu' is accepted"),
        ({"rope_scaling": {"rope_type": "llama3"}}, DataError, "rotary embedding of type 'llama3'"),
        ({"rms_norm_eps": "abc"}, DataError, "its config.json cannot be used"),
        ({"rms_norm_eps": 0.5}, ConfigError, "has rms_norm_eps 0.5, the target"),
        ({"num_attention_heads": "4"}, DataError, "has num_attention_heads '4'; a whole number"),
        ({"num_attention_heads": 0}, DataError, "has num_attention_heads 0; a whole number from 1"),
        ({"num_key_value_heads": 3}, DataError, "its config.json cannot be used"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, DataError, r"layer_ids \[1, 2\]; three numbers are accepted"),
        ({"draft_vocab_size": 1}, DataError, "its config.json cannot be used"),
    ],
)
def test_a_drafter_of_another_kind_or_target_is_refused(tiny, tmp_path, change, error, message):
    folder = exported(tiny, made(tiny, CONFIGS["eagle3"]), tmp_path)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | change))
    with pytest.raises(error, match=message):
        imported(tiny, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damaged_folders_are_refused_by_tensor(tiny, tmp_path):
    folder = exported(tiny, made(tiny, CONFIGS["eagle3"]), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for changed, message in (
        ({"more.weight": torch.zeros(1)}, "has tensor 'more.weight', which no drafter of ours has"),
        ({"d2t": torch.full_like(tensors["d2t"], 1)}, "its d2t reorders the whole vocabulary"),
        ({"midlayer.self_attn.q_proj.weight": torch.zeros(3, 3)}, "its tensors do not have the sizes"),
        ({"norm.weight": torch.zeros(3)}, r"tensor 'norm.weight' has the shape \[3\]"),
    ):
        save_file(tensors | changed, folder / "model.safetensors")
        with pytest.raises(DataError, match=message):
            imported(tiny, folder, tmp_path / "out")
    del tensors["norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DataError, match=r"has no tensor 'norm.weight'"):
        imported(tiny, folder, tmp_path / "out")
    save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    with pytest.raises(DataError, match="is no drafter of a known layout"):
        imported(tiny, folder, tmp_path / "out")


def test_the_card_says_how_engines_serve_it_and_an_export_is_replaced(tiny, tmp_path):
    folder = exported(tiny, made(tiny, CONFIGS["eagle3"]), tmp_path)
    card = (folder / "README.md").read_text()
    assert '"method": "eagle3"' in card
    assert "--speculative-algorithm EAGLE3" in card
    assert "draft-model" in card.split("---")[1]
    export(tiny, tmp_path / "run", folder)
    exported(tiny, made(tiny, CONFIGS["medusa"]), tmp_path / "other")
    with pytest.raises(DataError, match="holds an export of another drafter"):
        export(tiny, tmp_path / "other" / "run", folder)
