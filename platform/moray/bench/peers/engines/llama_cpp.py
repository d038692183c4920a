"""llama.cpp through llama-cpp-python: plain, or with its prompt lookup."""

# pyright: reportMissingImports=false

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from moray.bench.peers.answering import Answer, PeerRow, Prepare, Settings, answer_from

_CACHE_TYPES = {"float32": llama_cpp.GGML_TYPE_F32, "bfloat16": llama_cpp.GGML_TYPE_F16}
"""Number formats of the KV cache; llama.cpp's default is float16."""


def load(settings: Settings) -> tuple[str, Prepare]:
    """Create one context per row; all of them memory-map the same file."""

    def prepare(row: PeerRow) -> Answer:
        context = _context(row, settings)

        def answer(prompt: list[int], max_new_tokens: int) -> list[int]:
            context.reset()
            tokens: list[int] = []
            for token in context.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0, reset=True):
                tokens.append(int(token))
                if token in settings.eos_ids or len(tokens) == max_new_tokens:
                    break
            return tokens

        return answer

    return f"llama-cpp-python {llama_cpp.__version__}", prepare


def _context(row: PeerRow, settings: Settings) -> llama_cpp.Llama:
    draft = None if row.drafter is None else LlamaPromptLookupDecoding(num_pred_tokens=row.depth)
    return llama_cpp.Llama(
        model_path=settings.model,
        n_ctx=settings.max_length + row.depth,  # drafts may run past the last token
        n_batch=512,
        n_threads=settings.threads,
        n_threads_batch=settings.threads,
        type_k=_CACHE_TYPES[settings.dtype],
        type_v=_CACHE_TYPES[settings.dtype],
        draft_model=draft,
        verbose=False,
    )


if __name__ == "__main__":
    answer_from(load)
