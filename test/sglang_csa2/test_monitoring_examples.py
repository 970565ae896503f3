"""examples/monitoring and docs/monitoring.md speak of metrics that exist."""

import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry
from stats_samples import cache_stats
from test_metrics import LABELS

from sglang_csa2.metrics import PREFIX, CacheMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "grafana-dashboard.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
EXPRESSIONS = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
HISTOGRAM = re.compile(r"_(bucket|sum|count)$")
GRAFANA_VARIABLES = {"__rate_interval"}
SCRAPED = {"instance", "job", "le"}
"""Labels that are not ours: of Prometheus, and of histograms."""


def series() -> dict[str, set[str]]:
    """Every series of the cache by name, as it is under /metrics: name -> its labels."""
    registry = CollectorRegistry()
    CacheMetrics(LABELS, registry=registry).update(cache_stats())
    samples = itertools.chain.from_iterable(metric.samples for metric in registry.collect())
    return {sample.name: set(sample.labels) for sample in samples if not sample.name.endswith("_created")}


def names_of_sglang() -> set[str]:
    """Names of the metrics of SGLang, from its source: importing it takes long."""
    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    source = Path(package.origin).parent / "srt" / "observability" / "metrics_collector.py"
    return set(re.findall(r'name="(sglang:\w+)"', source.read_text(encoding="utf-8")))


OURS = series()
THEIRS = names_of_sglang()


def names_in(text: str) -> set[str]:
    return set(re.findall(r"sglang:\w+", text))


def test_there_are_series_to_compare_with() -> None:
    assert f"{PREFIX}used_bytes" in OURS
    assert OURS[f"{PREFIX}pages"] >= {"format", "model_name"}
    assert "sglang:generation_tokens_total" in THEIRS


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_a_panel_asks_for_metrics_that_exist(title: str, expression: str) -> None:
    names = names_in(expression)
    assert names
    for name in names:
        assert name in OURS if name.startswith(PREFIX) else HISTOGRAM.sub("", name) in THEIRS, (title, name)


@pytest.mark.parametrize(("title", "expression"), EXPRESSIONS)
def test_an_expression_is_well_formed(title: str, expression: str) -> None:
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing), title
    # A counter that is not a rate says nothing; the rate of a gauge neither.
    for name in names_in(expression):
        is_counter = name.endswith(("_total", "_bucket"))
        assert (f"rate({name}" in expression) == is_counter, (title, name)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_a_panel_uses_labels_that_exist(panel: dict[str, Any]) -> None:
    for target in panel["targets"]:
        expression = target["expr"]
        labels = set(re.findall(r"[{,]\s*(\w+)=", expression))
        labels |= set(re.findall(r"\bby \((\w+)\)", expression)) | set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        ours = set.union(*(OURS.get(name, {"model_name"}) for name in names_in(expression)))
        assert labels <= ours | SCRAPED, (panel["title"], labels)


def test_panels_are_told_apart_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        place = panel["gridPos"]
        columns, rows = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        cells = set(itertools.product(columns, rows))
        assert max(columns) < 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["description"]
        assert {target["refId"] for target in panel["targets"]} == set("ABCDEF"[: len(panel["targets"])])


def test_every_variable_is_defined() -> None:
    text = json.dumps(DASHBOARD)
    defined = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", text)) - GRAFANA_VARIABLES - {"__all"}
    assert used == defined
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            (name,) = names_in(variable["definition"])
            assert name in OURS
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


def test_prometheus_asks_where_the_server_answers() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["127.0.0.1:30000"]}]


def test_the_documentation_lists_what_there_is() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")
    missing = [name for name in OURS if f"`{HISTOGRAM.sub('', name)}" not in page]
    assert missing == [], f"docs/monitoring.md does not name {missing}"
    known = THEIRS | {HISTOGRAM.sub("", name) for name in OURS} | {PREFIX}
    unknown = sorted(names_in(page) - known)
    assert unknown == [], f"docs/monitoring.md names {unknown}, which nothing publishes"
