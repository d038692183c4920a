"""The Grafana dashboard shows what is published, and nothing else; its panels stand side by side."""

import json
import re
from itertools import combinations
from pathlib import Path

import promql_parser
import pytest

from serve.metrics import series

DASHBOARD = Path(__file__).resolve().parents[2] / "configs" / "grafana" / "moray.json"
RAYS_OWN = {
    "ray_serve_autoscaling_desired_replicas",
    "ray_serve_autoscaling_target_replicas",
    "ray_serve_deployment_queued_queries",
    "ray_serve_deployment_replica_healthy",
    "ray_serve_health_check_failures_total",
    "ray_serve_http_request_latency_ms_bucket",
    "ray_serve_num_http_requests_total",
    "ray_serve_replica_processing_queries",
}
"""Names that Ray Serve 2.60 exports; some only with autoscaling, or once something has failed."""
UNITS = {"bytes", "ms", "none", "ops", "percentunit", "reqps", "s", "short"}
SELECTED = re.compile(r"\b(ray_\w+)\{([^}]*)\}")
TAG = re.compile(r"(\w+)(?:=~|=)")
GROUPED = re.compile(r"(?:by|ignoring|on) \(([^)]*)\)")
ADDED_BY_RAY = {"application", "deployment", "replica"}


def load():
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


PANELS = [panel for panel in load()["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]


def published():
    """Names as Prometheus sees them, and their tags."""
    names = {}
    for each in series.ALL.values():
        tags = {*each.tags, *ADDED_BY_RAY}
        if each.kind == "histogram":
            names[f"{each.exported}_bucket"] = tags | {"le"}
        else:
            names[each.exported] = tags
    return names


def test_it_is_a_dashboard():
    dashboard = load()
    assert dashboard["uid"] == "moray-serving"
    assert dashboard["schemaVersion"] >= 36
    assert "id" not in dashboard, "Grafana gives that"
    variables = {variable["name"]: variable["type"] for variable in dashboard["templating"]["list"]}
    assert variables == {"datasource": "datasource", "application": "query"}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_promql(expression):
    """As Prometheus gets it, once Grafana has filled in its variables."""
    promql_parser.parse(expression.replace("$__rate_interval", "1m").replace("$application", "moray"))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_asks_for_what_is_published(expression):
    known = published()
    used = re.findall(r"\bray_\w+", expression)
    assert used
    assert [name for name, _ in SELECTED.findall(expression)] == used, "every name has its selector"
    tags = set()
    for name, selector in SELECTED.findall(expression):
        assert 'application=~"$application"' in selector
        assert name in RAYS_OWN or name in known
        tags |= known.get(name, {"deployment", "status_code", "le"})
        if name in known:
            assert set(TAG.findall(selector)) <= known[name]
    grouped = {tag for words in GROUPED.findall(expression) for tag in re.findall(r"\w+", words)}
    assert grouped <= tags
    assert ("rate(" in expression) == ("$__rate_interval" in expression)
    for name, _ in SELECTED.findall(expression):
        is_rate = f"rate({name}{{" in expression
        assert is_rate == name.endswith(("_total", "_bucket")), "counters, and only they, are asked for their rates"


def test_every_series_is_shown():
    shown = {name for expression in EXPRESSIONS for name, _ in SELECTED.findall(expression)}
    assert set(published()) - shown == set()


def test_legends_name_what_they_are_grouped_by():
    for target in (target for panel in PANELS for target in panel["targets"]):
        outer = re.match(r"(?:sum|max) by \(([^)]*)\)", target["expr"])
        tags = set(re.findall(r"\w+", outer[1])) if outer else set()
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) == tags
        assert target["legendFormat"]


def test_panels_have_titles_units_and_numbers_of_their_own():
    everything = load()["panels"]
    ids = [panel["id"] for panel in everything]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in everything]
    assert len(set(titles)) == len(titles)
    assert {panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS} <= UNITS
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_panels_do_not_overlap():
    places = [panel["gridPos"] for panel in load()["panels"]]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 for place in places)
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
