"""What an experiment file becomes: every one composes, stage ids, and which settings reach which fingerprints. Nothing is run."""

import dataclasses
import functools
import pickle
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from pipelines.stages import build_graph
from tasks.stage import UserError
from tests.pipelines.configs import built

EXPERIMENTS = sorted(path.stem for path in (Path(__file__).parents[2] / "conf" / "experiment").glob("*.yaml"))
EVALUATION = ("answers", "speed", "evaluate")
ROUND = ("trajectories", "pack", "distill", "export", *EVALUATION)
SHARED = {"prompts", "base", *(f"base/{stage}" for stage in EVALUATION)}  # what no setting of a round reaches
LAST = ["excerpts", "report"]
SMALL = ["experiment=smoke", "baselines=[cllm]"]


@pytest.fixture
def graph(tmp_path: Path):
    """overrides -> the stage graph."""
    return lambda *overrides: build_graph(built(*overrides), identity_cache=tmp_path)


@functools.cache
def unchanged(graph) -> Mapping[str, str]:
    """Composing is what takes the time: once per test."""
    return graph(*SMALL).fingerprints


def changed(graph, *overrides: str) -> set[str]:
    """Stages whose fingerprints the overrides change."""
    before, after = unchanged(graph), graph(*SMALL, *overrides).fingerprints
    assert before.keys() == after.keys()
    return {stage for stage in before if before[stage] != after[stage]}


