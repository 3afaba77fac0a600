"""What we record in MLflow, one function per kind of record. Fields are JSON types, so that a record can wait in a file.

Each may be sent twice, and the second time changes nothing: who sends cannot always know whether the first has arrived.
A `run` is MLflow's id, or "pending-..." of a run that was begun while the store was away (`Connection.run_id`).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from filelock import FileLock

from pipelines.tracking import mlflow_runs
from pipelines.tracking.mlflow_runs import HANDLE, PARENT, Connection

PARAMS = 100  # per request that every MLflow store accepts
POINTS = 1000
SMALL = 2**20  # bytes; larger files of a model are left where they are

Number = tuple[str, float, int, int]  # name, value, milliseconds, step


def create_run(store: Connection, *, handle: str, name: str, tags: Mapping[str, str], started: int, first: bool = False) -> str:
    """A RUNNING run; its id. One that exists is set RUNNING again; it is not looked for when this is known to be the first attempt."""
    found = None if first and tags["kind"] != "sweep" else store.find(handle)
    if found:
        if found.info.status != "RUNNING" and tags["kind"] == "sweep":
            store.client.update_run(found.info.run_id, status="RUNNING")
        return found.info.run_id
    parent = {PARENT: store.run_id(tags[PARENT])} if PARENT in tags else {}
    tags = {**tags, **parent, HANDLE: handle}
    return store.client.create_run(store.experiment_id, run_name=name, tags=tags, start_time=started).info.run_id


def end_run(store: Connection, *, run: str, status: str, ended: int, tags: Mapping[str, str]) -> None:
    run_id = store.run_id(run)
    for name, value in tags.items():
        store.client.set_tag(run_id, name, value)
    store.client.set_terminated(run_id, status, ended)


def log_params(store: Connection, *, run: str, params: Mapping[str, str]) -> None:
    from mlflow.entities import Param

    items = [Param(name, value) for name, value in params.items()]
    for start in range(0, len(items), PARAMS):
        store.client.log_batch(store.run_id(run), params=items[start : start + PARAMS])


def log_metrics(store: Connection, *, run: str, metrics: list[Number]) -> None:
    from mlflow.entities import Metric

    for start in range(0, len(metrics), POINTS):
        store.client.log_batch(store.run_id(run), metrics=[Metric(*number) for number in metrics[start : start + POINTS]])


def log_text(store: Connection, *, run: str, text: str, name: str) -> None:
    store.client.log_text(store.run_id(run), text, name)


def log_file(store: Connection, *, run: str, path: str, folder: str | None) -> None:
    """Read when it is sent: a file that has gone by then is refused."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} is not there (any more)")
    store.client.log_artifact(store.run_id(run), path, folder)


def log_datasets(store: Connection, *, run: str, datasets: list[dict[str, str]]) -> None:
    """Each with name, digest (36 characters at most), source_type, source (JSON), profile (JSON) and context ("training", ...)."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for item in datasets:
        fields = {name: value for name, value in item.items() if name != "context"}
        inputs.append(DatasetInput(Dataset(**fields), [InputTag("mlflow.data.context", item["context"])]))
    store.client.log_inputs(store.run_id(run), inputs)


def register_model(store: Connection, *, run: str, model: str, stage: str, fingerprint: str, folder: str) -> None:
    """A version of `model` that points at an export's folder (a URI) and back at its run; one per fingerprint, however often it is asked for.

    Nothing is copied where the store takes the folder's own URI. A server refuses paths of a disk that may not be its own: there the
    run gets the export's small files as artifacts, the version points at them, and its tag `folder` says where the weights are.
    Of object storage the version's source is the place alone, as MLflow's own clients take it; the tag has the endpoint and region too.
    """
    from mlflow.entities import LoggedModelOutput
    from mlflow.exceptions import MlflowException

    client, run_id = store.client, store.run_id(run)
    with _one_at_a_time(store):
        if _versions(store, model, fingerprint):
            return
        try:
            client.create_registered_model(model)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        tags = {"fingerprint": fingerprint, "stage": stage, "folder": folder}
        logged = client.create_logged_model(store.experiment_id, name=stage.replace("/", "-"), source_run_id=run_id, tags=tags)
        client.finalize_logged_model(logged.model_id, "READY")
        client.log_outputs(run_id, [LoggedModelOutput(logged.model_id, 0)])
        tags["logged_model"] = logged.model_id
        try:
            client.create_model_version(model, folder.partition("?")[0], run_id, tags, await_creation_for=0)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            _small_files(store, run_id, folder)
            client.create_model_version(model, f"{client.get_run(run_id).info.artifact_uri}/model", run_id, tags, await_creation_for=0)


def name_model(store: Connection, *, model: str, fingerprint: str, alias: str) -> None:
    """Moves `alias` to the version with this fingerprint."""
    versions = _versions(store, model, fingerprint)
    if not versions:
        raise ValueError(f"registered model {model!r} has no version of export {fingerprint}")
    store.client.set_registered_model_alias(model, alias, versions[0])


def settle_sweep(store: Connection, *, run: str) -> None:
    mlflow_runs.settle_sweep(store.client, store.experiment_id, store.run_id(run))


WRITES: dict[str, Callable[..., Any]] = {
    write.__name__: write
    for write in (create_run, end_run, log_params, log_metrics, log_text, log_file, log_datasets, register_model, name_model, settle_sweep)
}


def send(store: Connection, record: Mapping[str, Any], *, first: bool = False) -> Any:
    """One record, {"write": name of a function above, its fields}; waits for a locked database. Raises what the store raises."""
    fields = {name: value for name, value in record.items() if name != "write"}
    if first and record["write"] == "create_run":
        fields["first"] = True
    return mlflow_runs.patiently(lambda: WRITES[record["write"]](store, **fields))


def _one_at_a_time(store: Connection) -> AbstractContextManager:
    """Two jobs of a sweep that share an export make one version of it. A server has no lock of ours: there it may become two."""
    database = mlflow_runs.sqlite_path(store.tracking_uri)
    return nullcontext() if database is None else FileLock(f"{database}.models.lock")


def _versions(store: Connection, model: str, fingerprint: str) -> list[str]:
    wanted = f"name = '{model}' and tags.fingerprint = '{fingerprint}'"
    return [found.version for found in store.client.search_model_versions(wanted)]


def _small_files(store: Connection, run_id: str, folder: str) -> None:
    address = urlsplit(folder)
    with tempfile.TemporaryDirectory() as scratch:
        note = Path(scratch, "where.json")
        note.write_text(json.dumps({"folder": folder}))
        store.client.log_artifact(run_id, str(note), "model")
    here = Path(unquote(address.path))
    if address.scheme != "file" or not here.is_dir():
        return
    for path in sorted(here.rglob("*")):
        if path.is_file() and path.stat().st_size <= SMALL:
            store.client.log_artifact(run_id, str(path), str(Path("model", path.relative_to(here).parent)))
