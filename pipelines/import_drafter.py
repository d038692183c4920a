"""Import a published drafter: EAGLE, EAGLE-2, EAGLE-3, Medusa, MoA, or a Llama model with few layers.

    python -m pipelines.import_drafter configs/targets/smollm2.yaml source=FOLDER output=runs/smollm2/imported

A MoA drafter also needs target_layers, the number of the target's last layers that it runs (N).
Afterwards it is decoded, served, evaluated and trained further (init.drafter) like a drafter of our own.
"""

from moray.config import run_entry_point
from moray.distill.export.config import ImportDrafterConfig


def main(config: ImportDrafterConfig) -> None:
    """Read the folder, check that it fits the target, and write a drafter's folder."""
    from moray.distill.export.importing import import_drafter
    from moray.progress import Progress

    with Progress(f"import {config.source}"):
        drafter = import_drafter(config)
    print(f"imported: {config.output} (type {drafter.implementation()[1].lower()})")


CONFIG = ImportDrafterConfig

if __name__ == "__main__":
    run_entry_point(CONFIG, __doc__ or "", main)
