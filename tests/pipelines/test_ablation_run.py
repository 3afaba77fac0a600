"""An ablation of two small cells, from outside: the command of its file, the table it ends in, and the same sweep again with a job that fails."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.tracking import mlflow_runs
from pipelines.tracking.tracker import sqlite_uri

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SMALL = [
    *("data.train=64", "data.test=8", "rounds.0.window=4"),
    *(f"model.pretrain.{size}" for size in ("hidden_size=32", "intermediate_size=64", "layers=2", "heads=2", "kv_heads=1", "steps=30")),
    *("trajectories.prompts=64", "trajectories.max_new_tokens=40", "trajectories.shard_size=16"),
    *("distill.max_steps=4", "distill.checkpoint_every=4", "distill.log_every=2"),
    *("evaluate.accuracy_prompts=8", "evaluate.speed_prompts=2", "evaluate.max_new_tokens=40", "evaluate.block_sizes=[16]"),
]


def sweep(folder: Path, *overrides: str) -> tuple[int, str]:
    """Exit code and output."""
    command = [sys.executable, "-m", "pipelines.full_run", *overrides, *SMALL, f"paths.outputs={folder}/out", f"paths.store={folder}/store"]
    done = subprocess.run(command, cwd=folder, env=dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=500)
    return done.returncode, done.stdout


def table(printed: str) -> tuple[Path, dict]:
    page = Path(re.search(r"^sweep: +(\S+)$", printed, re.MULTILINE)[1])
    return page, json.loads(page.with_suffix(".json").read_text())


def test_the_two_masks_and_again_with_a_job_that_fails(tmp_path: Path):
    code, printed = sweep(tmp_path, "experiment=ablate_mask")
    assert code == 0, printed[-3000:]
    for shared in ("base", "round1/trajectories", "round1/pack"):
        assert printed.count(f"{shared}: running") == 1
    assert printed.count("round1/distill: running") == 2
    page, content = table(printed)
    base, nc, nc_ic = content["rows"]
    assert base["number"] is None
    assert [(row["settings"], row["paper"]["speedup"]) for row in (nc, nc_ic)] == [({"distill.mask": "nc"}, 3.6), ({"distill.mask": "nc_ic"}, 1.9)]
    assert nc["train_tokens"] == nc_ic["train_tokens"] > 0
    assert nc["noise"] == nc_ic["noise"] and sum(nc["noise"]["counts"]) > 0
    assert "Every job trained on the same number of packed tokens" in page.with_suffix(".md").read_text()
    client = mlflow_runs.connect(sqlite_uri(tmp_path / "out"))
    run_id = json.loads((page.parent / "mlflow_sweep.json").read_text())["run_id"]
    assert {Path(item.path).name for item in client.list_artifacts(run_id, "sweep")} == {"sweep.md", "sweep.html", "sweep.json"}

    code, printed = sweep(tmp_path, "-m", "experiment=ablation", "distill.mask=nc,nc_ic", "until=null,nothing")
    assert code == 2
    assert ": running" not in re.sub(r"report: running", "", printed)
    _, content = table(printed)
    errors = [row["error"] for row in content["rows"]]
    assert [error is None for error in errors] == [True, True, False, True, False]
    assert "until: no stage 'nothing'" in errors[2]
