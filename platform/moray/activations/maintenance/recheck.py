"""Checks cached values by running the target over a sample of chats again and comparing column by column.

The target runs one chat at a time, unpadded, through the stock forward pass of transformers: none of the code that
wrote the cache is used, so that an error there cannot hide itself.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from moray.activations.format.decode import TapDecoder
from moray.activations.format.manifest import Manifest
from moray.activations.format.schema import Column
from moray.activations.format.store import CacheStore
from moray.errors import MismatchError
from moray.targets.model import Target


@dataclass
class ColumnError:
    """Error of a column against the target's own values, over all tokens of the sample."""

    largest: float = 0.0
    """Largest absolute difference."""
    squares: float = 0.0
    """Sum of squared differences."""
    wanted_squares: float = 0.0
    """Sum of the target's squared values."""

    @property
    def relative_rms(self) -> float:
        """Root mean square of the differences, divided by that of the target's own values."""
        return (self.squares / max(self.wanted_squares, 1e-30)) ** 0.5


def recheck(store: CacheStore, manifest: Manifest, target: Target, num_chats: int, seed: int) -> dict[str, ColumnError]:
    """Return the error of each tap column over a sample that depends only on the seed and the manifest.

    Raises:
        MismatchError: the cache was made from another target.
    """
    cached = manifest.plan.target.fingerprint
    if cached != target.spec.fingerprint:
        raise MismatchError(
            f"'{store.uri}' was cached from a target with fingerprint {cached}, target.model has "
            f"{target.spec.fingerprint}: give the target it was made from"
        )
    errors = {name: ColumnError() for name in manifest.columns}
    decoder = TapDecoder.open(store, manifest, dtype=torch.float32)
    for (shard, group), rows in _sample(manifest, num_chats, seed).items():
        table = store.read_row_groups(shard, [group], ["tokens", *manifest.columns])
        for row in rows:
            chat = table.slice(row, 1)
            wanted = _taps(target, chat.column("tokens")[0].as_py(), list(manifest.columns))
            for name, error in errors.items():
                _add(error, decoder.decode(chat, name), wanted[name])
    return errors


def too_far(errors: dict[str, ColumnError], columns: Mapping[str, Column], max_error: float | None) -> dict[str, float]:
    """Return the columns whose relative error exceeds the limit, with that limit. NaN exceeds any limit."""
    limits = {name: max_error or _default_limit(column) for name, column in columns.items()}
    return {name: limits[name] for name, error in errors.items() if not error.relative_rms <= limits[name]}


def _default_limit(column: Column) -> float:
    value_bytes = column.bytes_per_token / column.width
    return 0.02 if value_bytes >= 2 else 0.08 if value_bytes >= 1 else 0.3


def _sample(manifest: Manifest, num_chats: int, seed: int) -> dict[tuple[str, int], list[int]]:
    places = [
        (name, group, row)
        for name, groups in sorted(manifest.lengths.items())
        for group, lengths in enumerate(groups)
        for row in range(len(lengths))
    ]
    chosen: dict[tuple[str, int], list[int]] = {}
    for name, group, row in sorted(random.Random(seed).sample(places, min(num_chats, len(places)))):
        chosen.setdefault((name, group), []).append(row)
    return chosen


@torch.inference_mode()
def _taps(target: Target, tokens: list[int], names: list[str]) -> dict[str, Float[Tensor, "tokens width"]]:
    ids = torch.tensor([tokens], device=target.device)
    output = target.model.model(input_ids=ids, use_cache=True, output_hidden_states=True)
    taps: dict[str, Tensor] = {}
    for name in names:
        kind, _, number = name.partition(".")
        if kind == "hidden":  # the last one follows the final norm; the others are layer inputs
            taps[name] = output.hidden_states[int(number)][0].cpu()
        else:
            layer = output.past_key_values.layers[int(number)]
            pair = torch.stack([layer.keys[0], layer.values[0]])  # [k ; v], heads, tokens, head_dim
            taps[name] = pair.permute(2, 1, 0, 3).flatten(1).cpu()
    return taps


def _add(error: ColumnError, got: Tensor, wanted: Tensor) -> None:
    difference = got.double() - wanted.double()
    error.largest = max(error.largest, float(difference.abs().max()))
    error.squares += float(difference.square().sum())
    error.wanted_squares += float(wanted.double().square().sum())
