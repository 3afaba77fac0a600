"""`python -m pipelines.full_run [experiment=NAME] [overrides]`: the whole method, from prompts to report.

    dry_run=true          print the stage table (cached / to run) and stop
    until=STAGE           run that stage and what it needs
    force=[STAGE,...]     recompute these stages
    -m noise_schedule=linear,random,reverse     a sweep: one pipeline per value, sharing every stage that does not depend on it;
                          it ends in a table over its jobs (`sweep`)

Exit codes: 0 done, 1 a stage failed, 2 the config or input is wrong (one line says what), 130 / 143 interrupted.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines import schema
from pipelines.arguments import make_parent
from pipelines.dag import Graph, PlannedStage, execute, plan
from pipelines.errors import config_error, summary, user_error
from pipelines.job_record import JobRecord
from pipelines.schema import PipelineConfig
from pipelines.stages import build_graph
from pipelines.store import Store, plain
from pipelines.tracking import SweepInfo, Tracker, sqlite_uri, ui_command
from tasks.artifacts import read_json
from tasks.report import render_table
from tasks.stage import UserError

log = logging.getLogger(__name__)


def main() -> int:
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, who say them in one line
    schema.register()
    codes: list[int] = []  # one per job of a sweep: Hydra would report only the first failure, and in its own words

    def job(composed: DictConfig) -> None:
        codes.append(_run_job(composed))

    try:
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        return _refuse(config_error(error))
    except OSError as error:  # Hydra makes its run folder before we are asked
        if error.filename is None:
            raise
        return _refuse(f"paths.outputs: {error.filename}: {error.strerror}; choose a writable folder")
    except KeyboardInterrupt:
        return _refuse("interrupted; finished stages are kept, the same command goes on from there", code=130)
    return max(codes, default=0)


def _run_job(composed: DictConfig) -> int:
    """One Hydra job; returns its exit code, having said what went wrong."""
    hydra_config = HydraConfig.get()
    number = hydra_config.job.num if hydra_config.mode is RunMode.MULTIRUN else 0
    overrides = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)  # as they were given, interpolations too
    record = JobRecord(Path(hydra_config.runtime.output_dir), number, overrides)
    record.save()
    code, error = _attempt(composed, record)
    record.state, record.error = ("finished" if error is None else "failed"), error
    record.save()
    return 0 if error is None else _refuse(error, code=code)


def _attempt(composed: DictConfig, record: JobRecord) -> tuple[int, str | None]:
    """Exit code and, where it is not 0, the line that says why."""
    try:
        run(schema.build(composed), record)
    except OmegaConfBaseException as error:
        return 2, config_error(error)
    except StageFailed as error:
        mistake = user_error(error.__cause__)
        if mistake:
            return 2, mistake
        log.error("%s", error, exc_info=error.__cause__)
        return 1, str(error)
    except UserError as error:
        return 2, str(error)
    except OSError as error:
        if error.filename is None:
            raise
        return 2, f"{error.filename}: {error.strerror}"
    return 0, None


class StageFailed(Exception):
    """Its cause is what the stage raised."""


def run(config: PipelineConfig, record: JobRecord) -> None:
    """One pipeline run inside a Hydra job; `record` learns its config and stages.

    Raises UserError for a config or input that cannot be used, StageFailed later.
    """
    hydra_config = HydraConfig.get()
    outputs = Path(config.paths.outputs).expanduser().resolve()
    store = Store(Path(config.paths.store))
    graph = _graph(config, store)
    planned = plan(graph, store, config.force)
    record.config, record.stages = plain(asdict(config)), {p.stage.id: str(p.folder) for p in planned}
    record.save()
    print(stage_table(planned), flush=True)
    if config.dry_run:
        return
    if config.paths.results:
        make_parent("paths.results", Path(config.paths.results))
    uri = config.paths.tracking_uri or sqlite_uri(outputs)
    sweep = None
    if hydra_config.mode is RunMode.MULTIRUN:
        directory = Path(hydra_config.sweep.dir).resolve()
        sweep = SweepInfo(directory, f"sweep {directory.name}", list(hydra_config.overrides.task))
    with Tracker.start(tracking_uri=uri, experiment="jacobi-forcing", run_name=config.name, config=record.config, sweep=sweep) as tracker:
        try:
            execute(planned, store, tracker, config.cluster, trust_remote_code=config.model.trust_remote_code)
        except Exception as error:
            failed = next((p.stage.id for p in planned if store.finished(p.folder) is None), None)  # stages run in order
            raise StageFailed(f"stage {failed} failed: {user_error(error) or summary(error)}") from error
        if graph.stages[-1].kind == "report":
            _publish(config, planned[-1].folder, Path(hydra_config.runtime.output_dir), tracker, uri)


def _graph(config: PipelineConfig, store: Store) -> Graph:
    try:
        graph = build_graph(config, identity_cache=store.root)
    except UserError:
        raise
    except ValueError as error:  # every section has passed its own checks: what is left is one changed by a round
        raise UserError(f"rounds: {error}") from error
    return graph.until(config.until) if config.until else graph


def stage_table(planned: list[PlannedStage]) -> str:
    """What will run and what is already there, one line per stage."""
    width = max(len(p.stage.id) for p in planned)
    rows = [f"{p.stage.id:<{width}}  {'cached' if p.cached else 'to run':<7} {p.fingerprint}" for p in planned]
    return "\n".join([f"{'stage':<{width}}  {'state':<7} fingerprint", *rows])


def _publish(config: PipelineConfig, report: Path, output_dir: Path, tracker: Tracker, uri: str) -> None:
    """Copies the report beside the run's log, into MLflow and where the user asked; prints the table and where things are."""
    for name in ("results.json", "results.md", "report.html"):
        shutil.copy(report / name, output_dir / name)
        tracker.log_artifact(report / name, "report")
    results = output_dir / "results.json"
    if config.paths.results:
        shutil.copy(results, config.paths.results)
    print(f"\n{render_table(read_json(results)['rows'])}\n")
    print(f"report:    {output_dir / 'report.html'}")
    print(f"MLflow UI: {ui_command(uri)}")
    print(f"results:   {results}", flush=True)


def _refuse(message: str, *, code: int = 2) -> int:
    print(f"error: {message}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
