"""Implements `verify`: hashes files with a progress bar, runs a sample again, prints each problem, and repairs."""

from typing import Any

import yaml

from moray.activations.format.store import CacheStore
from moray.activations.maintenance.verify import Findings, repair, verify_files
from moray.cluster.caching.upkeep import VerifyCacheConfig, caching_command
from moray.errors import ConfigError, DamagedError, DataError
from moray.progress import Progress
from moray.targets.spec import TargetConfig


def verify_cache(config: VerifyCacheConfig) -> None:
    """Check a cache, print its problems and, on request, uncommit the damaged files. Needs no Ray.

    Raises:
        DamagedError: the cache has problems.
        DataError: there is no cache, or sampled values differ from the target's.
        ConfigError: a sample is requested, but its target is unknown or tensor-parallel.
    """
    store, options = CacheStore(config.output), config.verify
    with Progress("verify", unit="MiB") as progress:
        findings = verify_files(
            store,
            options.threads,
            lambda num_bytes: progress.update(total=-(-num_bytes >> 20)),
            lambda num_bytes: progress.advance(num_bytes / 2**20),
        )
    for line in findings.lines:
        print(line)
    print(f"{findings.num_shards:,} shards, {findings.num_bytes:,} bytes read; {len(findings.lines)} problems")
    if options.sample_chats and findings.manifest is not None and not findings.shards:
        _check_sample(store, config, findings)
    if not findings.lines:
        return
    advice = f"add verify.repair=true to remove what is damaged, then run {_caching_command(store, config)}"
    if options.repair:
        number = repair(store, findings)
        advice = f"{number} damaged files removed; to make them again run {_caching_command(store, config)}"
    raise DamagedError(f"'{config.output}' has {len(findings.lines)} problems; {advice}")


def _check_sample(store: CacheStore, config: VerifyCacheConfig, findings: Findings) -> None:
    from moray.activations.maintenance.recheck import recheck, too_far
    from moray.targets.model import Target

    assert findings.manifest is not None
    options = config.verify
    if config.target is not None and config.target.tensor_parallel > 1:
        raise ConfigError(
            f"target.tensor_parallel is {config.target.tensor_parallel}, but a cache is checked against the target in "
            "one process: give 1, and target.device=cpu if no GPU holds it"
        )
    with Progress(f"run the target on {options.sample_chats} chats again"):
        target = Target.load(config.target or _recorded_target(store), packs=False)
        errors = recheck(store, findings.manifest, target, options.sample_chats, options.seed)
    wrong = too_far(errors, findings.manifest.columns, options.max_error)
    print(f"{'column':<12} {'largest error':>14} {'relative rms':>14}")
    for name, error in errors.items():
        verdict = f"  more than {wrong[name]:g}" if name in wrong else ""
        print(f"{name:<12} {error.largest:>14.3e} {error.relative_rms:>14.3e}{verdict}")
    if wrong:
        raise DataError(
            f"'{config.output}': {', '.join(wrong)} are not what the target gives now (dtype {target.dtype}); check "
            "target.dtype and target.model, or remove the cache and make it again"
        )


def _recorded_settings(store: CacheStore) -> dict[str, Any]:
    """Read the caching command's configuration from run.yaml; empty if there is none."""
    try:
        record = yaml.safe_load(store.read_text("run.yaml"))
    except (DataError, yaml.YAMLError):
        return {}
    settings = record.get("config") if isinstance(record, dict) else None
    return settings if isinstance(settings, dict) else {}


def _recorded_target(store: CacheStore) -> TargetConfig:
    settings = _recorded_settings(store).get("target")
    if not settings:
        raise ConfigError(
            f"verify.sample_chats needs the target, and '{store.uri}' has no run.yaml that names it; give target.model="
        )
    # Always checked in one process, even if several made the cache.
    return TargetConfig.model_validate_json(_as_json(settings | {"tensor_parallel": 1}))


def _caching_command(store: CacheStore, config: VerifyCacheConfig) -> str:
    """Return the command that rewrites what was removed."""
    given = config.model_dump(mode="json", exclude_defaults=True, exclude={"verify"})
    if config.target is not None and config.chats is not None:
        return caching_command(given)
    recorded = _recorded_settings(store)
    try:
        full = VerifyCacheConfig.model_validate_json(_as_json(recorded | {"output": config.output}))
    except ValueError:  # from pydantic: written by another version
        return "the caching command with its configuration again"
    if full.target is None or full.chats is None:
        return "the caching command with its configuration again"
    return caching_command(full.model_dump(mode="json", exclude_defaults=True))


def _as_json(value: Any) -> str:
    import json

    return json.dumps(value)
