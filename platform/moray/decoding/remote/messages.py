"""Messages between a target and a drafter (see `remote.frames` for their bytes).

A request holds, for each sequence, its newly verified tokens, their memory and the tree to draft. Tensors with the same
name are concatenated over all sequences and split again by the number of tokens. A reply says how many verified tokens
the drafter now knows, and holds the token ids and parents of the draft. If the drafter does not know the tokens that
the request builds on (a miss), that number is 0, nothing is drafted, and the next request starts from the first token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from moray.config import Config
from moray.decoding.params import SamplingParams
from moray.decoding.planning.fitting import fit_shape
from moray.decoding.remote.frames import pack_frame, unpack_frame, validated
from moray.drafters.base import Drafter
from moray.errors import DataError
from moray.trees.shapes import ChainShape, DynamicShape, FixedShape, GrowableShape, SparseShape
from moray.trees.tree import TokenTree, chain_of, structure_of

_NO_SCORE = -1e9


class Entry(Config):
    """One sequence in a request."""

    session: str
    drafter: str
    known: int = Field(ge=0)
    """Verified tokens that earlier requests sent."""
    tokens: tuple[int, ...]
    """Verified tokens after those; their memory is in the tensors."""
    num_kept: int = Field(ge=0)
    """See `Drafter.extend`."""
    root: int | None = None
    """Token to draft below; None to draft nothing."""
    shape: int = Field(default=0, ge=0)
    """Index into the request's shapes."""
    params: int = Field(default=0, ge=0)
    """Index into the request's sampling parameters."""
    sequence: int = 0
    num_target_layers: int | None = None
    """N to draft with (see `Drafter.set_num_target_layers`); None if there is no choice."""
    wants_scores: bool = False
    """Whether the target prunes the tree."""


class DraftRequest(Config):
    """One message to a drafter."""

    number: int
    entries: tuple[Entry, ...]
    shapes: tuple[ChainShape | FixedShape | DynamicShape | SparseShape, ...] = ()
    params: tuple[SamplingParams, ...] = ()
    closed: tuple[str, ...] = ()
    """Sessions that have ended."""


class DraftedTree(Config):
    """One sequence in a reply."""

    session: str
    known: int
    """Verified tokens that the drafter knows after the request; 0 if it is a miss."""
    tokens: tuple[int, ...] = ()
    """Token ids of the nodes, the root first; empty if nothing was drafted."""
    parents: tuple[int, ...] = ()
    max_depth: int = 0
    num_empty_levels: int = 0
    is_chain: bool = False
    scores: tuple[float, ...] = ()
    """Cumulative log-probabilities of the nodes, if they were requested."""


class DraftReply(Config):
    """One message from a drafter."""

    number: int
    """Number of the request."""
    trees: tuple[DraftedTree, ...]
    seconds: float = Field(default=0.0, ge=0)
    """Time that drafting took."""


def pack(message: DraftRequest | DraftReply, tensors: Mapping[str, Sequence[Tensor]] | None = None) -> bytes:
    """Build one frame; each of `tensors` is rows [tokens, width] of all entries in order, on any device."""
    return pack_frame(message, {name: torch.cat(list(rows)) for name, rows in (tensors or {}).items() if rows})


def unpack_request(frame: bytes | bytearray) -> tuple[DraftRequest, dict[str, Tensor]]:
    """Read a request that `pack` wrote.

    Raises:
        DataError: the frame holds no request.
    """
    words, tensors = unpack_frame(frame)
    return validated(DraftRequest, words), tensors


def unpack_reply(frame: bytes | bytearray) -> DraftReply:
    """Read a reply that `pack` wrote.

    Raises:
        DataError: the frame holds no reply.
    """
    return validated(DraftReply, unpack_frame(frame)[0])


