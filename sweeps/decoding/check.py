"""Checks a sweep over decoding choices before anything starts, and finds out what its drafters support."""

import hashlib
import os
from pathlib import Path

import ray
import torch

from moray.activations.format.manifest import read_manifest
from moray.activations.format.store import CacheStore
from moray.activations.reading.token_counts import token_counts
from moray.bench.specbench import read_questions
from moray.cluster.training.resume import check_same_target
from moray.drafters.checkpoint import read_contract
from moray.drafters.loading import fingerprints_of
from moray.errors import ConfigError, DataError
from moray.provenance import sha256_of_files
from moray.targets.head import TargetHead
from moray.targets.spec import read_spec
from moray.text import ChatTokenizer
from sweeps.decoding.combinations import Limits
from sweeps.decoding.configs import TuneDecodingConfig
from sweeps.tuning.configs import LadderConfig


def num_questions(sweep: TuneDecodingConfig, limit: int | None) -> int:
    """The number of questions to ask: `limit`, or fewer if there are not that many.

    Raises:
        DataError: the file does not exist or holds no question.
    """
    return len(read_questions(sweep.questions, limit))


def sizes_of(ladder: LadderConfig, most: int) -> list[int]:
    """The number of questions on each rung: `most` on the last, and 1 / reduction of the next on each earlier one.

    Rungs with equal numbers are merged.
    """
    return sorted({max(1, most // ladder.reduction**number) for number in range(ladder.rungs)})


def limits_of(sweep: TuneDecodingConfig) -> dict[str, Limits]:
    """The limits of each drafter, by name.

    Raises:
        DataError: a folder holds no drafter.
        MismatchError: a drafter or the cache belongs to another target or tokenizer.
    """
    spec = read_spec(sweep.target.model)
    text = ChatTokenizer.load(sweep.target.model, sweep.target.template).fingerprint
    found = {}
    for name, folder in sweep.folders.items():
        if not Path(folder).is_dir():
            raise DataError(
                f"drafters names '{folder}', which is no folder: train a drafter there "
                "with python -m pipelines.distill, or name another"
            )
        contract = read_contract(Path(folder))
        contract.check_target(Path(folder), spec, text)
        head = TargetHead.outline(sweep.target, contract.drafter.num_target_layers)
        with torch.device("meta"):
            drafter = contract.drafter.build(head)
        found[name] = Limits(name, drafter.max_depth, drafter.vocabulary.size)
    if sweep.activations is not None:
        check_same_target(read_manifest(CacheStore(sweep.activations)), spec, sweep.activations, sweep.target)
    return found


def fingerprints(sweep: TuneDecodingConfig) -> dict[str, str]:
    """Fingerprints of everything that determines what is measured.

    Raises:
        DataError: a file or folder is missing.
    """
    spec = read_spec(sweep.target.model)
    found = {
        "target": spec.fingerprint,
        "text": ChatTokenizer.load(sweep.target.model, sweep.target.template).fingerprint,
        "questions": sha256_of_files([Path(sweep.questions)]),
        **{f"drafter.{name}": value for name, value in fingerprints_of(sweep.drafters).items()},
    }
    if sweep.activations is not None:
        counts = token_counts(CacheStore(sweep.activations), spec.vocab_size)
        found["token_counts"] = hashlib.sha256(counts.tobytes()).hexdigest()[:32]
    return found


def concurrency(sweep: TuneDecodingConfig) -> int:
    """The number of measurements that run at the same time.

    On a single machine without GPUs the default is one, because parallel measurements compete for memory bandwidth and
    caches, and may slow plain and speculative decoding differently.

    Raises:
        ConfigError: the resources do not suffice for a single measurement.
    """
    present = ray.cluster_resources()
    rooms = [present.get("CPU", 0.0) / sweep.cpus]
    if sweep.gpus:
        rooms.append(present.get("GPU", 0.0) / sweep.gpus)
    if min(rooms) < 1:
        raise ConfigError(
            f"a measurement needs cpus={sweep.cpus:g} and gpus={sweep.gpus:g}; there are {present.get('CPU', 0):g} "
            f"CPUs and {present.get('GPU', 0):g} GPUs: lower them, or name a cluster as ray.address"
        )
    is_shared = not sweep.gpus and not (sweep.ray.address or os.environ.get("RAY_ADDRESS"))
    return min(int(min(rooms)), sweep.max_concurrent or (1 if is_shared else int(min(rooms))))
