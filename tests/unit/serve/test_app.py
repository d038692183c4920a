"""What Serve is told of the deployments."""

from serve.app import build_app


def test_the_line_before_the_gateways_is_bounded():
    gateway = build_app({"target.model": "x"})._bound_deployment
    assert gateway.name == "Gateway"
    assert 0 < gateway.max_queued_requests <= 10_000
    refusal = gateway._deployment_config.backpressure_config
    assert (refusal.status_code, refusal.retry_after_s) == (429, 1)


def test_two_cores_have_room_for_all_of_it():
    """Ray's own default is a CPU for each: the gateway would wait for a third for ever."""
    gateway = build_app({"target.model": "x", "drafters.d": "y"})._bound_deployment
    target = gateway.init_args[1]._bound_deployment
    drafter = target.init_args[1]._bound_deployment
    cpus = [deployment.ray_actor_options.get("num_cpus", 1) for deployment in (gateway, target, drafter)]
    assert sum(cpus) <= 2, cpus


def test_there_is_no_pool_for_prompt_lookup_alone():
    for args, has_pool in (({"drafters.d": "{type: ngram}"}, False), ({"drafters.d": "y"}, True)):
        gateway = build_app({"target.model": "x"} | args)._bound_deployment
        target = gateway.init_args[1]._bound_deployment
        assert (target.init_args[1] is not None) is has_pool


def test_a_target_whose_engine_fails_does_not_live_on():
    gateway = build_app({"target.model": "x"})._bound_deployment
    assert gateway.init_args[1]._bound_deployment.init_kwargs == {"ends_process": True}


def test_a_gateway_may_finish_its_answers():
    """Its streams end with it; the other deployments' are taken up elsewhere, or done without."""
    gateway = build_app({"target.model": "x"})._bound_deployment
    target = gateway.init_args[1]._bound_deployment
    assert gateway._deployment_config.graceful_shutdown_timeout_s >= 120
    assert target._deployment_config.graceful_shutdown_timeout_s <= 10
