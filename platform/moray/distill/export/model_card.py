"""The model card of an exported drafter: what it is, how to use it, its training data and its evaluation."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from moray.distill.export.config import ExportConfig
from moray.distill.tracking.metrics import read_metrics, read_validation
from moray.drafters.base import Drafter
from moray.drafters.checkpoint import drafter_files
from moray.drafters.contract import Contract
from moray.drafters.published.folders import engine_limitations, engines_can_load
from moray.errors import DataError
from moray.explain import one_line
from moray.provenance import RUN_FILE, read_json, read_run_yaml, sha256_of_files
from moray.text import fingerprint_parts


def _vllm(method: str) -> str:
    """vLLM's command for a drafter of this method."""
    settings = {"method": method, "model": "THIS_FOLDER", "num_speculative_tokens": "DEPTH"}
    text = json.dumps(settings).replace('"DEPTH"', "DEPTH")
    return f"```bash\nvllm serve TARGET --speculative-config '{text}'\n```\n"


def _sglang(algorithm: str) -> str:
    """SGLang's command for a drafter of this algorithm, as a chain."""
    return (
        f"```bash\npython -m sglang.launch_server --model-path TARGET --speculative-algorithm {algorithm} \\\n"
        "  --speculative-draft-model-path THIS_FOLDER --speculative-num-steps 5 --speculative-eagle-topk 1 \\\n"
        "  --speculative-num-draft-tokens 6\n```\n"
    )


