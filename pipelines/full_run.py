"""`python -m pipelines.full_run [experiment=NAME] [overrides]`: the whole method, from prompts to report.

    dry_run=true          print the stage table (cached / to run, and what it will cost) and stop
    until=STAGE           run that stage and what it needs; one stage alone: `python -m pipelines.run_stage STAGE`
    force=[STAGE,...]     recompute these stages
    keep_going=true       after a failure, run all that does not need the failed stage; else the run ends at once
    fail_fast=true        of a sweep: start no job once one has failed
    -m noise_schedule=linear,random,reverse     a sweep: one pipeline per value, sharing every stage that does not depend on it;
                          it ends in a table over its jobs (`sweep`)

Exit codes: 0 done, 1 a stage failed, 2 the config or input is wrong (one line per mistake says what), 130 / 143 interrupted.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipelines import sweep_jobs
from pipelines.arguments import make_parent
from pipelines.config import schema
from pipelines.config.composing import composing_mistakes
from pipelines.config.schema import PipelineConfig
from pipelines.credentials import redact_files, redacted
from pipelines.errors import config_error, summary, user_error
from pipelines.estimate.forecast import forecast, shortfalls
from pipelines.estimate.table import estimate_table
from pipelines.graph.cluster_start import check_before_the_first_stage
from pipelines.graph.dag import Graph, PlannedStage, plan
from pipelines.graph.execute import StageFailed, execute
from pipelines.graph.timings import TIMINGS, Timings
from pipelines.job_record import JobRecord
from pipelines.newest import link_newest
from pipelines.published import publish, publish_failure
from pipelines.stages import build_graph
from pipelines.store import Store, open_store, plain
from pipelines.store.uri import refuse_credentials_on
from pipelines.store.uses import in_use, results_of
from pipelines.tracking.tracker import BACKLOG, SweepInfo, Tracker, sqlite_uri, ui_address, ui_command
from tasks.artifacts import read_json
from tasks.report import render_table
from tasks.stage import UserError

log = logging.getLogger(__name__)


def main(only: str | None = None) -> int:
    """The command line; `only` is the one stage to run (`run_stage`)."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come to us, who say them in one line
    schema.register()
    sweep_jobs.begun.clear()
    codes: list[int] = []  # one per job of a sweep: Hydra would report only the first failure, and in its own words

    def job(composed: DictConfig) -> None:
        codes.append(_run_job(composed, only))

    try:
        refuse_credentials_on(sys.argv[1:])
        hydra.main(version_base="1.3", config_path="pkg://conf", config_name="config")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        return _refuse("\n".join(composing_mistakes(sys.argv[1:], error)))
    except UserError as error:
        return _refuse(str(error))
    except OSError as error:  # Hydra makes its run folder before we are asked
        if error.filename is None:
            raise
        return _refuse(f"paths.outputs: {error.filename}: {error.strerror}; choose a writable folder")
    except KeyboardInterrupt:
        return _refuse("interrupted; finished stages are kept, the same command goes on from there", code=130)
    except Exception as error:
        if not sweep_jobs.begun:
            raise
        log.error("the sweep was cut short", exc_info=error)  # by a launcher whose process died: what jobs raise, they tell themselves
        return _refuse(f"the sweep was cut short: {summary(error)}; finished stages are kept, the same command goes on from there", code=1)
    return max([*codes, sweep_jobs.exit_code()])  # jobs of a parallel launcher are no part of this process: their records tell


def _run_job(composed: DictConfig, only: str | None) -> int:
    """One Hydra job; returns its exit code, having said what went wrong."""
    hydra_config = HydraConfig.get()
    number = hydra_config.job.num if hydra_config.mode is RunMode.MULTIRUN else 0
    overrides = OmegaConf.to_container(hydra_config.overrides.task, resolve=False)  # as they were given, interpolations too
    record = JobRecord(Path(hydra_config.runtime.output_dir), number, overrides)
    record.save()
    sweep = Path(hydra_config.sweep.dir).resolve() if hydra_config.mode is RunMode.MULTIRUN else None
    redact_files([*(record.folder / (hydra_config.output_subdir or ".hydra")).glob("*.yaml"), *(sweep.glob("multirun.yaml") if sweep else ())])
    stopped_by = sweep_jobs.failed(sweep) if sweep and composed.fail_fast else None
    if stopped_by is not None:
        record.state, record.error = "skipped", f"not started: fail_fast=true, and job {stopped_by} has failed"
        record.save()
        return 0
    record.code, record.error = _attempt(composed, record, only)
    record.state = "finished" if record.error is None else "failed"
    record.save()
    if record.error is None:
        return 0
    return _refuse(record.error, code=record.code, of=f"{sweep_jobs.named(sweep, number, overrides)}: " if sweep else "")


