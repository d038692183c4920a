"""The ways to train one drafter that `pipelines.benchmarks.train` compares, on the first windows of its cache."""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from statistics import median
from typing import Any

import pyarrow as pa
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from moray.activations.format.decode import TapDecoder
from moray.activations.format.manifest import Manifest, read_manifest
from moray.activations.format.schema import bytes_per_token
from moray.activations.format.store import CacheStore
from moray.activations.reading.collate import data_shard_batch, needed_columns
from moray.activations.reading.epochs import Window, plan_epoch
from moray.batch import DataShardBatch, TapNeeds, Taps, TrainBatch
from moray.cluster.training.configs import DistillConfig
from moray.cluster.training.windows import read_window
from moray.cluster.training.worker import build_learner
from moray.distill.optim import Optimiser
from moray.distill.parallel import Replicas
from moray.distill.step import UpdateContext, run_update
from moray.drafters.learner import Learner
from moray.drafters.moa.moa import MoA
from moray.targets.model import Target, pick_device
from pipelines.benchmarks.cluster_configs import TrainBenchmarkConfig
from pipelines.benchmarks.recipe import Chat, RecipeTrainer, stock_model

WAYS = ("cached", "online", "recipe")


class WaysToTrain:
    """One drafter, and all ways to train it, on the first windows of its cache."""

    def __init__(self, run: DistillConfig, config: TrainBenchmarkConfig, rank: int = 0, workers: int = 1) -> None:
        self._run = run
        self._config = config
        self._store = CacheStore(run.activations)
        self._manifest: Manifest = read_manifest(self._store)
        self._device = pick_device(run.target.device)
        self._needs = self._cached.drafter.needs
        self._decoder = TapDecoder.open(self._store, self._manifest, self._device)
        self.ways = WAYS if self._has_recipe else WAYS[:2]
        self._windows = self._first_windows(rank, workers)
        self.num_tokens = sum(self._lengths(window, rows) for window, rows in self._batches())
        self.num_padded = sum(self._padded(window, rows) for window, rows in self._batches())

    def measure(self) -> dict[str, Any]:
        """Measure all ways in turn and return this drafter's row of the report.

        Other load on the machine slows all ways of a round alike, so ratios are computed per round; the row holds the
        median of ratios and of speeds.
        """
        steps: dict[str, Callable[[], None]] = {way: self.step_of(way) for way in self.ways}
        steps["target"] = self._run_target_alone
        for step in steps.values():
            step()  # warm-up
        seconds: dict[str, list[float]] = {way: [] for way in steps}
        for _ in range(self._config.rounds):
            for way, step in steps.items():
                begin = time.perf_counter()
                step()
                self.wait()
                seconds[way].append(time.perf_counter() - begin)
        return self._row(seconds)

    def step_of(self, way: str) -> Callable[[], None]:
        """A function that runs one round of one way to train."""
        return {"cached": self._train_cached, "online": self._train_online, "recipe": self._train_recipe}[way]

    def _row(self, seconds: dict[str, list[float]]) -> dict[str, Any]:
        speeds = {way: self.num_tokens / median(seconds[way]) for way in self.ways}
        share_of_target = median_ratio(seconds["target"], seconds["online"])
        flops = self._flops_per_token()
        peak = self._config.peak_flops
        columns = needed_columns(self._needs, self._manifest.columns)
        taps = {name: self._manifest.columns[name] for name in columns if name in self._manifest.columns}
        return {
            "drafter": self._run.drafter.type,
            "tokens_per_second": speeds["cached"],
            "tokens_per_second_by_way": speeds,
            "cached_vs_online": median_ratio(seconds["online"], seconds["cached"]),
            "cached_vs_online_limit": 1.0 / (1.0 - share_of_target) if share_of_target < 1.0 else None,
            "speedup_vs_recipe_per_worker": (
                median_ratio(seconds["recipe"], seconds["cached"]) if "recipe" in speeds else None
            ),
            "padding_waste": 1.0 - self.num_tokens / self.num_padded,
            "bytes_per_token": bytes_per_token(taps),
            "gigabytes_per_second": speeds["cached"] * bytes_per_token(taps) / 1e9,
            "flops_per_token": flops,
            "mfu": None if peak is None else flops * speeds["cached"] / peak,
            "tokens_measured": self.num_tokens,
        }

    # Each way loads only what it needs, because memory is measured per way. The cached way's drafter is always loaded,
    # because it determines which taps are read.

    @cached_property
    def _target(self) -> Target:
        return Target.load(self._run.target, packs=False)

    @cached_property
    def _cached(self) -> Replicas:
        return self._replicas()

    @cached_property
    def _online(self) -> Replicas:
        return self._replicas()

    @cached_property
    def _recipe(self) -> RecipeTrainer:
        drafter = self._drafter()
        assert isinstance(drafter, MoA)
        return RecipeTrainer(stock_model(self._run.target), drafter, self._run.losses, self._run.train)

    @property
    def _has_recipe(self) -> bool:
        """Whether the published recipe supports this drafter and these losses."""
        drafter = self._run.drafter
        return (
            self._config.recipe
            and drafter.type == "moa"
            and not drafter.target_layers
            and not self._run.losses.total_variation
        )

    def _drafter(self) -> Learner:
        return build_learner(self._run, self._manifest, self._device.type).to(self._device)

    def _replicas(self) -> Replicas:
        run, drafter = self._run, self._drafter()
        drafter.train()
        drafter.recomputes = run.train.activation_checkpointing
        return Replicas(drafter, Optimiser(drafter, run.optim, run.schedule), run.losses, run.train)

    def _first_windows(self, rank: int, workers: int) -> list[tuple[Window, list[list[int]]]]:
        """The first `updates` batches, grouped by the windows that hold them."""
        plan = plan_epoch(self._manifest.lengths, self._run.train.batch_tokens, self._run.train.seed, 0, workers)[rank]
        chosen, left = [], self._config.updates
        for window in plan.windows:
            if left > 0:
                chosen.append((window, window.batches[:left]))
                left -= len(window.batches)
        return chosen

    def _batches(self) -> Iterator[tuple[Window, list[int]]]:
        return ((window, rows) for window, batches in self._windows for rows in batches)

    def _chats(self, window: Window, rows: list[int]) -> list[int]:
        lengths = [length for name, group in window.row_groups for length in self._manifest.lengths[name][group]]
        return [lengths[row] for row in rows]

    def _lengths(self, window: Window, rows: list[int]) -> int:
        return sum(self._chats(window, rows))

    def _padded(self, window: Window, rows: list[int]) -> int:
        lengths = self._chats(window, rows)
        return len(lengths) * max(lengths)

    def _read(self, needs: TapNeeds) -> Iterator[pa.Table]:
        """Yield the rows of each batch, with only the columns that are needed."""
        columns = needed_columns(needs, self._manifest.columns)
        for window, batches in self._windows:
            table = read_window(window.row_groups, self._store.uri, columns)
            for rows in batches:
                yield pa.concat_tables([table.slice(row, 1) for row in rows])

    def _update(self, trainer: Replicas, step: int, batch: DataShardBatch) -> None:
        total, train = self._config.updates, self._run.train
        context = UpdateContext(
            step, total, total, 0.0, 1, train.seed, is_reported=(step + 1) % train.logging_steps == 0
        )
        run_update(trainer, [batch], context)

    def _train_cached(self) -> None:
        for step, rows in enumerate(self._read(self._needs)):
            self._update(self._cached, step, data_shard_batch(rows, self._needs, self._decoder))

    def _train_online(self) -> None:
        for step, text in enumerate(self._texts()):
            batch = text.text.to(self._device)
            online = DataShardBatch(0, text.text, text.uids, lambda batch=batch: self._taps(batch))
            self._update(self._online, step, online)

    def _run_target_alone(self) -> None:
        for text in self._texts():
            self._taps(text.text.to(self._device))

    def _texts(self) -> Iterator[DataShardBatch]:
        return (data_shard_batch(rows, TapNeeds(), self._decoder) for rows in self._read(TapNeeds()))

    def _taps(self, batch: TrainBatch) -> Taps:
        """Compute the target's taps of right-padded chats; causal attention keeps the padding out of real tokens."""
        rows, width = batch.tokens.shape
        cache = self._target.new_cache(width, rows)
        positions = torch.arange(width, device=batch.tokens.device).expand(rows, width)
        output = self._target.forward(batch.tokens, positions, None, cache, self._needs.hidden_depths)
        kv = cache.flat(0, width, self._needs.kv_layers) if self._needs.kv_layers else None
        return Taps(kv, output.hidden)

    def _train_recipe(self) -> None:
        for step, text in enumerate(self._texts()):
            chats = [
                Chat(text.text.tokens[row, :length], text.text.response_mask[row, :length])
                for row, length in enumerate(text.text.lengths.tolist())
            ]
            self._recipe.update(chats, torch.Generator().manual_seed(step))

    def _flops_per_token(self) -> float:
        """FLOPs per token of one cached update, forward and backward, by torch's own count."""
        rows = next(self._read(self._needs))
        batch = data_shard_batch(rows, self._needs, self._decoder)
        num_tokens = batch.text.num_tokens
        with _CountFlops() as counter:
            self._update(self._cached, 0, batch)
        return counter.total / num_tokens

    def wait(self) -> None:
        """Wait until the device has finished all queued work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def median_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median over rounds of the ratio of two figures."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


class _CountFlops(TorchDispatchMode):
    """Counts FLOPs like torch's FlopCounterMode, which cannot handle gradients computed inside a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out
