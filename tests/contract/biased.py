"""Verifiers with one known fault each, which every check of the law must refuse."""

from collections.abc import Callable

from moray.decoding.sampling import accept as accept_module
from moray.decoding.sampling.accept import Accepted
from moray.decoding.sampling.sampler import STREAM_DRAFT


def always_accept(tree, probs, sampler, root_position) -> Accepted:
    """Takes the first child down to the last level."""
    path, node = [], 0
    while (child := next((n for n in range(1, tree.num_nodes) if int(tree.parents[n]) == node), None)) is not None:
        path.append(child)
        node = child
    last = int(sampler.choose(probs[node][None].log(), root_position + len(path) + 1))
    return Accepted(path, tree.tokens[path].tolist(), last)


def with_residual(residual: Callable) -> Callable:
    """The rejection method along first children, with another distribution after a refusal."""

    def method(tree, probs, sampler, root_position) -> Accepted:
        path, node = [], 0
        while True:
            children = [n for n in range(1, tree.num_nodes) if int(tree.parents[n]) == node]
            p = probs[node].double()
            position = root_position + len(path) + 1
            if children:
                child, token = children[0], int(tree.tokens[children[0]])
                q = tree.draft_probs[child].double()
                test = sampler.uniform(accept_module.STREAM_TEST, position, 1)[0]
                if bool(test * q[token] < p[token]):
                    path.append(child)
                    node = child
                    continue
                p = residual(p, q)
            noise = accept_module.gumbel(sampler.uniform(accept_module.STREAM_RESIDUAL, position, p.shape[0]))
            return Accepted(path, tree.tokens[path].tolist(), int((p.log() + noise).argmax()))

    return method


FAULTS = {
    "accepts always": ("accept_by_rejection", always_accept),
    "residual from p": ("accept_by_rejection", with_residual(lambda p, q: p)),
    "residual from |p - q|": ("accept_by_rejection", with_residual(lambda p, q: (p - q).abs())),
    "draft and test share a stream": ("STREAM_TEST", STREAM_DRAFT),
}
