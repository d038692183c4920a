"""Checks that a drafter can draft a tree.

Everything that decodes calls `fit_shape` when it is built: the decoder of one sequence, the engine with local or remote
drafters, and drafter replicas, which also check every request. Deployment commands call it before they start anything.
"""

import logging
from collections.abc import Iterable

from moray.errors import ConfigError
from moray.trees.shapes import AdaptiveShape, AnyShape

_LOGGER = logging.getLogger("moray")
_SAID: set[str] = set()


def fit_shape(shape: AnyShape, drafter: str, max_depth: int | None, vocab_size: int | None = None) -> AnyShape:
    """The tree to draft: an adaptive one is limited to the drafter's depth, any other is returned unchanged.

    Args:
        shape: the tree of the configuration.
        drafter: the drafter's name, for the error.
        max_depth: maximum number of levels that the drafter can draft; None for no limit.
        vocab_size: tokens of the target; None if not known yet.

    Raises:
        ConfigError: the drafter cannot draft the tree.
    """
    if vocab_size is not None and shape.max_children > vocab_size:
        raise ConfigError(
            f"tree '{shape.name}' gives a node {shape.max_children} children; the target's vocabulary has "
            f"{vocab_size} tokens: give a narrower tree"
        )
    if isinstance(shape, AdaptiveShape):
        return shape.limited(max_depth)
    if is_too_deep(shape, max_depth):
        raise ConfigError(
            f"tree '{shape.name}' is {shape.depth} levels deep; drafter '{drafter}' drafts at most {max_depth}: give a "
            f"tree of at most {max_depth} levels, or type adaptive, which goes as deep as each drafter can"
        )
    return shape


def is_too_deep(shape: AnyShape, max_depth: int | None) -> bool:
    """Whether a drafter of at most `max_depth` levels cannot draft the tree; adaptive trees always fit."""
    return max_depth is not None and not isinstance(shape, AdaptiveShape) and shape.depth > max_depth


def depth_notice(shape: AnyShape, drafter: str, fitted: AnyShape) -> list[str]:
    """A notice if `fit_shape` limited the depth of `shape` to that of `fitted`."""
    if fitted.depth == shape.depth:
        return []
    return [f"drafter '{drafter}' drafts at most {fitted.depth} levels, so tree '{shape.name}' grows no deeper with it"]


def say_once(notices: Iterable[str]) -> None:
    """Log each notice as a warning, once in this process."""
    for notice in notices:
        if notice not in _SAID:
            _SAID.add(notice)
            _LOGGER.warning("note: %s", notice)
