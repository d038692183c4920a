"""vLLM's CPU build: plain, with its n-gram drafter, or with a draft model."""

# pyright: reportMissingImports=false

import os

from moray.bench.peers.answering import Answer, PeerRow, Prepare, Settings, answer_from


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
            disable_log_stats=True,
        )

        def answer(prompt: list[int], max_new_tokens: int) -> list[int]:
            params = vllm.SamplingParams(
                temperature=0.0, max_tokens=max_new_tokens, stop_token_ids=settings.eos_ids, detokenize=False
            )
            (output,) = engine.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
            return list(output.outputs[0].token_ids)

        return answer

    return vllm.__version__, prepare


def _speculation(row: PeerRow) -> dict[str, object] | None:
    if row.drafter is None:
        return None
    if row.drafter == "prompt-lookup":
        return {"method": "ngram", "num_speculative_tokens": row.depth, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
    return {"method": "draft_model", "model": row.drafter, "num_speculative_tokens": row.depth}


if __name__ == "__main__":
    answer_from(load)
