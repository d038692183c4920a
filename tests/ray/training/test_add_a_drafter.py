"""The drafter of docs/developer/add-a-drafter.md, as a package of its own: found, trained, saved, decoded with and
served, and swept with Ray Tune."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "developer" / "add-a-drafter.md"
MAX_LINES = 100

RUN = """
import asyncio
import sys
from pathlib import Path

import yaml
from rich.console import Console

target_folder, cache, questions, output = sys.argv[1:]

from moray import Target, generate, load_drafter
from moray.cluster.configs import RayConfig
from moray.cluster.session import ray_session
from moray.cluster.training.configs import DistillConfig
from moray.cluster.training.distill import distill
from moray.config import validate
from moray.decoding.request import Request
from moray.distill.tracking.metrics import read_metrics
from serve.config import ServeConfig
from serve.target import TargetReplica
from sweeps.trainings.configs import SweepConfig
from sweeps.trainings.run import run_sweep
from moray.trees.shapes import ChainShape, DynamicShape

values = {
    "target": {"model": target_folder},
    "activations": cache,
    "output": output,
    "drafter": {"type": "recurrent", "state_size": 32},
    "losses": {"feature": 0.0, "kl": 1.0, "total_variation": 0.5},
    "optim": {"type": "adamw", "lr": 3e-3},
    "schedule": {"type": "linear", "warmup_steps": 2},
    "train": {"max_steps": 40, "batch_tokens": 1024, "save_steps": 20, "logging_steps": 1},
    "workers": {"num_workers": 1},
}
shared = Path(output).with_suffix(".yaml")
shared.write_text(yaml.safe_dump({key: value for key, value in values.items() if key != "output"}))
sweep = {
    "distill": [str(shared)],
    "space": {"drafter.state_size": [16]},
    "ladder": {"rungs": 1},
    "training_tokens": 8 * 1024,
    "decoding": {"questions": questions, "tree": {"type": "adaptive", "depth": 3}, "max_new_tokens": 12, "rounds": 1},
    "confirm": {"finalists": 1, "seeds": 1},
    "output": output + "-sweep",
}
with ray_session(RayConfig(num_cpus=3)):
    folder = distill(validate(DistillConfig, values))
    summary = run_sweep(validate(SweepConfig, sweep), Console(stderr=True))
assert [trial["state"] for trial in summary["trials"]] == ["finished"], summary["trials"]
assert summary["winner"]["choices"]["drafter.state_size"] == 16
losses = [row["loss"] for row in read_metrics(folder)]
assert sum(losses[-3:]) < 0.95 * sum(losses[:3]), losses

target = Target.load(target_folder, device="cpu")
drafter = load_drafter(folder, target)
plain = generate(target, None, "Why is the sky blue?", max_new_tokens=40)
for tree in (ChainShape(type="chain", depth=4), DynamicShape(type="dynamic", depth=3, breadth=3, nodes=8)):
    for sampling in ({}, {"temperature": 0.8, "seed": 1}):
        expected = generate(target, None, "Why is the sky blue?", max_new_tokens=40, **sampling)
        answer = generate(target, drafter, "Why is the sky blue?", max_new_tokens=40, tree=tree, **sampling)
        assert answer.generation.tokens == expected.generation.tokens
        assert max(answer.generation.drafted) > 0

settings = {
    "target": {"model": target_folder, "device": "cpu"},
    "drafters": {"recurrent": str(folder)},
    "placement": "in_process",
    "engine": {"tree": {"type": "chain", "depth": 3}, "kv_cache_tokens": 1024, "max_num_seqs": 2},
}

async def served():
    replica = TargetReplica(validate(ServeConfig, settings))
    prompt = target.tokenizer.encode_prompt([{"role": "user", "content": "Why is the sky blue?"}])
    events = [event async for event in replica.generate(Request(prompt=tuple(prompt), max_new_tokens=20))]
    return [token for event in events for token in getattr(event, "tokens", ())]

assert asyncio.run(served()) == plain.generation.tokens[:20]

print("done")
"""


def blocks() -> dict[str, str]:
    """The package's files, by name."""
    text, files = PAGE.read_text(encoding="utf-8"), {}
    for block in re.finditer(r"```(?:toml|python)\n(.*?)```", text, re.S):
        *_, name = re.findall(r"`([\w/]+\.(?:py|toml))`", text[: block.start()])
        files[name] = block.group(1)
    return files


def install(site: Path) -> None:
    """What `pip install` leaves: the modules, and metadata with the entry points."""
    files = blocks()
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    package = site / "recurrent_drafter"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, code in files.items():
        (site / name).write_text(code, encoding="utf-8")
    metadata = site / f"recurrent_drafter-{project['version']}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1\n")
    ((group, entries),) = project["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in entries.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))


def run(site: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In a process that finds the package; the tests' own has read its drafters already."""
    path = os.pathsep.join(map(str, (site, ROOT / "platform", ROOT)))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )


def test_the_page_is_short_and_complete():
    files = blocks()
    assert set(files) == {"pyproject.toml", "recurrent_drafter/config.py", "recurrent_drafter/drafter.py"}
    assert sum(code.count("\n") for code in files.values()) < MAX_LINES


@pytest.mark.timeout(900)
def test_the_page_s_drafter_is_trained_decoded_with_served_and_swept(
    tiny_target: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    install(tmp_path / "site")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question_id": "1", "category": "chat", "turns": ["Why?"]}\n')
    made = run(tmp_path / "site", RUN, str(tiny_target), str(tiny_cache), str(questions), str(tmp_path / "recurrent"))
    assert made.returncode == 0, made.stderr[-3000:]
    assert made.stdout.endswith("done\n")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("raise RuntimeError('no such library')", "RuntimeError: no such library"),
        ("RecurrentConfig = dict", "is no subclass of TrainableBase or ReadyBase"),
        (
            "from moray.drafters.config_base import ReadyBase\nclass RecurrentConfig(ReadyBase):\n    type: str = 'r'",
            'needs the field `type: Literal["recurrent"]`',
        ),
    ],
    ids=["broken", "no drafter", "no name"],
)
def test_a_package_that_cannot_be_used_is_left_out_with_a_warning(tmp_path: Path, config: str, reason: str) -> None:
    install(tmp_path)
    (tmp_path / "recurrent_drafter" / "config.py").write_text(config, encoding="utf-8")
    code = "from moray.drafters.configs import DRAFTER_CONFIG; print(DRAFTER_CONFIG.validate_python({'type': 'ngram'}))"
    made = run(tmp_path, code)
    assert made.returncode == 0, made.stderr
    assert "drafter type 'recurrent' of package 'recurrent-drafter' is left out: " in made.stderr
    assert reason in made.stderr


def test_a_package_may_not_take_the_name_of_one_of_moray_s_drafters(tmp_path: Path) -> None:
    install(tmp_path)
    (entries,) = tmp_path.glob("*.dist-info/entry_points.txt")
    entries.write_text("[moray.drafters]\nmoa = recurrent_drafter.config:RecurrentConfig\n")
    made = run(tmp_path, "from moray.drafters.configs import MoAConfig; print(MoAConfig.__name__)")
    assert made.returncode == 0, made.stderr
    assert "there is a drafter type 'moa' already: rename it" in made.stderr
