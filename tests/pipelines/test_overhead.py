"""What a run costs that has nothing to compute: no Ray, no torch, seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from pipelines.stages import build_graph
from pipelines.store import Manifest, open_store, plain
from tests.pipelines.configs import built

REPOSITORY = Path(__file__).parents[2]
CPU_SECONDS = 15
RUN = """
import resource, sys
from pipelines import full_run
code = full_run.main()
used = resource.getrusage(resource.RUSAGE_SELF)
print("imported:", *sorted({"torch", "ray", "transformers"} & set(sys.modules)))
print("cpu seconds:", used.ru_utime + used.ru_stime)
sys.exit(code)
"""


def finish_everything(folder: Path) -> int:
    """Commits a quickstart's stages without running one; their number."""
    config = built("experiment=quickstart")
    store = open_store(str(folder / "outputs" / "store"), work=folder / "outputs" / "work")
    graph = build_graph(config, identity_cache=store.root)
    for stage in graph.stages:
        place = store.folder(stage.kind, graph.fingerprints[stage.id])
        with store.claim(graph.fingerprints[stage.id]):
            store.prepare(place, resume=False)
            if stage.kind == "report":
                (place / "results.json").write_text(json.dumps({"rows": [], "final_model": str(place)}))
                (place / "results.md").write_text("")
                (place / "report.html").write_text("")
            manifest = Manifest(
                stage=stage.id,
                kind=stage.kind,
                version=stage.version,
                fingerprint=graph.fingerprints[stage.id],
                config=plain(stage.config),
                upstream={name: graph.fingerprints[source] for name, source in stage.inputs.items()},
                external=plain(stage.external),
                metrics={"accuracy": 0.5},
                started="2026-01-01T00:00:00+00:00",
                seconds=1.0,
                mlflow_run_id=None,
                git_sha=None,
            )
            store.commit(place, manifest)
    return len(graph.stages)


def test_a_cached_pipeline_imports_neither_ray_nor_torch_and_tells_where_its_seconds_went(tmp_path: Path):
    stages = finish_everything(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-c", RUN, "experiment=quickstart"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": cached") == stages
    lines = done.stdout.splitlines()
    assert lines[-2] == "imported:"
    assert float(lines[-1].removeprefix("cpu seconds: ")) < CPU_SECONDS
    (timings,) = (json.loads(path.read_text()) for path in tmp_path.glob("outputs/runs/*/*/timings.json"))
    run = timings["run"]
    assert len(timings["stages"]) == stages
    assert (run["useful"], run["start_up"], run["waited"]) == (0, 0, 0)
    assert 0.8 * run["seconds"] < run["ours"] <= run["seconds"] + 0.1  # nothing of the wall time is left out
    assert f"{stages} cached" in done.stdout
