"""OpenVINO GenAI: plain, with prompt lookup, or with a draft model."""

# pyright: reportMissingImports=false

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from moray.bench.peers.answering import Answer, PeerRow, Prepare, Settings, answer_from

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def load(settings: Settings) -> tuple[str, Prepare]:
    """Create one pipeline per row."""

    def prepare(row: PeerRow) -> Answer:
        pipeline, config = _pipeline(row, settings), _config(row, settings)

        def answer(prompt: list[int], max_new_tokens: int) -> list[int]:
            config.max_new_tokens = max_new_tokens
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            mask = openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
            output = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
            return [int(token) for token in output.tokens[0]]

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


def _exported(model: str, work: str) -> str:
    """Export the model to OpenVINO's format with float32 weights; the run-time precision is set separately."""
    name = hashlib.sha256(str(Path(model).resolve()).encode()).hexdigest()[:16]
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
        subprocess.run([str(tool), *words, str(made)], check=True)
        made.rename(folder)
    return str(folder)


if __name__ == "__main__":
    answer_from(load)