def _attempt(composed: DictConfig, record: JobRecord, only: str | None) -> tuple[int, str | None]:
    """Exit code and, where it is not 0, the line that says why."""
    try:
        run(schema.build(composed), record, only)
    except OmegaConfBaseException as error:
        return 2, config_error(error)
    except StageFailed as error:
        mistakes = {stage: user_error(failure) for stage, failure in error.failures.items()}
        for stage, failure in error.failures.items():
            if not mistakes[stage]:
                log.error("%s", StageFailed({stage: failure}), exc_info=failure)
        code = 2 if all(mistakes.values()) else 1
        return code, next(iter(mistakes.values())) if code == 2 and len(mistakes) == 1 else str(error)
    except UserError as error:
        return 2, str(error)
    except Exception as error:  # of a sweep's job Hydra would tell only after the last
        if isinstance(error, OSError) and error.filename is not None:
            return 2, f"{error.filename}: {error.strerror}"
        log.error("unexpected", exc_info=error)
        return 1, summary(error)
    return 0, None


def run(config: PipelineConfig, record: JobRecord, only: str | None = None) -> None:
    """One pipeline run inside a Hydra job; `record` learns its config and stages. only: the one stage to run, on inputs that are there.

    Raises UserError for a config or input that cannot be used, StageFailed later.
    """
    hydra_config = HydraConfig.get()
    timings = Timings() if hydra_config.mode is RunMode.MULTIRUN else Timings.since_process_start()
    outputs = Path(config.paths.outputs).expanduser().resolve()
    store = open_store(config.paths.store, work=Path(config.paths.work or outputs / "work"))
    if config.fit.enabled:
        config = _fitted(config, store, list(hydra_config.overrides.task))
    graph = _graph(config, store)
    if only is not None:
        graph.check_ids(run_stage=[only], force=config.force)
        check_forced_alone(only, config.force)
    planned = plan(graph, store, config.force)
    if only is not None:
        planned = [alone(only, planned, list(hydra_config.overrides.task))]
    record.config, record.stages = plain(asdict(config)), {p.stage.id: str(p.folder) for p in planned}
    record.cached = sum(p.cached for p in planned)
    record.save()
    if not (config.dry_run or config.fit.enabled):
        print(stage_table(planned), flush=True)
    else:
        _show_cost(config, planned, store)
    if config.dry_run:
        return
    if config.paths.results:
        make_parent("paths.results", Path(config.paths.results))
    check_before_the_first_stage(config, planned)
    uri = config.paths.tracking_uri or sqlite_uri(outputs)
    sweep = None
    if hydra_config.mode is RunMode.MULTIRUN:
        directory = Path(hydra_config.sweep.dir).resolve()
        sweep = SweepInfo(directory, f"sweep {directory.name}", list(hydra_config.overrides.task))
    recorded = {"backlog": store.root / BACKLOG, "settings": config.tracking, "sweep": sweep}
    with Tracker.start(tracking_uri=uri, run_name=config.name, config=record.config, **recorded) as tracker:
        trust = config.model.trust_remote_code
        output_dir = Path(hydra_config.runtime.output_dir)
        with _recorded_use(store, config.name, output_dir, planned):
            try:
                execute(planned, store, tracker, config.cluster, trust_remote_code=trust, keep_going=config.keep_going, timings=timings)
            except StageFailed as failed:
                publish_failure(failed.failures, planned, store, output_dir, tracker, title=config.name, server=ui_address(uri))
                raise
        reported = planned[-1].stage.kind == "report"
        if reported:
            store.fetch(planned[-1].folder)
            publish(planned[-1].folder, output_dir, tracker, server=ui_address(uri))
            if config.paths.results:
                shutil.copy(output_dir / "results.json", config.paths.results)
        timings.write(output_dir / TIMINGS)
        tracker.log_artifact(output_dir / TIMINGS)
    if reported:
        results = read_json(output_dir / "results.json")
        print(f"\n{render_table(results['rows'])}")
    print(f"\n{timings.table()}\n")
    if reported:
        if link := link_newest(Path(results["final_model"]), outputs=outputs, name=config.name):
            print(f"model:     {link}")
        print(f"report:    {output_dir / 'report.html'}")
        print(f"MLflow UI: {ui_command(uri)}")
        print(f"results:   {output_dir / 'results.json'}", flush=True)


