"""OpenVINO GenAI: plainly, with prompt lookup, or with a draft model."""

# pyright: reportMissingImports=false

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from moray.bench.peers.answering import Answer, Row, Settings, answer_from

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


def load(settings: Settings) -> tuple[str, Answer]:
    """One pipeline for the one row."""
    (row,) = settings.rows
    options = {
        "INFERENCE_NUM_THREADS": settings.threads,
        "INFERENCE_PRECISION_HINT": _PRECISIONS[settings.dtype],
        "KV_CACHE_PRECISION": _PRECISIONS[settings.dtype],
    }
    if row.drafter == "prompt-lookup":
        options["prompt_lookup"] = True
    elif row.drafter is not None:
        options["draft_model"] = openvino_genai.draft_model(_exported(row.drafter, f"{settings.work}/drafter"), "CPU")
    pipeline = openvino_genai.LLMPipeline(_exported(settings.model, settings.work), "CPU", **options)
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.stop_token_ids = set(settings.eos_ids)
    config.apply_chat_template = False
    if row.drafter is not None:
        config.num_assistant_tokens = row.depth
    if row.drafter == "prompt-lookup":
        config.max_ngram_size = 4

    def answer(_: Row, prompt: list[int], max_new_tokens: int) -> list[int]:
        config.max_new_tokens = max_new_tokens
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, len(prompt)), dtype=np.int64))
        output = pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config)
        return [int(token) for token in output.tokens[0]]

    return openvino_genai.__version__, answer


def _exported(model: str, work: str) -> str:
    """The model as OpenVINO reads it, in float32 weights; it runs them in the precision it is told."""
    folder = Path(work) / "openvino"
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
