"""Our router with Serve's own index of waiting calls: what the router would be without its work-around."""

from ray.serve.request_router import RequestRouter

from moray.cluster.sticky_router import StickyRouter


class UnfixedRouter(StickyRouter):
    """Forgets all but the first of several calls that one request makes at once."""

    _add_pending_request_to_indices = RequestRouter._add_pending_request_to_indices
    _remove_pending_request_from_indices = RequestRouter._remove_pending_request_from_indices
    _get_pending_request_matching_internal_request_id = RequestRouter._get_pending_request_matching_internal_request_id
