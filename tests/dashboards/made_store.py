"""A small store and tracking database as a pipeline leaves them, made by the stages' own writers in a second or two; no Ray, no training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from tasks import artifacts, trajectory_files
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
from tasks.pack_sequences import PackConfig
from tasks.pack_sequences import run as pack
from tasks.stage import StageContext
from tests.results import ar_row, row, trained_row
from tests.tasks.tiny_stage import build_base, build_prompts, collect_shards

BLOCK = 8
STAGES = {  # stage id -> folder in the store
    "prompts": "prompts-00000000000000aa",
    "base": "base-00000000000000bb",
    "base/evaluate": "evaluate-00000000000000cc",
    "round1/trajectories": "trajectories-00000000000000dd",
    "round1/pack": "pack-00000000000000ee",
    "round1/distill": "distill-00000000000000ff",
    "round1/evaluate": "evaluate-0000000000000011",
}
UPSTREAM = {"round1/trajectories": {"prompts": "prompts", "model": "base"}, "round1/pack": {"trajectories": "round1/trajectories"}}
METRICS = {"trajectories": {"prompts": 8, "answer_tokens": 200}, "pack": {"rows": 2, "tokens": 400}, "distill": {"steps": 3, "train_tokens": 3000}}
ACCEPTED = {"base": {"1": 30, "2": 10}, "round1": {"1": 10, "3": 10, "9": 20}}


@dataclass(frozen=True)
class Made:
    """Where it all is: `<outputs>/store`, `<outputs>/mlflow.db`."""

    outputs: Path

    def stage(self, stage_id: str) -> Path:
        return self.outputs / "store" / STAGES[stage_id]

    @property
    def tracking_uri(self) -> str:
        return f"sqlite:///{self.outputs / 'mlflow.db'}"


def results() -> dict:
    rows = [ar_row(), row(), ar_row(model="round1"), trained_row("round1", 8, 3.0, accuracy=0.9), trained_row("round1", 16, 4.0, accuracy=0.9)]
    curve = {"batch_size": 1, "context": 128, "tokens": [1, 2, 4, 8], "seconds": [0.002, 0.002, 0.003, 0.005], "beside": 0.0}
    latency = {"curves": [curve | {"knee": 2.0, "free_tokens": 2}]}
    return {"schema_version": 1, "experiment": "tiny", "rows": rows, "latency": latency}


def make_store(outputs: Path) -> Made:
    """Every stage that the app reads; trajectories and packed rows are those of a random tiny model."""
    made = Made(outputs)
    for stage_id in STAGES:
        made.stage(stage_id).mkdir(parents=True)
    build_prompts(made.stage("prompts"))
    build_base(made.stage("base"), made.stage("prompts") / "tokenizer")
    inputs = {"prompts": made.stage("prompts"), "model": made.stage("base")}
    config = GenerateTrajectoriesConfig(block_size=BLOCK, max_new_tokens=28, shard_size=4)
    collect_shards(config, inputs, made.stage("round1/trajectories"), range(2))
    settings = PackConfig(max_length=256, schedule=NoiseSchedule(kind="linear", window=2))
    pack(settings, {"trajectories": made.stage("round1/trajectories")}, made.stage("round1/pack"), StageContext())
    curves = [{"step": s, "loss": 3 / s, "consistency": 2 / s, "ar": 0.1, "tokens": 1000 * s} for s in (1, 2, 3)]
    probes = [{"step": s, "tpf": 1.0 + s, "equal_to_teacher": 1.0, "distinct_2": 0.5, "eos_rate": 0.75} for s in (0, 2)]
    artifacts.write_json(made.stage("round1/distill") / "training.json", {"curves": curves, "probes": probes})
    for model, lengths in ACCEPTED.items():
        evaluation = {"model": model, "benchmark": "minicode", "accepted_lengths": {"ar@1": {"1": 50}, "jacobi@16": lengths, "jacobi@16x4": lengths}}
        artifacts.write_json(made.stage(f"{model}/evaluate") / "evaluation.json", evaluation)
    for stage_id, folder in STAGES.items():
        upstream = {name: fingerprint_of(upstream_id) for name, upstream_id in UPSTREAM.get(stage_id, {}).items()}
        kind, _, fingerprint = folder.rpartition("-")
        manifest = {"stage": stage_id, "kind": kind, "version": 1, "fingerprint": fingerprint, "config": {"seed": 0}, "upstream": upstream}
        manifest |= {"metrics": METRICS.get(kind, {}), "started": "2026-01-01T00:00:00+00:00", "seconds": 2.5, "git_sha": "c0ffee"}
        manifest["mlflow_run_id"] = "run" + stage_id.replace("/", "")
        artifacts.write_json(made.outputs / "store" / folder / "manifest.json", manifest)
    return made


def fingerprint_of(stage_id: str) -> str:
    return STAGES[stage_id].rpartition("-")[2]


def part_of(made: Made) -> Path:
    return trajectory_files.trajectory_parts(made.stage("round1/trajectories"))[0]


def write_results(client, run_id: str) -> None:
    """As the report stage leaves them in the run."""
    client.log_text(run_id, json.dumps(results()), "report/results.json")
