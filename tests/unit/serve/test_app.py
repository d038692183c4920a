"""What Serve is told of the deployments."""

from serve.app import build_app


def test_the_line_before_the_gateways_is_bounded():
    gateway = build_app({"target.model": "x"})._bound_deployment
    assert gateway.name == "Gateway"
    assert 0 < gateway.max_queued_requests <= 10_000
    refusal = gateway._deployment_config.backpressure_config
    assert (refusal.status_code, refusal.retry_after_s) == (429, 1)
