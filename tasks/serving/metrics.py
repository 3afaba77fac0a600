"""What a replica counts: one table of names, shown at /metrics in Prometheus' format and, under Ray, also told to ray.util.metrics.

Ray exports the same names with `ray_` in front, for all replicas together; /metrics is that of the replica that answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True)
class Metric:
    kind: str  # counter, gauge or histogram (of seconds)
    help: str
    label: str | None = None


METRICS = {
    "jacobi_requests_total": Metric("counter", "Requests by what became of them: stop, length, cancelled, refused or failed.", "outcome"),
    "jacobi_prompt_tokens_total": Metric("counter", "Prompt tokens read."),
    "jacobi_answer_tokens_total": Metric("counter", "Answer tokens committed; its rate is tokens per second."),
    "jacobi_text_forwards_total": Metric("counter", "Forwards, counted once for every text in them; answer tokens over these are TPF."),
    "jacobi_forwards_total": Metric("counter", "Forwards of the running batch."),
    "jacobi_mean_acceptance_length": Metric("gauge", "Draft tokens accepted per forward of a text, since the replica started."),
    "jacobi_queue_requests": Metric("gauge", "Requests that wait for a row."),
    "jacobi_rows_in_flight": Metric("gauge", "Texts being decoded."),
    "jacobi_quarantined_rows_total": Metric("counter", "Texts ended because their logits were not finite."),
    "jacobi_kv_reserved_bytes": Metric("gauge", "Memory of the KV buffers."),
    "jacobi_kv_limit_bytes": Metric("gauge", "The most it may become."),
    "jacobi_time_to_first_token_seconds": Metric("histogram", "From a request's arrival to its first tokens."),
    "jacobi_request_seconds": Metric("histogram", "From a request's arrival to its answer's end."),
}


class Metrics:
    """Numbers under the names of METRICS. Cheap, and safe to call from any thread."""

    def __init__(self, *, to_ray: bool = False) -> None:
        import prometheus_client as prometheus

        self._registry = prometheus.CollectorRegistry()
        self._ours: dict[str, Any] = {}
        for name, metric in METRICS.items():
            labels = (metric.label,) if metric.label else ()
            made = {"counter": prometheus.Counter, "gauge": prometheus.Gauge, "histogram": prometheus.Histogram}[metric.kind]
            more = {"buckets": SECONDS} if metric.kind == "histogram" else {}
            self._ours[name] = made(name, metric.help, labels, registry=self._registry, **more)
        self._rays = _ray_metrics() if to_ray else {}

    def add(self, name: str, value: float = 1.0, *, label: str | None = None) -> None:
        """Of a counter."""
        ours = self._ours[name]
        (ours.labels(label) if label else ours).inc(value)
        if value and self._rays:
            self._rays[name].inc(value, tags=_tags(name, label))

    def set(self, name: str, value: float) -> None:
        """Of a gauge."""
        self._ours[name].set(value)
        if self._rays:
            self._rays[name].set(value)

    def observe(self, name: str, seconds: float) -> None:
        """Of a histogram."""
        self._ours[name].observe(seconds)
        if self._rays:
            self._rays[name].observe(max(seconds, 1e-6))

    def page(self) -> bytes:
        """Prometheus' text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


def _ray_metrics() -> dict[str, Any]:
    from ray.util import metrics

    found: dict[str, Any] = {}
    for name, metric in METRICS.items():
        keys = (metric.label,) if metric.label else ()
        if metric.kind == "histogram":
            found[name] = metrics.Histogram(name, metric.help, boundaries=list(SECONDS), tag_keys=keys)
        else:
            found[name] = {"counter": metrics.Counter, "gauge": metrics.Gauge}[metric.kind](name, metric.help, tag_keys=keys)
    return found


def _tags(name: str, label: str | None) -> dict[str, str]:
    return {METRICS[name].label: label} if label else {}
