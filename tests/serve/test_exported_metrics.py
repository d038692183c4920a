"""`/metrics` is one application's series on all nodes, in Prometheus's text format, and costs little to ask for."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serve.metrics.exporters import Exporters, of_application

FIRST_NODE = """\
# HELP ray_node_cpu Cores
# TYPE ray_node_cpu gauge
ray_node_cpu{application="ours"} 2.0
# HELP ray_moray_cycles_total Target passes
# TYPE ray_moray_cycles_total counter
ray_moray_cycles_total{application="ours",replica="a"} 3.0
ray_moray_cycles_total{application="theirs",replica="b",other_application="ours"} 4.0
# HELP ray_moray_e2e_request_latency_seconds Latency
# TYPE ray_moray_e2e_request_latency_seconds histogram
ray_moray_e2e_request_latency_seconds_bucket{application="ours",le="+Inf"} 5.0
ray_moray_e2e_request_latency_seconds_count{application="ours"} 5.0
"""
SECOND_NODE = """\
# HELP ray_serve_deployment_queued_queries Waiting
# TYPE ray_serve_deployment_queued_queries gauge
ray_serve_deployment_queued_queries{application="theirs"} 1.0
# HELP ray_moray_cycles_total Target passes
# TYPE ray_moray_cycles_total counter
ray_moray_cycles_total{application="ours",replica="c"} 6.0
"""


class Fixed(Exporters):
    """Says what it was told to, and counts how often it was asked."""

    def __init__(self, text):
        self.text = text
        self.num_reads = 0

    async def read(self):
        self.num_reads += 1
        if self.text is None:
            raise ConnectionError("no node exports metrics")
        return self.text


def samples(text):
    """By family, its samples."""
    return {
        family.name: [(sample.name, sample.labels, sample.value) for sample in family.samples]
        for family in text_string_to_metric_families(text)
    }


def test_nodes_are_joined_and_other_applications_left_out():
    text = of_application([FIRST_NODE, SECOND_NODE], "ours")
    found = samples(text)
    assert set(found) == {"ray_moray_cycles", "ray_moray_e2e_request_latency_seconds"}
    assert {labels["replica"]: value for _, labels, value in found["ray_moray_cycles"]} == {"a": 3.0, "c": 6.0}
    assert len(found["ray_moray_e2e_request_latency_seconds"]) == 2
    assert text.count("# TYPE ray_moray_cycles_total") == 1


def test_names_with_quotes_are_found():
    text = SECOND_NODE.replace("ours", 'o\\"u\\\\rs')
    assert len(samples(of_application([text], 'o"u\\rs'))["ray_moray_cycles"]) == 1


def test_the_gateway_passes_on_what_is_exported(serve_target, monkeypatch):
    exporters = Fixed(SECOND_NODE)
    monkeypatch.setattr("serve.gateway._FRESH", 60.0)
    with serve_target(exporters=exporters) as running:
        answers = [httpx.get(running.url + "/metrics") for _ in range(3)]
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, SECOND_NODE)] * 3
    assert answers[0].headers["content-type"].startswith("text/plain; version=0.0.4")
    assert exporters.num_reads == 1, "a second request within a second gets the same"


def test_without_exporters_metrics_are_not_there(serve_target):
    with serve_target(exporters=Fixed(None)) as running:
        answer = httpx.get(running.url + "/metrics")
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert "no node exports metrics" in answer.json()["error"]["message"]


@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_metrics_are_only_read(running, method):
    assert httpx.request(method, running.url + "/metrics").status_code == 405