def test_experiments_are_there():
    assert {"quickstart", "smoke"} <= set(EXPERIMENTS)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_builds_a_graph(graph, experiment: str, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text("")
    own = [f"model.path={tmp_path}", f"data.path={tmp_path}/prompts.jsonl"] if experiment == "convert" else []
    stages = graph(f"experiment={experiment}", *own).stages
    assert stages[0].id == "prompts"
    assert stages[-1].id == "report"


@pytest.mark.parametrize(
    ("recipe", "model", "benchmarks"),
    [
        ("paper_coder_7b", "Qwen/Qwen2.5-Coder-7B-Instruct", ["human_eval", "mbpp"]),
        ("paper_math_7b", "Qwen/Qwen2.5-Math-7B-Instruct", ["gsm8k", "math500"]),
    ],
)
def test_the_recipes_say_what_the_paper_says(recipe: str, model: str, benchmarks: list[str]):
    config = built(f"experiment={recipe}")
    assert config.model.path == model and config.data.train == 450_000
    assert [(r.block_size, r.window, r.max_steps) for r in config.rounds] == [(16, 16, 10_000), (32, 8, 10_000)]
    assert (config.distill.learning_rate, config.distill.batch_size, config.noise_schedule) == (1e-6, 4, "linear")
    assert (config.distill.warmup_share, config.distill.lr_schedule.value, config.distill.ar_weight) == (0.03, "cosine", 1.0)
    assert (config.schedule.t_min, config.schedule.t_max) == (0.0, 1.0)
    assert config.trajectories.max_new_tokens == 2048 and config.trajectories.prompts is None
    assert config.evaluate.max_new_tokens == 2048
    assert config.pack.max_length == 2 * 2048 + config.data.max_prompt_tokens
    assert [b.value for b in config.baselines] == ["cllm"]
    assert [b.name.value for b in config.evaluate.benchmarks] == benchmarks
    settings = {(s.method.value, s.block_size): s for s in config.evaluate.settings()}
    assert set(settings) == {("ar", 1), ("jacobi", 128), ("mr", 64)}
    mr = settings["mr", 64]
    assert (mr.max_blocks, mr.spawn_ratio, mr.verification_size) == (2, 0.85, 4)
    assert (config.cluster.workers, config.cluster.ranks, config.cluster.gpus_per_worker) == (8, 4, 1)


def test_recipes_read_their_own_data():
    coder, math = built("experiment=paper_coder_7b").data, built("experiment=paper_math_7b").data
    assert (coder.source.value, coder.path, coder.open_code_instruct.min_test_score) == ("open_code_instruct", "nvidia/OpenCodeInstruct", 1.0)
    assert coder.open_code_instruct.min_judge_score is None
    assert (math.source.value, math.path) == ("open_thoughts", "open-thoughts/OpenThoughts2-1M")
    assert math.open_thoughts_sources == ["automath", "nvidia_math"]


def test_a_cluster_is_a_group_and_its_fields_are_settings():
    def places(*overrides: str) -> tuple:
        cluster = built("experiment=smoke", "distill.batch_size=8", *overrides).cluster
        return cluster.workers, cluster.ranks, cluster.gpus_per_worker, cluster.address

    assert places() == (2, 2, 0, None)
    assert places("cluster=node_8gpu") == (8, 4, 1, None)
    assert places("cluster=node_8gpu", "cluster.workers=4") == (4, 4, 1, None)
    assert places("cluster=nodes", "cluster.workers=32") == (32, 4, 1, "auto")
    assert places("cluster.workers=1") == (1, 1, 0, None)
    recipe = built("experiment=paper_math_7b", "cluster=nodes", "cluster.address=10.0.0.1:6379").cluster
    assert (recipe.workers, recipe.address) == (16, "10.0.0.1:6379")  # what a recipe asks for is no more than a default


def test_fewer_may_train_than_generate():
    with pytest.raises(UserError, match=r"batch_size=4 is not divisible by cluster.workers=8 .* fewer train \(cluster.train_workers\)"):
        built("experiment=paper_coder_7b", "cluster.train_workers=null")
    with pytest.raises(UserError, match="cluster.train_workers must be between 1 and cluster.workers=8, got 9"):
        built("experiment=paper_coder_7b", "cluster.train_workers=9")


def test_the_command_in_an_experiment_file_names_it():
    for experiment in EXPERIMENTS:
        text = (Path(__file__).parents[2] / "conf" / "experiment" / f"{experiment}.yaml").read_text()
        assert f"python -m pipelines.full_run experiment={experiment}" in text


def test_stage_ids(graph):
    expected = ["prompts", "base", *(f"base/{stage}" for stage in EVALUATION)]
    expected += [f"round{number}/{stage}" for number in (1, 2) for stage in ROUND]
    expected += [f"cllm/{stage}" for stage in ROUND[1:]]
    assert [stage.id for stage in graph(*SMALL).stages] == [*expected, *LAST]


def test_rounds_follow_each_other_and_cllm_branches_off_the_first(graph):
    inputs = {stage.id: stage.inputs for stage in graph(*SMALL).stages}
    assert inputs["round1/trajectories"]["model"] == inputs["round1/distill"]["model"] == "base"
    assert inputs["round2/trajectories"]["model"] == inputs["round2/distill"]["model"] == "round1/export"
    assert inputs["cllm/pack"]["trajectories"] == "round1/trajectories"
    assert inputs["cllm/distill"]["model"] == "base"
    budget = {name: source for name, source in inputs["cllm/distill"].items() if name.startswith("budget/")}
    assert budget == {"budget/round1": "round1/pack", "budget/round2": "round2/pack"}  # so it trains beside round 2
    assert inputs["report"]["export/final"] == "round2/export"
    assert [*inputs["excerpts"].values()] == [stage for stage in inputs if stage not in LAST]
    assert not {"round1/trajectories", "round1/pack", "base"} & {*inputs["report"].values()}  # of a finished run they may be pruned


def test_nothing_depends_on_what_makes_the_report(graph):
    read = {source for stage in graph(*SMALL).stages if stage.id not in LAST for source in stage.inputs.values()}
    assert not {*LAST} & read


def test_what_is_timed_says_that_it_must_be_alone(graph):
    stages = graph(*SMALL, "tune=true", "evaluate.benchmarks=[{name: gsm8k}]").stages
    alone = {stage.kind for stage in stages if stage.needs.alone}
    assert alone == {"speed", "latency", "search"}
    assert all(stage.needs.alone and stage.needs.here for stage in stages if stage.kind in alone)


def test_a_sweep_over_schedules_shares_all_up_to_the_trajectories(graph):
    graphs = [graph(*SMALL, f"noise_schedule={kind}").fingerprints for kind in ("linear", "random", "reverse")]
    for stage in graphs[0]:
        distinct = len({fingerprints[stage] for fingerprints in graphs})
        if stage in SHARED | {"round1/trajectories", "cllm/pack"}:
            assert distinct == 1, stage
        else:
            assert distinct == 3, stage


@pytest.mark.parametrize(
    "override",
    [
        "cluster.workers=1",
        "cluster.num_cpus=16",
        "cluster.threads_per_worker=2",
        "paths.outputs=elsewhere",
        "paths.store=elsewhere",
        "paths.results=elsewhere.json",
        "paths.tracking_uri=http://localhost:1",
        "distill.checkpoint_every=4",
        "evaluate.distributed=true",
        "evaluate.sandbox.workers=7",
        "force=[base]",
        "dry_run=true",
    ],
)
def test_what_cannot_change_a_result_is_in_no_fingerprint(graph, override: str):
    assert changed(graph, override) == set()


def test_what_can_change_a_result_reaches_exactly_what_depends_on_it(graph):
    everything = set(graph(*SMALL).fingerprints)
    second = {f"round2/{stage}" for stage in ROUND}
    cllm = {"cllm/distill", "cllm/export", *(f"cllm/{stage}" for stage in EVALUATION)}  # its token budget comes from the rounds
    answers, speed, scores = ({stage for stage in everything if stage.endswith(f"/{kind}")} for kind in EVALUATION)
    assert changed(graph, "seed=1") == everything
    assert changed(graph, "data.train=65") == everything
    assert changed(graph, "model.pretrain.steps=31") == everything
    assert changed(graph, "rounds.0.block_size=8") == everything - SHARED
    assert changed(graph, "rounds.0.window=2") == everything - SHARED - {"round1/trajectories", "cllm/pack"}
    assert changed(graph, "rounds.1.block_size=8") == second | cllm | {*LAST}
    trained = second - {"round2/trajectories", "round2/pack"}
    assert changed(graph, "rounds.1.learning_rate=0.1") == trained | {*LAST}
    for longer in ("epochs=9", "max_steps=77"):
        assert changed(graph, f"rounds.1.{longer}") == trained | cllm | {*LAST}
    assert changed(graph, "trajectories.max_new_tokens=41") == everything - SHARED
    assert changed(graph, "distill.batch_size=4") == everything - SHARED - {"round1/trajectories", "round1/pack", "cllm/pack"}
    assert changed(graph, "evaluate.max_new_tokens=41") == answers | speed | scores | {*LAST}
    assert changed(graph, "evaluate.accuracy_prompts=9") == changed(graph, "evaluate.batch_size=3") == answers | scores | {*LAST}
    for timed in ("speed_prompts=2", "block_sizes=[4]", "methods=[mr]", "batch_sizes=[1,4]", "references=[]", "seed=7"):
        assert changed(graph, f"evaluate.{timed}") == speed | scores | {*LAST}, timed  # no answer is decoded again
    assert changed(graph, "evaluate.sandbox.cpu_s=7") == scores | {*LAST}  # decoded once, judged again
    assert changed(graph, "name=other") == {"report"}


def test_tuning_is_asked_for_and_knows_its_machine(graph, monkeypatch):
    tuned = (*SMALL, "tune=true", "data.validation=4")
    plain, found = graph(*SMALL, "data.validation=4"), graph(*tuned)
    assert [stage.id for stage in found.stages if stage.id not in plain.fingerprints] == ["latency", "search", "final"]
    search = next(stage for stage in found.stages if stage.id == "search")
    assert search.inputs["model"] == "round2/export" and found.stages[-1].inputs["export/final"] == "final"
    monkeypatch.setattr("pipelines.stages.machine_identity", lambda: {"cpu": "another"})
    moved = graph(*tuned).fingerprints
    timed = {name for name in moved if name.endswith(("/speed", "/evaluate"))}  # what a model answers is the same everywhere
    assert {name for name in moved if moved[name] != found.fingerprints[name]} == timed | {"latency", "search", "final", *LAST}


def test_a_prompt_file_is_known_by_its_content(graph, tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    fingerprints = []
    for name, text in (("a", "one"), ("b", "one"), ("c", "two")):
        (tmp_path / name).write_text(text)
        settings = ["data.source=file", f"data.path={tmp_path / name}", f"model.path={model}"]
        fingerprints.append(graph(*SMALL, *settings).fingerprints["prompts"])
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_stage_configs_are_dataclasses_that_load_without_hydra(graph, tmp_path: Path):
    configs = {stage.id: stage.config for stage in graph(*SMALL).stages}
    assert all(dataclasses.is_dataclass(config) for config in configs.values())
    (tmp_path / "configs").write_bytes(pickle.dumps(configs))
    code = (
        "import pickle, sys; c = pickle.load(open(sys.argv[1], 'rb')); print(len(c), sorted({'hydra', 'omegaconf', 'pipelines'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "configs")], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == [str(len(configs)), "[]"]


def test_a_dry_run_imports_nothing_heavy_and_writes_no_stage(tmp_path: Path):
    code = f"""
import sys
from pipelines import full_run
sys.argv = ["full_run", "dry_run=true", "experiment=smoke", "paths.outputs={tmp_path}/out", "paths.store={tmp_path}/store"]
assert full_run.main() == 0
print(sorted({{"torch", "ray", "mlflow", "transformers"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    *table, heavy = done.stdout.splitlines()
    assert heavy == "[]"
    assert table[0].split() == ["stage", "state", "rows", "tokens", "GPUs", "GB", "each", "disk", "GB", "hours", "GPU-hours", "basis", "fingerprint"]
    assert [line.split()[0] for line in table[1:3]] == ["prompts", "base"]
    stages = table[1 : table.index("")]
    assert stages[-1].startswith("report") and all("to run" in line for line in stages)
    assert not [path for path in (tmp_path / "store").iterdir() if not path.name.startswith(".")]
    assert not (tmp_path / "out" / "mlflow.db").exists()
