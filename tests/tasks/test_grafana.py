"""The Grafana dashboard asks for metrics that a replica or a stage has, and shows each of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import ray.util.metrics  # noqa: F401

from tasks.serving.metrics import METRICS, Metrics
from tasks.stage_gauges import GAUGES, StageGauges

FILE = Path(__file__).resolve().parents[2] / "dashboards" / "grafana" / "jacobi.json"
NAME = re.compile(r"(?:\$\{prefix\})?\b(?:ray_)?(jacobi_\w+)")


def names(value: object) -> set[str]:
    """Metrics in every expression below a panel."""
    if isinstance(value, dict):
        own = set(NAME.findall(value["expr"].replace("${prefix}", ""))) if "expr" in value else set()
        return own.union(*map(names, value.values()))
    return set().union(*map(names, value)) if isinstance(value, list) else set()


def test_every_name_is_one_that_a_replica_shows():
    metrics = Metrics()
    for name, metric in METRICS.items():
        if metric.kind == "counter":
            metrics.add(name, label="x" if metric.label else None)
        elif metric.kind == "gauge":
            metrics.set(name, 1)
        else:
            metrics.observe(name, 1)
    shown = {line.partition("{")[0].partition(" ")[0] for line in metrics.page().decode().splitlines() if not line.startswith("#")}
    asked = names(json.loads(FILE.read_text(encoding="utf-8"))["panels"])
    assert asked and asked <= shown | set(GAUGES), asked - shown
    assert {name.removesuffix("_bucket") for name in asked} == set(METRICS) | set(GAUGES), "a metric nobody looks at"


def test_stages_tell_ray(monkeypatch):
    told = {}

    class Gauge:
        def __init__(self, name, text, tag_keys):
            self.name = name

        def set(self, value, tags):
            told[self.name, tags["stage"]] = value

    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    StageGauges("distill").set(stage_progress=0.5, train_tokens_per_second=100.0)
    assert told == {("jacobi_stage_progress", "distill"): 0.5, ("jacobi_train_tokens_per_second", "distill"): 100.0}


def test_stages_without_ray_say_nothing(monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    StageGauges("distill").set(stage_progress=0.5)
    with pytest.raises(AssertionError):
        StageGauges("distill").set(stage_progres=0.5)


def test_panels_do_not_lie_on_each_other():
    panels = json.loads(FILE.read_text(encoding="utf-8"))["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    cells = [(x, y) for p in panels for g in [p["gridPos"]] for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
