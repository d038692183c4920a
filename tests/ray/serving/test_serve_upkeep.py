"""What operators do with a running application, and what long use does to it: no answer changes, nothing is kept."""

import asyncio
import itertools
import socket
import threading
import time

import aiohttp
import psutil
import pytest
from served_app import MODEL, NUM_QUESTIONS, questions

from moray.errors import ConfigError
from serve.deploy import DeployConfig, DeployError, deploy

pytestmark = pytest.mark.slow
AT_ONCE = 16
SCALING = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 4,
    "upscale_delay_s": 0.5,
    "downscale_delay_s": 2,
    "look_back_period_s": 1,
}
LENGTHS = {"short": (700, 400, 6 << 20), "long": (2200, 1000, 3 << 20)}
"""Requests that come before, requests that are measured, and the bytes by which a process may grow in these: allocators
come to rest in the first two thousand (2.4 MiB of a target between the first and the second, 1 MiB a thousand later).
The short one notices 15 KiB that are kept of a request, the long one 3 KiB."""


def at_port(port: int) -> DeployConfig:
    """No application would come from it: the proxy is first."""
    application = {"name": "none", "import_path": "nowhere:nothing", "args": {"target": {"model": "nowhere"}}}
    return DeployConfig(applications=(application,), http_options={"port": port})


def test_a_port_in_use_is_one_line_and_leaves_no_serve_behind(ray_session):
    from ray import serve
    from ray.serve.schema import ProxyStatus

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(DeployError) as caught:
            deploy(at_port(port))
    assert str(caught.value).startswith(f"http_options.port is {port}, but Ray Serve cannot listen at 127.0.0.1:{port}")
    assert "\n" not in str(caught.value)
    assert ProxyStatus.HEALTHY not in serve.status().proxies.values()


@pytest.mark.soak
def test_a_running_serve_does_not_change_its_port_without_a_word(app):
    with pytest.raises(ConfigError, match=rf"^http_options.port is {app.port + 1}, but .* runs .* with {app.port} and"):
        deploy(at_port(app.port + 1))


@pytest.mark.timeout(600)
@pytest.mark.soak
@pytest.mark.parametrize("length", ["short", "long"])
def test_memory_is_flat(app, length):
    """Many short answers, streamed, every eighth given up by its client; then as many again."""
    num_before, num_measured, max_growth = LENGTHS[length]
    numbers = itertools.count()

    async def ask(session: aiohttp.ClientSession, places: asyncio.Semaphore) -> int:
        number = next(numbers)
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "one two three " * (1 + number % 13)}],
            "max_tokens": 60 if number % 8 == 7 else 8,
            "temperature": (number % 2) * 0.9,
            "stream": True,
            "speculation": {"drafter": ("same", "lookup")[number % 4 == 3]},
        }
        async with places, session.post(f"http://127.0.0.1:{app.port}/v1/chat/completions", json=body) as response:
            if number % 8 == 7:
                await response.content.readany()
                response.close()
            else:
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            return response.status

    async def request_drafts(count: int) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        async with aiohttp.ClientSession() as session:
            statuses = await asyncio.gather(*(ask(session, places) for _ in range(count)))
        assert set(statuses) == {200}

    def measured() -> dict[str, int]:
        app.wait_until_idle(10)
        names = ("Gateway", "Target", "Drafter")
        return {f"{name} {pid}": psutil.Process(pid).memory_full_info().uss for name in names for pid in app.pids(name)}

    asyncio.run(request_drafts(num_before))
    before = measured()
    asyncio.run(request_drafts(num_measured))
    after = measured()
    assert len(before) == 3
    growth = {name: after[name] - before[name] for name in before}
    assert max(growth.values()) < max_growth, growth


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_another_setting_is_rolled_out_while_answers_are_streamed(app, expected):
    """All replicas of all deployments are replaced; no request is refused, and no token is lost, doubled or changed."""
    everywhere = {"Gateway": 2, "Target": 2, "Drafter": 2}
    app.deploy(everywhere)
    before, asked = {name: set(app.pids(name)) for name in everywhere}, questions(NUM_QUESTIONS)
    api = {"model_name": MODEL, "default_max_tokens": 21}
    rollout = threading.Thread(target=app.deploy, args=(everywhere,), kwargs={"api": api})
    rollout.start()
    while rollout.is_alive():
        assert [text for text, _ in app.request_drafts(asked, AT_ONCE)] == expected
    rollout.join()
    assert [text for text, _ in app.request_drafts(asked, AT_ONCE)] == expected
    assert all(app.num_running(name) == 2 and not before[name] & set(app.ready(name)) for name in everywhere)
    with app.plain_client() as client:
        fields = {"model": MODEL, "prompt": "one two", "extra_body": {"ignore_eos": True}}
        assert client.completions.create(**fields).usage.completion_tokens == 21


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_pools_grow_under_load_and_shrink_again(app, expected):
    pools, asked = ("Target", "Drafter"), questions(NUM_QUESTIONS)
    app.deploy({}, scaling=dict.fromkeys(pools, SCALING))

    def wait_for(count: int, at_once: int) -> None:
        deadline = time.monotonic() + 200
        while [app.num_running(name) for name in pools] != [count, count]:
            assert time.monotonic() < deadline, "the pools were not scaled"
            part = asked if at_once > 1 else asked[:4]
            assert [text for text, _ in app.request_drafts(part, at_once)] == expected[: len(part)]

    wait_for(1, 1)
    wait_for(2, 24)
    wait_for(1, 1)
    assert [text for text, _ in app.request_drafts(asked, 1)] == expected


@pytest.mark.timeout(300)
@pytest.mark.soak
def test_who_deploys_is_told_what_it_waits_for(app, capsys):
    """Serve says so after half a minute; before, nothing showed that it would wait for ever."""
    with pytest.raises(DeployError, match="1000"):
        app.deploy({}, num_cpus={"Target": 1000}, wait_seconds=40)
    waiting = [line for line in capsys.readouterr().err.splitlines() if line.startswith("waiting: ")]
    assert sum("Target: " in line and "1000" in line for line in waiting) == 1, waiting


@pytest.mark.soak
def test_an_application_that_cannot_start_is_said_to(app):
    """The last test here: what runs until then is replaced."""
    with pytest.raises(DeployError, match=r"application '[\w-]+' is DEPLOY_FAILED: .*no_such_drafter"):
        app.deploy({}, drafters={"moa": "no_such_drafter"})
