"""Before a run that is fitted to the model's answers: measure them, once per model and prompts, and fill in what is open.

The measurement is the stage `answer_lengths`, kept in the store like any other; `until=answer_lengths` runs it alone. The graph is static once
the config is composed, so what rests on the measurement is composed after it: this runs the first stages of the very graph that follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from pipelines import fit
from pipelines.config import schema
from pipelines.config.schema import PipelineConfig
from pipelines.estimate.forecast import train_prompts
from pipelines.graph.dag import Graph, plan
from pipelines.graph.execute import execute
from pipelines.store import Store
from tasks.artifacts import read_json
from tasks.measure_answers import FILE

if TYPE_CHECKING:
    from pipelines.tracking.tracker import Tracker


def fit_to_answers(
    config: PipelineConfig,
    store: Store,
    *,
    overrides: Sequence[str],
    graph_of: Callable[[PipelineConfig], Graph],
    track: Callable[[str], AbstractContextManager[Tracker]],
) -> PipelineConfig:
    """The config as it will run; prints what was fitted, and why. track: opens a run of that name in MLflow.

    A dry run measures nothing: without an earlier measurement it shows what lengths that are assumed would give. Raises UserError for what
    the user has set himself where it does not fit the rest.
    """
    given = fit.given_names(overrides, config, PipelineConfig())
    config, told = fit.fitted(config, fit.assumed_lengths(config, train_prompts(config)), given=given)
    planned = plan(graph_of(dataclasses.replace(config, until=fit.STAGE)), store)
    last = planned[-1]
    if not last.cached and not config.dry_run:
        print("the model's answers to a few prompts are measured first", flush=True)
        with track(f"{config.name}: {fit.STAGE}") as tracker:
            execute(planned, store, tracker, config.cluster, trust_remote_code=config.model.trust_remote_code)
    measured = store.finished(last.folder)
    if measured is None:
        print(f"answers of this model to these prompts have not been measured (until={fit.STAGE} does); fitted to assumed ones:")
    else:
        store.fetch(last.folder)
        prompts = store.finished(last.inputs["prompts"])
        assert prompts is not None, "what was measured rests on it"
        config, told = fit.fitted(config, fit.read_lengths(read_json(last.folder / FILE), prompts.metrics), given=given)
        print("fitted to the model's answers:")
    print(fit.said(told), end="\n\n", flush=True)
    schema.check_fitted(config)
    return config
