"""What the driver's machine does while a stage runs: CPU, memory, disk, network and, where nvidia-ml-py is installed, GPUs.

MLflow's own collectors, so that the numbers stand in its "System metrics" tab; sent by us, since its sender knows no outage.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from pipelines.tracking.mlflow_runs import first_line

PREFIX = "system/"

log = logging.getLogger(__name__)


@contextmanager
def watched(report: Callable[[Mapping[str, float], int], None], *, every: float) -> Iterator[None]:
    """Inside, `report(metrics, number of the look)` every `every` seconds, from a thread. Does nothing where `every` is 0."""
    if every <= 0:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(report, every, over), name="system metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=5)


def _watch(report: Callable[[Mapping[str, float], int], None], every: float, over: threading.Event) -> None:
    monitors: list = []
    number = 0
    told: set[str] = set()  # what fails at one look fails at all of them
    while not over.wait(min(every, threading.TIMEOUT_MAX)):  # a stage shorter than that costs nothing
        try:
            monitors = monitors or _monitors()
            numbers: dict[str, float] = {}
            for monitor in monitors:
                monitor.collect_metrics()
                numbers |= monitor.aggregate_metrics()
                monitor.clear_metrics()
            report({PREFIX + name: value for name, value in numbers.items()}, number)
            number += 1
        except Exception as error:
            if (line := first_line(error)) not in told:
                told.add(line)
                log.warning("system metrics are incomplete: %s", line)


def _monitors() -> list:
    from mlflow.system_metrics.metrics.cpu_monitor import CPUMonitor
    from mlflow.system_metrics.metrics.disk_monitor import DiskMonitor
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor
    from mlflow.system_metrics.metrics.network_monitor import NetworkMonitor

    found = [CPUMonitor(), DiskMonitor(), NetworkMonitor()]
    with suppress(ImportError, RuntimeError):  # no nvidia-ml-py, or no GPU
        found.append(GPUMonitor())
    return found
