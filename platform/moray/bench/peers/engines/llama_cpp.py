"""llama.cpp through llama-cpp-python: plainly, or with its prompt lookup."""

# pyright: reportMissingImports=false

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from moray.bench.peers.answering import Answer, Row, Settings, answer_from


def load(settings: Settings) -> tuple[str, Answer]:
    """A context per row over one file, which is mapped and not copied."""
    contexts = {row: _context(row, settings) for row in settings.rows}

    def answer(row: Row, prompt: list[int], max_new_tokens: int) -> list[int]:
        context = contexts[row]
        context.reset()
        tokens: list[int] = []
        for token in context.generate(prompt, top_k=1, temp=0.0, repeat_penalty=1.0, reset=True):
            tokens.append(int(token))
            if token in settings.eos_ids or len(tokens) == max_new_tokens:
                break
        return tokens

    return f"llama-cpp-python {llama_cpp.__version__}", answer


def _context(row: Row, settings: Settings) -> llama_cpp.Llama:
    draft = None
    if row.drafter is not None:
        draft = LlamaPromptLookupDecoding(num_pred_tokens=row.depth)
    return llama_cpp.Llama(
        model_path=settings.model, n_ctx=settings.max_length + row.depth, n_batch=512, n_threads=settings.threads,
        n_threads_batch=settings.threads, draft_model=draft, verbose=False,
    )  # fmt: skip


if __name__ == "__main__":
    answer_from(load)