def check_request(
    request: DraftRequest,
    tensors: Mapping[str, Tensor],
    drafters: Mapping[str, Drafter],
    max_model_len: int,
    max_expanded: int,
) -> None:
    """Reject a request that a host cannot answer, before anything of it is applied.

    On a GPU, a token outside the vocabulary would kill the process. The names and widths of the memory are not checked
    here: a drafter that misses a name or finds another width raises when it reads the memory, after earlier entries
    were applied.

    Args:
        request: from any target.
        tensors: memory of all its tokens, by name, each [tokens, width].
        drafters: by the names that requests use.
        max_model_len: maximum number of tokens of a sequence.
        max_expanded: maximum number of nodes of a tree that are expanded.

    Raises:
        DataError: says what is wrong.
        ConfigError: a tree is requested that its drafter cannot draft.
    """
    num_tokens = sum(len(entry.tokens) for entry in request.entries)
    for name, rows in tensors.items():
        if rows.dim() != 2 or rows.shape[0] != num_tokens:
            raise DataError(f"memory '{name}' has the shape {list(rows.shape)}; {num_tokens} rows of tokens are needed")
    asked: set[str] = set()
    for entry in request.entries:
        drafter = drafters.get(entry.drafter)
        if drafter is None:
            raise DataError(f"drafter '{entry.drafter}' is not here; there are {', '.join(drafters)}")
        if entry.session in asked:
            raise DataError("a message goes on with a sequence after asking for a draft of it")
        if entry.known + len(entry.tokens) > max_model_len:
            raise DataError(f"a sequence has {entry.known + len(entry.tokens)} tokens; {max_model_len} are accepted")
        ids = entry.tokens if entry.root is None else (*entry.tokens, entry.root)
        size = drafter.spec.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < size:
            raise DataError(f"a request holds tokens from {min(ids)} to {max(ids)}; the vocabulary has {size}")
        if entry.num_kept > len(entry.tokens):
            raise DataError(f"a request keeps {entry.num_kept} of {len(entry.tokens)} tokens")
        if entry.root is None:
            continue
        asked.add(entry.session)
        if entry.shape >= len(request.shapes) or entry.params >= len(request.params):
            raise DataError(
                f"a request names shape {entry.shape} and parameters {entry.params}, which it does not hold"
            )
        if entry.num_target_layers is not None and entry.num_target_layers not in drafter.layer_counts:
            known = ", ".join(map(str, drafter.layer_counts))
            raise DataError(
                f"drafter '{entry.drafter}' is asked to draft with N = {entry.num_target_layers}; it has {known}"
            )
        shape = request.shapes[entry.shape]
        fit_shape(shape, entry.drafter, drafter.max_depth, size)
        if shape.num_expanded > max_expanded:
            raise DataError(f"tree '{shape.name}' expands {shape.num_expanded} nodes; here are {max_expanded} at most")


def described(tree: TokenTree, *, with_scores: bool = False) -> dict[str, Any]:
    """A tree as fields of `DraftedTree`."""
    scores: tuple[float, ...] = ()
    if with_scores and tree.scores is not None:
        scores = tuple(tree.scores.clamp(min=_NO_SCORE).tolist())  # JSON has no infinity
    return {
        "scores": scores,
        "tokens": tuple(tree.tokens.tolist()),
        "parents": () if tree.is_chain else tuple(tree.parents.tolist()),
        "max_depth": tree.max_depth,
        "num_empty_levels": tree.num_empty_levels,
        "is_chain": tree.is_chain,
    }


def restored(drafted: DraftedTree, device: torch.device, root: int, shape: GrowableShape, vocab_size: int) -> TokenTree:
    """Build the tree of a reply, and check that it is what was requested.

    Only the drafted tokens may be wrong: another root or a misplaced node would change the target's text, and a token
    outside the vocabulary or a deeper tree would make its pass fail.

    Raises:
        DataError: it is not a tree, or does not have the requested root, shape and vocabulary.
    """
    tokens, parents, where = drafted.tokens, drafted.parents, f"for a tree '{shape.name}'"
    if not 0 < len(tokens) <= shape.num_nodes + 1:
        raise DataError(f"a draft of {len(tokens)} nodes came {where}, which has at most {shape.num_nodes + 1}")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise DataError(
            f"a draft with tokens from {min(tokens)} to {max(tokens)} came {where}; the vocabulary has {vocab_size}"
        )
    if tokens[0] != root:
        raise DataError(f"the root of a draft {where} is token {tokens[0]}; token {root} was requested")
    depths = _depths(range(-1, len(tokens) - 1) if drafted.is_chain else parents, len(tokens))
    if not 0 <= drafted.num_empty_levels <= shape.depth - max(depths):
        raise DataError(
            f"a draft of {max(depths)} levels and {drafted.num_empty_levels} empty ones came {where}, which has "
            f"{shape.depth}"
        )
    if drafted.scores and (len(drafted.scores) != len(tokens) or max(drafted.scores) > 0):
        raise DataError(
            f"a draft of {len(tokens)} nodes came {where} with {len(drafted.scores)} scores up to "
            f"{max(drafted.scores):g}; one for each node is needed, none above 0"
        )
    if any(
        drafted.scores[node] > drafted.scores[parent] for node, parent in enumerate(parents) if drafted.scores and node
    ):
        raise DataError(f"a draft came {where} in which a node scores more than its parent")
    ids = torch.tensor(tokens, device=device)
    if drafted.is_chain:
        return chain_of(ids)
    structure = structure_of(list(parents), depths, device)
    return TokenTree(
        ids,
        structure.parents,
        structure.depths,
        structure.ancestors,
        max(depths),
        scores=torch.tensor(drafted.scores, device=device) if drafted.scores else None,
        num_empty_levels=drafted.num_empty_levels,
    )


def _depths(parents: Sequence[int], num_nodes: int) -> list[int]:
    """Depth of each node; a parent must come before its children."""
    if len(parents) != num_nodes or parents[0] != -1 or any(not 0 <= p < i for i, p in enumerate(parents) if i):
        raise DataError("a draft came whose nodes make no tree")
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return depths


def last_rows(pieces: list[Tensor], count: int) -> Tensor:
    """The last `count` rows of consecutive pieces."""
    taken: list[Tensor] = []
    for piece in reversed(pieces):
        if count <= 0:
            break
        taken.append(piece[max(0, piece.shape[0] - count) :])
        count -= piece.shape[0]
    return torch.cat(taken[::-1]) if taken else pieces[0][:0]
