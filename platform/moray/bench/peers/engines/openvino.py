"""OpenVINO GenAI: plain, with prompt lookup, with a draft model, or with an EAGLE-3 head."""

# pyright: reportMissingImports=false

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from moray.bench.peers.answering import Answer, Drafted, PeerRow, Prepare, Settings, answer_from

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}
_EAGLE3, _LAYER_IDS = "LlamaForCausalLMEagle3", "eagle_aux_hidden_state_layer_ids"


def load(settings: Settings) -> tuple[str, Prepare]:
    """Create one pipeline per row."""

    def prepare(row: PeerRow) -> Answer:
        pipeline, config = _pipeline(row, settings), _config(row, settings)

        def answer(prompt: list[int], max_new_tokens: int) -> Drafted:
            config.max_new_tokens = max_new_tokens
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            mask = openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
            output = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
            tokens = [int(token) for token in output.tokens[0]]
            if row.drafter in (None, "prompt-lookup"):  # it does not say which passes had something looked up
                return Drafted(tokens)
            sizes = list(output.perf_metrics.raw_metrics.m_batch_sizes)[1:]  # tokens of each pass but the prompt's
            return Drafted(tokens, len(sizes), sum(sizes) - len(sizes))

        return answer

    return openvino_genai.__version__, prepare


def _pipeline(row: PeerRow, settings: Settings) -> openvino_genai.LLMPipeline:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False  # always process the full prompt
    scheduler.max_num_seqs = 1
    scheduler.cache_size = 1
    options = {
        "INFERENCE_NUM_THREADS": settings.threads,
        "INFERENCE_PRECISION_HINT": _PRECISIONS[settings.dtype],
        "KV_CACHE_PRECISION": _PRECISIONS[settings.dtype],
        "scheduler_config": scheduler,
    }
    if row.drafter == "prompt-lookup":
        options["prompt_lookup"] = True
    elif row.drafter is not None:
        options["draft_model"] = openvino_genai.draft_model(_exported(row.drafter, settings.work), "CPU")
    return openvino_genai.LLMPipeline(_exported(settings.model, settings.work), "CPU", **options)


def _config(row: PeerRow, settings: Settings) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.stop_token_ids = set(settings.eos_ids)
    config.apply_chat_template = False
    if row.drafter is not None:
        config.num_assistant_tokens = row.depth
    if row.drafter == "prompt-lookup":
        config.max_ngram_size = 4
    return config


def _config_of(folder: str) -> dict[str, Any]:
    return json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


def _is_eagle3(folder: str) -> bool:
    return _config_of(folder).get("architectures") == [_EAGLE3]


def _name_layers(made: Path, drafter: str) -> None:
    """Tell GenAI which hidden states an EAGLE-3 head reads: its ids count from 0, ours the layers that have run.

    Without them it takes the outputs of the layers 2, half of them, and all but 3, one later than other engines do.
    """
    config = _config_of(drafter)
    inner = config.get("eagle_config", {}).get(_LAYER_IDS)
    ids = inner or [number - 1 for number in config.get(_LAYER_IDS, [])]
    if not ids:
        return
    model = openvino.Core().read_model(made / "openvino_model.xml")
    model.set_rt_info(", ".join(map(str, ids)), ["hidden_layers_list"])
    renamed = made / "with-layers.xml"
    openvino.save_model(model, renamed, compress_to_fp16=False)
    del model  # it maps the file that is replaced
    renamed.replace(made / "openvino_model.xml")
    renamed.with_suffix(".bin").replace(made / "openvino_model.bin")


def _exported(model: str, work: str) -> str:
    """Export the model to OpenVINO's format with float32 weights; the run-time precision is set separately."""
    files = [Path(model) / "config.json", *sorted(Path(model).glob("*.safetensors"))]
    stamps = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(repr(stamps).encode()).hexdigest()[:16]  # a new one for an export that was replaced
    folder = Path(work) / f"openvino-{name}"
    if not folder.is_dir():
        made = folder.with_name(f"{folder.name}.tmp")
        shutil.rmtree(made, ignore_errors=True)
        tool = Path(sys.executable).with_name("optimum-cli")
        words = [
            "export",
            "openvino",
            "--model",
            model,
            "--task",
            "text-generation-with-past",
            "--weight-format",
            "fp32",
        ]
        if _is_eagle3(model):  # makes optimum-intel load its own code for EAGLE-3; our exports contain none
            words.append("--trust-remote-code")
        subprocess.run([str(tool), *words, str(made)], check=True)
        if _is_eagle3(model):
            _name_layers(made, model)
        made.rename(folder)
    return str(folder)


if __name__ == "__main__":
    answer_from(load)
