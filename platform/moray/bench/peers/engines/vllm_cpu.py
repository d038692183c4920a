"""vLLM's CPU build: plain, with its n-gram drafter, or with a drafter of any kind that it reads."""

# pyright: reportMissingImports=false

import json
import os
from pathlib import Path

from moray.bench.peers.answering import Answer, Drafted, PeerRow, Prepare, Settings, answer_from

_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"


def load(settings: Settings) -> tuple[str, Prepare]:
    """Create one engine per row, because vLLM fixes the speculation settings at start-up."""
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{settings.threads - 1}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single process, to be stopped while other engines are measured
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    import vllm

    def prepare(row: PeerRow) -> Answer:
        engine = vllm.LLM(
            settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_length,
            max_num_seqs=1,
            speculative_config=_speculation(row),
            enable_prefix_caching=False,
            generation_config="vllm",  # ignore the model's own defaults, such as repetition penalties
            disable_log_stats=row.drafter is None,  # drafts are counted with them
        )

        def counts() -> tuple[int, int]:
            found = {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
            return int(found.get(_DRAFTS, 0)), int(found.get(_ACCEPTED, 0))

        def answer(prompt: list[int], max_new_tokens: int) -> Drafted:
            before = (0, 0) if row.drafter is None else counts()
            params = vllm.SamplingParams(
                temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=settings.eos_ids, detokenize=False
            )
            (output,) = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            tokens = list(output.outputs[0].token_ids)
            if row.drafter is None:
                return Drafted(tokens)
            drafts, accepted = counts()
            return Drafted(tokens, drafts - before[0], accepted - before[1])

        return answer

    return vllm.__version__, prepare


def _speculation(row: PeerRow) -> dict[str, object] | None:
    if row.drafter is None:
        return None
    if row.drafter == "prompt-lookup":
        return {"method": "ngram", "num_speculative_tokens": row.depth, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    return {"method": _method(Path(row.drafter)), "model": row.drafter, "num_speculative_tokens": row.depth}


def _method(folder: Path) -> str:
    """vLLM's name for a kind of drafter, by what `pipelines.export format=hf` writes."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") == "medusa":
        return "medusa"
    if config.get("architectures") == ["LlamaForCausalLMEagle3"]:
        return "eagle3"
    with (folder / "model.safetensors").open("rb") as file:  # an EAGLE calls itself a Llama, but has an `fc`
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return "eagle" if "fc.weight" in header else "draft_model"


if __name__ == "__main__":
    answer_from(load)