def _recorded_use(store: Store, name: str, folder: Path, planned: list[PlannedStage]) -> AbstractContextManager[None]:
    """So that `pipelines.store prune` takes nothing that this run needs."""
    folders = {p.stage.id: p.folder.name for p in planned}
    inputs = {p.stage.id: [source for source in p.stage.inputs.values() if source in folders] for p in planned}
    return in_use(store, run=name, folder=folder, stages=folders, results=results_of(inputs, folders))


def _fitted(config: PipelineConfig, store: Store, overrides: list[str]) -> PipelineConfig:
    from pipelines.fit_run import fit_to_answers

    def track(name: str) -> AbstractContextManager[Tracker]:
        uri = config.paths.tracking_uri or sqlite_uri(Path(config.paths.outputs).expanduser().resolve())
        recorded = {"backlog": store.root / BACKLOG, "settings": config.tracking, "config": plain(asdict(config))}
        return Tracker.start(tracking_uri=uri, run_name=name, **recorded)

    return fit_to_answers(config, store, overrides=overrides, graph_of=lambda changed: _graph(changed, store), track=track)


def _show_cost(config: PipelineConfig, planned: list[PlannedStage], store: Store) -> None:
    """The figures of a run; then, for a dry run, UserError for all that it asks for and that is not there."""
    finished = {p.stage.id: manifest for p in planned if p.cached and (manifest := store.finished(p.folder))}
    figures = forecast(config, planned, root=store.root, manifests=finished)
    print(estimate_table(planned, figures), flush=True)
    if config.dry_run and config.estimate.here and (missing := list(shortfalls(figures, root=store.root))):
        raise UserError("\n".join(missing))


def check_forced_alone(stage_id: str, force: Sequence[str]) -> None:
    """Raises UserError where `force` names a stage that is not run."""
    others = [name for name in dict.fromkeys(force) if name != stage_id]
    if others:
        commands = " && ".join(f"python -m pipelines.run_stage {name} 'force=[{name}]' ..." for name in others)
        raise UserError(f"force: run_stage runs {stage_id} and no other stage, not {', '.join(others)}; recompute that first, with: {commands}")


def alone(stage_id: str, planned: list[PlannedStage], overrides: list[str]) -> PlannedStage:
    """The one stage of a plan. Raises UserError where its inputs are not finished, with the commands that make them."""
    by_id = {p.stage.id: p for p in planned}
    missing = [source for source in dict.fromkeys(by_id[stage_id].stage.inputs.values()) if not by_id[source].cached]
    if missing:
        made_on_the_way = {source for name in missing for source in Graph(p.stage for p in planned).until(name).fingerprints if source != name}
        kept = [text for text in overrides if text.partition("=")[0] not in ("until", "force", "dry_run")]
        command = ["python", "-m", "pipelines.full_run", *kept]
        commands = [shlex.join([*command, f"until={name}"]) for name in missing if name not in made_on_the_way]
        raise UserError(f"run_stage {stage_id}: its input {', '.join(missing)} is not finished in paths.store; make it with: {' && '.join(commands)}")
    return by_id[stage_id]


def _graph(config: PipelineConfig, store: Store) -> Graph:
    try:
        graph = build_graph(config, identity_cache=store.root)
    except UserError:
        raise
    except ValueError as error:  # every section has passed its own checks: what is left is one changed by a round
        raise UserError(f"rounds: {error}") from error
    if not config.until:
        return graph
    if config.until not in graph.fingerprints:
        graph.check_ids(until=[config.until], force=config.force)
    return graph.until(config.until)


def stage_table(planned: list[PlannedStage]) -> str:
    """What will run and what is already there, one line per stage."""
    width = max(len(p.stage.id) for p in planned)
    rows = [f"{p.stage.id:<{width}}  {'cached' if p.cached else 'to run':<7} {p.fingerprint}" for p in planned]
    return "\n".join([f"{'stage':<{width}}  {'state':<7} fingerprint", *rows])


def _refuse(message: str, *, code: int = 2, of: str = "") -> int:
    for line in redacted(message).splitlines():
        print(f"error: {of}{line}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
