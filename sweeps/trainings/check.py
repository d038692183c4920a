"""Checks a sweep before anything starts, by validating every corner of its space without training."""

from moray.activations.format.manifest import read_manifest
from moray.activations.format.store import CacheStore
from moray.activations.planning.adding import command_to_add
from moray.activations.planning.shards import listed
from moray.activations.reading.collate import missing_columns
from moray.bench.specbench import read_questions
from moray.cluster.training.configs import DistillConfig
from moray.cluster.training.outline import outline_learner, run_length
from moray.cluster.training.resume import check_same_target
from moray.decoding.planning.fitting import fit_shape
from moray.distill.tracking.trackers import check_trackers
from moray.errors import ConfigError, DataError
from moray.targets.spec import read_spec
from sweeps.trainings.configs import SweepConfig
from sweeps.trainings.ladder import Rung, rungs_of, steps_at, tokens_per_step
from sweeps.trainings.trial import decoding_gpus
from sweeps.tuning.concurrency import concurrent_trials
from sweeps.tuning.spaces import corners_of, label


def check_sweep(sweep: SweepConfig) -> list[Rung]:
    """Check a sweep and return its ladder.

    Raises:
        ConfigError: a key is misspelt, a value is not valid for a drafter, the tree is too deep for one, the source is
            not a cache, there are fewer questions than the batch size, or two rungs fall on the same update.
        DataError: the cache is incomplete, lacks columns, or has too few chats for the ladder.
        MismatchError: the cache belongs to another target.
    """
    corners = [(choices, sweep.trial(choices)) for choices in corners_of(sweep.space)]
    first = corners[0][1]
    if first.source.type != "disk":
        raise ConfigError(f"source.type is {first.source.type}; all trials of a sweep read one cache: cache it first")
    check_trackers(first.trackers)
    asked = len(read_questions(sweep.decoding.questions, sweep.decoding.num_questions))
    if asked < sweep.decoding.batch_size:
        raise ConfigError(
            f"decoding.batch_size is {sweep.decoding.batch_size}, but '{sweep.decoding.questions}' and "
            f"decoding.num_questions give {asked} questions: give several times as many, or a smaller batch"
        )
    store = CacheStore(first.activations)
    manifest = read_manifest(store)
    check_same_target(manifest, read_spec(first.target.model), first.activations, first.target)
    drafters = {id(config): outline_learner(config) for _, config in corners}
    missing = {name for _, config in corners for name in missing_columns(drafters[id(config)].needs, manifest.columns)}
    if missing:
        raise DataError(
            f"the cache '{store.uri}' has no column {listed(sorted(missing))}, which trials of this sweep read; to add "
            f"what is missing, run {command_to_add(store, sorted(missing))}"
        )
    for choices, config in corners:
        try:
            fit_shape(sweep.decoding.tree, config.drafter.type, config.drafter.max_depth)
        except ConfigError as error:
            raise ConfigError(f"decoding.tree, with {label(choices)}: {error}") from None
    tokens = sweep.training_tokens or run_length(first, manifest, drafters[id(first)]) * tokens_per_step(first)
    rungs = rungs_of(sweep.ladder, tokens)
    lengths: dict[str, int] = {}
    for choices, config in corners:
        steps = [steps_at(rung.tokens, config) for rung in rungs]
        if len(set(steps)) < len(steps):
            raise ConfigError(
                f"ladder.rungs is {len(rungs)}, but with {label(choices)} they are at updates "
                f"{', '.join(map(str, steps))} of {tokens_per_step(config):,} tokens each: give fewer rungs, a smaller "
                "ladder.reduction or more training_tokens"
            )
        wanted = steps[-1]
        whole = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": None})})
        same = f"{whole.train!r} {drafters[id(config)].needs!r}"  # everything trials vary that affects the length
        if same not in lengths:
            lengths[same] = run_length(whole, manifest, drafters[id(config)])
        there = lengths[same]
        if there < wanted:
            raise DataError(
                f"training_tokens of {tokens:,.0f} are {wanted} updates with {label(choices)}, but train.epochs="
                f"{config.train.epochs} over '{first.activations}' gives {there}: raise train.epochs or lower "
                "training_tokens"
            )
    return rungs


def concurrency(sweep: SweepConfig, config: DistillConfig) -> int:
    """The number of trials that run at the same time (see `tuning.concurrency`)."""
    return concurrent_trials(config, sweep, "decoding", sweep.decoding.cpus, decoding_gpus(sweep, config))
