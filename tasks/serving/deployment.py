"""Replicas on Ray Serve: Ray starts them again when they die or say that they are not well, and drains them before they end."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tasks.serving.settings import ServingSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

APPLICATION = "jacobi"


@dataclass(frozen=True)
class Place:
    """Where the replicas run and are reached. drain_seconds: what is in flight may take so long to finish once the server is to end."""

    host: str
    port: int
    replicas: int
    cpus: float
    gpus: float
    drain_seconds: float


class Replica:
    """One model with its engine. Ray calls `check_health` every few seconds and replaces a replica whose check raises."""

    def __init__(self, settings: ServingSettings) -> None:
        from tasks.serving.model import start_service

        self._service = start_service(settings, to_ray=True)

    def __serve_build_asgi_app__(self) -> FastAPI:
        from tasks.serving.app import create_app

        return create_app(self._service)

    def check_health(self) -> None:
        if (problem := self._service.worker.problem()) is not None:
            raise RuntimeError(problem)

    def in_flight(self) -> int:
        return self._service.worker.in_flight

    def __del__(self) -> None:
        if (service := getattr(self, "_service", None)) is not None:
            service.worker.close()


def deploy(settings: ServingSettings, place: Place) -> None:
    """Returns once the replicas answer. Ray must run. Raises RuntimeError where they do not come up."""
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(proxy_location="HeadOnly", http_options={"host": place.host, "port": place.port}, logging_config=quiet)
    resources: dict[str, Any] = {"num_cpus": place.cpus, "num_gpus": place.gpus}
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="replica",
        num_replicas=place.replicas,
        ray_actor_options=resources,
        max_ongoing_requests=2 * settings.max_requests
        + 64,  # above our own limit: who is one too many is told 429 by us, not queued or refused by Ray
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=place.drain_seconds,
        max_constructor_retry_count=2,
        logging_config=quiet,
    )
    serve.run(deployment.bind(settings), name=APPLICATION, route_prefix="/")


def undeploy() -> None:
    """No new requests; what is in flight finishes within the drain time, and a replica says in its log what it had to cut off."""
    from ray import serve

    serve.delete(APPLICATION)
    serve.shutdown()
