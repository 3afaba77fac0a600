"""What a run did and what it took, stage by stage, as HTML; links to the stages' runs in MLflow are added when the page is published."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dashboards.table import html_table

Record = Mapping[str, Any]

_TOKENS = {"trajectories": ("answer_tokens", "decoded"), "pack": ("tokens", "packed"), "distill": ("train_tokens", "trained on")}
_HEADLINES = 3  # a stage returns its most telling figures first
_RUN = re.compile(r'<span data-run="(\w+)">([^<]+)</span>')
LEGEND = (
    "Seconds are those of the run that computed the stage, at the time given; a stage found in the store took none here. Tokens: answer tokens "
    "decoded for training, packed tokens (prompt, noisy and clean copies), packed tokens trained on. A name that is a link leads to the stage's run, "
    "while MLflow's UI or server runs."
)


def costs(stages: Sequence[Record]) -> str:
    """The table, what it adds up to, and every setting.

    Args:
        stages: of excerpts.json.
    """
    if not stages:
        return "<p class=note>What the stages took is not recorded for this run.</p>"
    columns = [
        ("stage", lambda s: s["stage"], True),
        ("seconds", lambda s: f"{s['seconds']:,.1f}", False),
        ("tokens", _tokens, False),
        ("result", _headline, True),
        ("computed (UTC)", lambda s: str(s["started"])[:16].replace("T", " "), True),
        ("commit", lambda s: (s["git_sha"] or "-")[:7], True),
        ("folder in the store", lambda s: s["folder"], True),
    ]
    table = html_table(stages, columns)
    for stage in stages:  # the name is what leads to its run
        name = escape(stage["stage"])
        run = stage["mlflow_run_id"]
        if run and run.isalnum():  # one that waited for its store to come back has no id here
            table = table.replace(f"<td class=left>{name}</td>", f'<td class=left><span data-run="{run}">{name}</span></td>', 1)
    settings = "".join(f"<h3>{escape(s['stage'])}</h3><pre>{escape(_settings(s['config']))}</pre>" for s in stages)
    return (
        f"<p>{escape(_sums(stages))}</p><div class=wide tabindex=0>{table}</div><p class=note>{escape(LEGEND)}</p>"
        f"<details><summary>Every setting of every stage</summary>{settings}</details>"
    )


def link_runs(page: str, server: str) -> str:
    """A published page: the stages' names lead to their runs at the MLflow server of this address."""
    address = escape(server.rstrip("/"), quote=True)
    return _RUN.sub(rf'<a href="{address}/#/runs/\1">\2</a>', page)


def _sums(stages: Sequence[Record]) -> str:
    seconds = sum(s["seconds"] for s in stages)
    parts = [f"{len(stages)} stage{'s' * (len(stages) != 1)}, {_duration(seconds)} of work in all"]
    for kind, (key, what) in _TOKENS.items():
        of_kind = [s["metrics"].get(key, 0) for s in stages if s["kind"] == kind]
        if of_kind:
            parts.append(f"{sum(of_kind):,.0f} tokens {what}")
    return "; ".join(parts) + "."


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _tokens(stage: Record) -> str:
    key, _ = _TOKENS.get(stage["kind"], ("", ""))
    return f"{stage['metrics'][key]:,.0f}" if key in stage["metrics"] else "-"


def _headline(stage: Record) -> str:
    told = list(stage["metrics"].items())[:_HEADLINES]
    return ", ".join(f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}" for name, value in told)


def _settings(config: Record, prefix: str = "") -> str:
    lines = []
    for key, value in config.items():
        lines.append(_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else f"{prefix}{key} = {value}")
    return "\n".join(lines) or "none"
