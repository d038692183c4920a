"""Which trees a drafter can draft, and what of a tree it cannot: the one check before anything is drafted.

Every way to decode comes through `fit_shape`: the decoder of one sequence, the engine with drafters in its process or
elsewhere, the drafter replicas, and the deployment commands.
"""

import logging
from collections.abc import Iterable, Sequence

from moray.errors import ConfigError
from moray.trees.shapes import AdaptiveShape, AnyShape

_LOGGER = logging.getLogger("moray")
_SAID: set[str] = set()


def fit_shape(shape: AnyShape, drafter: str, max_depth: int | None, vocab_size: int | None = None) -> AnyShape:
    """The tree as a drafter drafts it: an adaptive one goes no deeper than the drafter can, any other stays as it is.

    Args:
        shape: what was asked for.
        drafter: its name, for the error.
        max_depth: most levels that it can draft; None for any number.
        vocab_size: tokens of the target; None where they are not known yet.

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
    if max_depth is not None and shape.depth > max_depth:
        raise ConfigError(
            f"tree '{shape.name}' is {shape.depth} levels deep; drafter '{drafter}' drafts at most {max_depth}: give a "
            f"tree of at most {max_depth} levels, or type adaptive, which goes as deep as each drafter can"
        )
    return shape


def depth_notice(shape: AnyShape, drafter: str, fitted: AnyShape) -> list[str]:
    """What to say where `fit_shape` gave another depth than was asked for."""
    if fitted.depth == shape.depth:
        return []
    return [
        f"tree '{shape.name}' goes at most {fitted.depth} levels deep with drafter '{drafter}', which drafts no more"
    ]


def engine_notices(shape: AnyShape, drafter: str, fitted: AnyShape, efforts: Sequence[int]) -> list[str]:
    """What an engine does not do of what the decoder of one sequence does with the same tree and drafter."""
    notices = depth_notice(shape, drafter, fitted)
    if len(efforts) > 1:
        known = ", ".join(map(str, efforts))
        notices.append(
            f"drafter '{drafter}' knows N = {known}, of which an engine of many sequences does not choose: it drafts "
            f"with N = {efforts[0]} throughout; for another give {{type: trained, folder: FOLDER, effort: N}}"
        )
    if isinstance(shape, AdaptiveShape) and shape.breadth > 1:
        notices.append(
            f"tree '{shape.name}' with drafter '{drafter}': an engine of many sequences chooses its depth alone and "
            f"verifies all of up to {fitted.num_nodes} nodes; breadth 1 drafts chains, whose size follows their depth"
        )
    return notices


def say_once(notices: Iterable[str]) -> None:
    """Log each notice as a warning, once in this process."""
    for notice in notices:
        if notice not in _SAID:
            _SAID.add(notice)
            _LOGGER.warning("note: %s", notice)