_ENGINES = {
    "eagle3": {"vllm": _vllm("eagle3"), "sglang": _sglang("EAGLE3")},
    "eagle": {"vllm": _vllm("eagle")},
    "medusa": {"vllm": _vllm("medusa")},
    "independent": {
        "transformers": "```python\nfrom transformers import AutoModelForCausalLM\n\n"
        'draft = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")\n'
        "target.generate(**inputs, assistant_model=draft)\n```\n",
        "vllm": _vllm("draft_model"),
        "sglang": _sglang("STANDALONE"),
    },
}
"""By type of drafter: the engines that run it, with their commands."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(config: ExportConfig, contract: Contract, drafter: Drafter, exported: Path) -> str:
    """README.md with the hub's front matter.

    Args:
        config: of the export.
        contract: of the drafter.
        drafter: the loaded drafter.
        exported: the folder that is being written; it already holds the weights.

    Raises:
        DataError: `config.report` is not of this drafter.
    """
    folder = Path(config.drafter)
    kind = contract.drafter.type
    base = config.base_model or (config.target.model if _is_hub_name(config.target.model) else None)
    front: dict[str, Any] = {"license": config.license, "base_model": base, "library_name": "moray"}
    engines = list(_ENGINES[kind]) if config.format == "hf" and engines_can_load(drafter.config) else []
    tags = ["speculative-decoding", "draft-model" if engines else "drafter", kind, *engines, "moray"]
    front |= {"pipeline_tag": "text-generation", "tags": tags}
    front = {key: value for key, value in front.items() if value is not None}
    sections = [
        f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---\n",
        f"# {Path(config.output).name}: a {kind} drafter for {base or Path(config.target.model).name}\n",
        "It proposes tokens that the target then verifies: the output is the target's own, only sooner.\n",
        _facts(config, contract, drafter),
        _usage(config, base) if config.format == "moray" else _engines(config, drafter, base),
        _training(folder),
        _validation(folder),
        _evaluation(folder, config.report),
    ]
    return "\n".join(filter(None, sections))


def _is_hub_name(model: str) -> bool:
    return _HUB_NAME.fullmatch(model) is not None and not Path(model).exists()


def _facts(config: ExportConfig, contract: Contract, drafter: Drafter) -> str:
    target, text = contract.target, fingerprint_parts(contract.text_fingerprint)
    has_head = config.include_head and config.format == "moray"
    head = f"with it, {drafter.head.num_layers} of its last layers included" if has_head else "not included"
    rows = {
        "trainable parameters": f"{drafter.num_parameters:,}",
        "draft vocabulary": f"{drafter.vocabulary.size:,} of {target.vocab_size:,} tokens",
        "dtype": config.dtype or "float32",
        "taps": f"keys and values of {len(contract.taps.kv_layers)} layers, hidden states at depths "
        f"{list(contract.taps.hidden_depths)}",
        "target": f"{target.family}, {target.num_layers} layers of width {target.hidden_size}",
        "target's head": head,
        "target's fingerprint": f"`{target.fingerprint}`",
        "tokenizer's fingerprint": f"`{text['tokenizer']}`",
        "chat template's fingerprint": f"`{text['chat template']}`",
        "RoPE": f"theta {target.rope_theta:g}, scaling {target.rope_scaling}",
    }
    return _table(["", ""], [[name, value] for name, value in rows.items()])


def _usage(config: ExportConfig, base: str | None) -> str:
    target = base or "FOLDER_OF_THE_TARGET"
    alone = (
        "\nIn a drafter replica, which never opens the target's folder:\n\n```python\nfrom pathlib import Path\n\n"
        'from moray.distill.export.export import load_exported\n\ndrafter = load_exported(Path("THIS_FOLDER"))\n```\n'
    )
    return (
        "## Use\n\nMeasure it beside plain decoding, or pair it with the target in your own code "
        "(`moray.drafters.loading.load_drafters`):\n\n```bash\npython -m pipelines.evaluate "
        f"target.model={target} 'drafters=[THIS_FOLDER]' \\\n  'trees=[{{type: chain, depth: 5}}]' "
        f"questions=QUESTIONS.jsonl output=OUTPUT\n```\n{alone if config.include_head else ''}"
    )


def _engines(config: ExportConfig, drafter: Drafter, base: str | None) -> str:
    """How other engines serve the target with this drafter."""
    kind: Any = drafter.config
    target = base or "FOLDER_OF_THE_TARGET"
    depth = str(drafter.max_depth or 5)  # Medusa proposes with all its heads
    parts = [
        f"{name}:\n\n{command.replace('TARGET', target).replace('DEPTH', depth)}"
        for name, command in (_ENGINES[kind.type].items() if engines_can_load(kind) else ())
    ]
    limits = "".join(f"- {line}\n" for line in engine_limitations(kind))
    return "## Use\n\n" + "\n".join(parts) + (f"\nLimitations:\n\n{limits}" if limits else "")


def _training(folder: Path) -> str:
    if not (folder / RUN_FILE).is_file():
        return ""
    run = read_run_yaml(folder)
    last = (read_metrics(folder) or [{}])[-1]
    rows = [
        ["updates", f"{last['step']:,}" if "step" in last else "unknown"],
        ["tokens", f"{int(last['tokens']):,}" if "tokens" in last else "unknown"],
        ["seed", str(run.get("seed"))],
        ["training data (cached activations)", f"`{run['fingerprints'].get('training_data', 'unknown')}`"],
        ["code", f"`{(run.get('git') or {}).get('sha', 'unknown')}`"],
        ["torch", str(run["versions"].get("torch"))],
    ]
    return f"## Training\n\n{_table(['', ''], rows)}"


def _validation(folder: Path) -> str:
    rows = read_validation(folder)
    if not rows:
        return ""
    names = ["step", "loss", "real_tau", "simulated_tau", "tau_gap", "chats"]
    cells = [[f"{row[name]:.3f}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    return (
        "## Validation\n\nHeld-out chats, greedy chains: tokens per target pass in decoding (real) and as the training "
        f"pass predicts them on the same answers (simulated).\n\n{_table(names, cells)}"
    )


def _evaluation(folder: Path, given: str | None) -> str:
    """Rows of an evaluation's report for exactly these weights."""
    places = [Path(given)] if given else [folder / "report.json", folder.parent / "report.json"]
    digest = sha256_of_files(drafter_files(folder))
    for path in places:
        if given is None and not path.is_file():
            continue
        report = read_json(path)
        try:
            known = report["settings"]["fingerprints"]
            names = {key.partition(".")[2] for key, value in known.items() if value == digest}
            found = [row for row in report["rows"] if row["drafter"] in names]
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(f"report '{path}' is no report of pipelines.evaluate: {one_line(str(error))}") from None
        if found:
            cells = [
                [
                    row["tree"],
                    f"{row['temperature']:g}",
                    *(_figure(row.get(key)) for key in ("tau", "speedup_vs_plain")),
                    ", ".join(f"{share:.2f}" for share in row.get("acceptance_by_position") or ()) or "-",
                ]
                for row in found
            ]
            where = report["machine"]
            place = ", ".join([f"{where['cores']} x {where['cpu']}", *where["gpus"]])
            table = _table(
                ["tree", "temperature", "tau", "speed-up over plain decoding", "accepted at depth 1, 2, ..."], cells
            )
            return f"## Evaluation\n\nOn {place}.\n\n{table}"
    if given:
        raise DataError(f"report '{given}' measures no drafter with these weights; give another or leave it out")
    return ""


def _figure(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, (int, float)) else "-"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
