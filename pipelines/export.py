"""Export a trained drafter as a Hugging Face style folder.

    python -m pipelines.export configs/targets/demo.yaml drafter=runs/demo/moa output=runs/demo/moa-export

The folder holds everything a drafter replica needs, including the target's frozen head. pipelines.evaluate accepts it
in place of the training run's folder.
"""

from pathlib import Path

from moray.config import run_entry_point
from moray.distill.export.config import ExportConfig


def main(config: ExportConfig) -> None:
    """Check that the drafter belongs to the target, then write the folder."""
    from moray.distill.export.export import export_drafter
    from moray.drafters.checkpoint import read_contract
    from moray.drafters.published.folders import engine_limitations
    from moray.progress import Progress

    with Progress(f"export {config.drafter}"):
        folder = export_drafter(config)
    size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
    print(f"exported: {folder} ({size:,.1f} MiB)")
    if config.format == "hf":
        for line in engine_limitations(read_contract(Path(config.drafter)).drafter):
            print(f"warning: {line}")


CONFIG = ExportConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
