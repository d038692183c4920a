"""What tests share, importable from one place.

`tiny_targets` makes targets, `tiny_batches` taps and batches of them, `tiny_drafters` drafters of every kind,
`rehearsed` the target as its own drafter; `side_by_side` decodes with and without a drafter.
"""

from rehearsed import Rehearsed, RehearsedState
from side_by_side import ADAPTIVE, COUPLED, FILTERED, GREEDY, SHAPES, MoodyCosts, is_lossless, plainly, speculate
from tiny_batches import batch_of, taps_of
from tiny_drafters import (
    DRAFTERS,
    T_STEP,
    TRAINED,
    UNTRAINED,
    VARIANTS,
    build,
    losses_for,
    noisy_copy,
    overfit,
    union_members,
)
from tiny_targets import MAX_POSITIONS, TARGETS, VOCABULARY, TinyTarget, load_target, save_chat_target, save_target

__all__ = [
    "ADAPTIVE",
    "COUPLED",
    "DRAFTERS",
    "FILTERED",
    "GREEDY",
    "MAX_POSITIONS",
    "SHAPES",
    "TARGETS",
    "TRAINED",
    "T_STEP",
    "UNTRAINED",
    "VARIANTS",
    "VOCABULARY",
    "MoodyCosts",
    "Rehearsed",
    "RehearsedState",
    "TinyTarget",
    "batch_of",
    "build",
    "is_lossless",
    "load_target",
    "losses_for",
    "noisy_copy",
    "overfit",
    "plainly",
    "save_chat_target",
    "save_target",
    "speculate",
    "taps_of",
    "union_members",
]
