"""Every mistake a user can make is one line on stderr that names the field or file, a non-zero exit, and costs nothing finished.

Most run `full_run.main` in this process; the two ways of running that matter are also seen from outside.
"""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from ray.exceptions import ActorDiedError, RayTaskError, UserCodeException
from ray.train import WorkerGroupError

from pipelines import full_run
from pipelines.errors import summary, user_error
from pipelines.store import MANIFEST
from tasks.base_model import stage as base_stage
from tasks.stage import UserError


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all tests here: making a tracking database takes seconds."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, outputs: Path, tmp_path: Path):
    """Runs the pipeline on overrides; (exit code, lines on stderr)."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*overrides: str) -> tuple[int, list[str]]:
        GlobalHydra.instance().clear()
        defaults = ["experiment=smoke", f"paths.outputs={outputs}", f"paths.store={tmp_path / 'store'}"]
        named = {override.partition("=")[0] for override in overrides}
        monkeypatch.setattr(sys, "argv", ["full_run", *overrides, *(d for d in defaults if d.partition("=")[0] not in named)])
        capsys.readouterr()
        code = full_run.main()
        return code, capsys.readouterr().err.splitlines()

    yield run
    for handler in root.handlers[:]:  # Hydra's, which hold this test's captured stdout
        if handler not in handlers:
            root.removeHandler(handler)
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


def refused(result: tuple[int, list[str]]) -> str:
    code, lines = result
    assert code == 2
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


CONFIG_MISTAKES = {
    "evaluate.temperature=0.5,": "evaluate.temperature=0.5,: mismatched input",
    # what no comparison finds
    "distill.learning_rate=nan": "distill.learning_rate must be a number, got nan",
    "rounds.0.learning_rate=nan": "rounds.0.learning_rate must be a number, got nan",
    "tracking.wait_at_end=nan": "tracking.wait_at_end must be a number, got nan",
    # unknown names, with what was probably meant
    "nois_schedule=random": "nois_schedule: no such setting; nearest: noise_schedule",
    "distil.epochs=1": "distil: no such setting; nearest: distill",
    "distill.batchsize=1": "distill.batchsize: no such setting; nearest: distill.batch_size",
    "rounds.0.blocksize=8": "rounds.0.blocksize: no such setting; nearest: rounds.0.block_size",
    "model.pretrain.layer=2": "model.pretrain.layer: no such setting; nearest: model.pretrain.layers",
    "evaluate.block_size=8": "evaluate.block_size: no such setting; nearest: evaluate.block_sizes",
    "window=8": "window: no such setting; nearest: rounds.0.window",
    "qqqqqq=1": "qqqqqq: no such setting; known here: name, seed",
    "rounds=[{block_size:8,windw:1}]": "rounds.0.windw: no such setting; nearest: rounds.0.window",
    "rounds=[{block_size:8},{window:x}]": "rounds.1.window: Value 'x' of type 'str' could not be converted to Integer",
    "distill.probe.evry=1": "distill.probe.evry: no such setting; nearest: distill.probe.every",
    "evaluate.benchmarks=[{name:minicode_long,pth:x}]": "evaluate.benchmarks.0.pth: no such setting; nearest: evaluate.benchmarks.0.path",
    "+nois_schedule=random": "nois_schedule: no such setting; nearest: noise_schedule",
    "+distill.batchsize=1": "distill.batchsize: no such setting; nearest: distill.batch_size",
    "experiment=smok": "experiment=smok: no such config; available: ablate_mask, ablate_mask_paper, ",
    "until=round1/distil": "until: no stage 'round1/distil' in this run; nearest: round1/distill",
    "force=[evaluate]": "force: no stage 'evaluate' in this run; nearest: base/evaluate",
    # values out of range
    "rounds.0.block_size=0": "rounds.0.block_size must be above 0, got 0",
    "rounds.1.window=0": "rounds.1.window must be above 0, got 0",
    "rounds.0.learning_rate=-1": "rounds.0.learning_rate must be above 0, got -1.0",
    "rounds.0.t_min=2": "rounds: t_min and t_max must satisfy 0 <= t_min <= t_max <= 1, got t_min=2.0",
    "rounds=[]": "rounds: at least one round is needed",
    "distill.epochs=0": "distill.epochs must be above 0",
    "trajectories.batch_size=0": "trajectories.batch_size must be at least 1",
    "model.pretrain.layers=0": "model.pretrain.layers: must be at least 1",
    "pack.max_length=0": "pack.max_length must be at least 1",
    "evaluate.sandbox.cpu_s=0": "evaluate.sandbox.cpu_s must be positive",
    "evaluate.block_sizes=[0]": "evaluate.block_size must be at least 1",
    "data.test=0": "data.test=0 leaves nothing to evaluate on",
    "data.train=0": "data.train is missing",
    "tune=true data.validation=0": "data.validation=0 leaves nothing to measure on; raise it or choose another search.split",
    "search.heldout_split=validation": "search.heldout_split must be another split",
    "evaluate.split=tst": "evaluate.split=tst: there is no such split; choose one of train, validation, test",
    "evaluate.sandbox.allow_code_execution=false": "evaluate.sandbox.allow_code_execution is false",
    # wrong kinds of value
    "noise_schedule=zigzag": "noise_schedule=zigzag: no such schedule; known: linear, random, reverse, cllm, or your own as package.module:function",
    "rounds.1.noise_schedule=zigzag": "rounds.1.noise_schedule=zigzag: no such schedule; known: linear, random, reverse, cllm, or your own",
    "noise_schedule=no_such_module:ramp": "noise_schedule=no_such_module:ramp: cannot be imported (ModuleNotFoundError: No module",
    "rounds.1.noise_schedule=math.pi": "noise_schedule=math.pi: is a float, not a function",
    "pack.too_long=keep": "pack.too_long: Invalid value 'keep', expected one of [drop, split]",
    "rounds.0.block_size=abc": "rounds.0.block_size: Value 'abc' of type 'str' could not be converted to Integer",
    "baselines=[clm]": "baselines.0: Invalid value 'clm', expected one of [cllm]",
    "rounds.7.window=2": "rounds.7: there is no such entry to change; give the list as a whole",
    "model=some/folder": "model: is a group of settings, not one value; set one of them: model.path, ",
    "name=${nothing}": "name: Interpolation key 'nothing' not found",
    "seed": "Error parsing override 'seed': missing EQUAL",
    # what does not go together
    "rounds.0.window=4": "rounds.0.window=4 is more than the 3 blocks of rounds.0.block_size=16 in the longest answer "
    "(trajectories.max_new_tokens=40): set it to 3 or less",
    "rounds.1.block_size=41": "rounds.1.block_size=41 is longer than any answer (trajectories.max_new_tokens=40)",
    "pack.max_length=79": "pack.max_length=79: an answer of trajectories.max_new_tokens=40 takes twice its tokens in a row, 80 and its prompt",
    "pack.max_length=71 pack.too_long=split": "pack.max_length=71: the last piece of an answer of trajectories.max_new_tokens=40 takes 72 tokens",
    "distill.batch_size=66": "distill.batch_size=66 rows make one step, and data.train=64 prompts give no more rows than that",
    "rounds.1.prompts=6": "distill.batch_size=8 rows make one step, and rounds.1.prompts=6 prompts give no more rows than that",
    "data.max_prompt_tokens=2000 trajectories.max_new_tokens=49": "trajectories.max_new_tokens=49: with a prompt of data.max_prompt_tokens=2000 "
    "that is 2049 tokens, more than the model holds (model.pretrain.max_positions=2048): set it to 48 or less",
    "evaluate.max_new_tokens=1537": "evaluate.max_new_tokens=1537: with a prompt of data.max_prompt_tokens=512 that is 2049 tokens",
    "distill.probe.max_new_tokens=2048": "distill.probe.max_new_tokens=2048 leaves no room for a prompt",
    "evaluate.block_sizes=[16,4096]": "evaluate.block_sizes=4096 is longer than the model's context (2048 tokens",
    "evaluate.block_sizes=[41,64]": "evaluate.block_sizes=[41, 64]: every one is longer than the answers (evaluate.max_new_tokens=40)",
    # what the cluster cannot do
    "cluster.workers=0": "cluster.workers must be at least 1",
    "cluster.workers=99 distill.batch_size=99 data.train=200": "cluster.workers=99 needs 100 CPUs",
    "distill.batch_size=3": "distill.batch_size=3 is not divisible by cluster.workers=2",
    "cluster.address=ray://head:10001": "cluster.address=ray://head:10001: Ray Client and job server addresses are not supported; give HOST:PORT",
    # inputs
    "model.path=/nope/x": "model.path: /nope/x does not exist",
    "data.source=human_eval": "model.path is missing: only data.source=minicode",
    "data.source=file data.path=x model.path=.": "model.path: folder . is no checkpoint, it has no config.json",
}


@pytest.mark.parametrize("mistake", CONFIG_MISTAKES)
def test_config_mistakes(full, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert refused(full(*mistake.split(" "))).startswith(CONFIG_MISTAKES[mistake])


def told(result: tuple[int, list[str]]) -> list[str]:
    code, lines = result
    assert code == 2
    assert all(line.startswith("error: ") for line in lines)
    return [line.removeprefix("error: ") for line in lines]


def test_all_mistakes_are_told_at_once(full):
    """Three in one section, one in another, and two that only sections together can make."""
    ranges = ("distill.learning_rate=-1", "distill.epochs=0", "distill.temperature=0", "rounds.1.window=0")
    lines = told(full(*ranges, "rounds.0.window=4", "pack.max_length=70"))
    assert [line.split(" ")[0].rstrip(":") for line in lines] == [
        *("rounds.1.window", "distill.learning_rate", "distill.epochs", "distill.temperature"),
        *("rounds.0.window=4", "pack.max_length=70"),
    ]


def test_unknown_names_and_wrong_kinds_are_told_with_the_rest(full):
    lines = told(full("nois_schedule=random", "rounds=[{blok: 8, windw: 1}, {window: x}]", "distill.batch_size=a", "pack.max_length=79", "seed"))
    assert [line.partition(":")[0] for line in lines] == [
        *("Error parsing override 'seed'", "nois_schedule", "rounds.0.blok", "rounds.0.windw", "rounds.1.window", "distill.batch_size"),
        "pack.max_length=79",
    ]


def test_what_is_right_in_a_value_with_a_mistake_is_judged_too(full, tmp_path: Path):
    lines = told(full("rounds=[{block_size: 0}, {windw: 3}]", "distill={epochs: 0, batchsize: 1, prob: {every: 1}}"))
    assert [line.partition(":")[0] for line in lines] == [
        *("rounds.1.windw", "rounds.0.block_size must be above 0, got 0"),
        *("distill.batchsize", "distill.prob", "distill.epochs must be above 0, got 0.0"),
    ]
    assert refused(full("evaluate.benchmarks=[{nme: gsm8k}]")).startswith("evaluate.benchmarks.0.nme: no such setting")


def test_all_stages_that_are_none_are_told(full):
    lines = told(full("until=round1/distil", "force=[bas,round1/pack,report2]"))
    assert [line.partition(";")[0] for line in lines] == [
        "until: no stage 'round1/distil' in this run",
        "force: no stage 'bas' in this run",
        "force: no stage 'report2' in this run",
    ]


@pytest.mark.parametrize("where", ["command", "file"])
def test_a_password_in_an_address_is_left_nowhere(full, tmp_path: Path, where: str):
    """Hydra writes its own files first."""
    uri = "http://ann:geheim@127.0.0.1:9"
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "conf" / "experiment" / "mine.yaml").write_text(
        f"# @package _global_\ndefaults:\n  - smoke\npaths:\n  tracking_uri: {uri}\n  outputs: {tmp_path}/outputs\n"
    )
    in_file = ("experiment=mine", f"hydra.searchpath=[file://{tmp_path}/conf]")
    told_of = refused(full(f"paths.outputs={tmp_path}/outputs", *(in_file if where == "file" else (f"paths.tracking_uri={uri}",)), "until=prompts"))
    assert told_of.startswith("paths.tracking_uri=http://ann:...@127.0.0.1:9: cannot open experiment")
    written = [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()]
    assert {"overrides.yaml", "config.yaml", "hydra.yaml", "job.json"} <= {path.name for path in written}
    assert [path.name for path in written if b"geheim" in path.read_bytes()] == []


def test_nothing_is_told_that_rests_on_a_wrong_value(full):
    """Not applied, these leave defaults behind which do not go together with the rest, and would be blamed."""
    assert refused(full("trajectories.max_new_tokens=0", "rounds.0.window=16")) == "trajectories.max_new_tokens must be at least 1, got 0"
    assert refused(full("trajectories.max_new_token=256", "rounds.0.window=16")).startswith("trajectories.max_new_token: no such setting")


def test_every_mistake_in_an_experiment_file_is_told(full, tmp_path: Path):
    (tmp_path / "conf" / "experiment").mkdir(parents=True)
    file = tmp_path / "conf" / "experiment" / "mine.yaml"
    file.write_text(
        "# @package _global_\ndefaults:\n  - smoke\ndistil: {epochs: 1}\nrounds:\n  - block_size: 8\n  - windw: 1\n    block_size: many\n"
        "distill:\n  batchsize: 4\n  epochs: 2\n"
    )
    (tmp_path / "conf" / "cluster").mkdir()
    (tmp_path / "conf" / "cluster" / "mine.yaml").write_text("# @package _global_\ncluster: {workrs: 3}\n")
    here = f"hydra.searchpath=[file://{tmp_path}/conf]"
    assert refused(full("cluster=mine", here)).startswith("cluster=mine: cluster.workrs: no such setting; nearest: cluster.workers")
    lines = told(full("experiment=mine", here))
    expected = {"rounds.1.windw", "rounds.1.block_size", "distill.batchsize", "distil"}
    assert {line.removeprefix("experiment=mine: ").partition(":")[0] for line in lines} == expected
    assert all(line.startswith("experiment=mine: ") for line in lines)


def test_a_checkpoint_tells_how_long_a_text_may_be(full, tmp_path: Path):
    """Without being loaded: no torch here."""
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text('{"text_config": {"max_position_embeddings": 540}}')
    (line,) = told(full(f"model.path={tmp_path}/checkpoint", "evaluate.max_new_tokens=20"))
    assert line.startswith("trajectories.max_new_tokens=40: with a prompt of data.max_prompt_tokens=512 that is 552 tokens")
    assert "540, max_position_embeddings of model.path's config.json" in line and "set it to 28 or less" in line
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 540}
    for name in ("rope_parameters", "rope_scaling"):
        (tmp_path / "checkpoint" / "config.json").write_text(json.dumps({"max_position_embeddings": 540, name: yarn}))
        (line,) = told(full(f"model.path={tmp_path}/checkpoint", "evaluate.max_new_tokens=20", "data.max_prompt_tokens=1060"))
        assert line.startswith("trajectories.max_new_tokens=40: with a prompt of data.max_prompt_tokens=1060 that is 1100 tokens")
        assert "(1080, max_position_embeddings of model.path's config.json, scaled positions counted)" in line


def test_the_cluster_of_ray_address_is_joined(full, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")  # of `ray job submit`, and often exported
    assert refused(full()).startswith("cluster.address=http://127.0.0.1:8265: Ray Client and job server addresses are not supported")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert full("until=prompts") == (0, [])  # nothing for Ray to do: nobody is asked
    assert refused(full("until=round1/pack")).startswith("cluster.address=127.0.0.1:9: no Ray cluster can be joined there from this machine")
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert full("dry_run=true", "cluster.workers=2") == (0, [])


def test_a_submitted_job_needs_places_that_outlive_it(full, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps({"runtime_env": {"working_dir": "gcs://x.zip"}}))
    assert refused(full("paths.store=store", "dry_run=true")).startswith("paths.store=store: a job's working directory is a copy that Ray deletes")
    assert full("dry_run=true") == (0, [])


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """Passes for a model where nothing loads it."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return f"model.path={folder}"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"prompt": "a"}\n{"prompt": 3}\n', ', row 2: needs "prompt"'),
        ('{"prompt": "a"}\n\n{"prompt": \n', ", row 3: not JSON"),
        ('[{"prompt": "a"}]\n', ', row 1: needs "prompt"'),
        ("", ": holds no prompts"),
        ("\n \n", ": holds no prompts"),
    ],
)
def test_a_bad_prompt_file_is_named_with_its_row(full, checkpoint: str, tmp_path: Path, content: str, complaint: str):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    assert refused(full("data.source=file", f"data.path={file}", checkpoint)).startswith(f"data.path={file}{complaint}")


def test_a_missing_prompt_file(full, checkpoint: str, tmp_path: Path):
    assert refused(full("data.source=file", checkpoint)).startswith("data.path is missing")
    missing = tmp_path / "none.jsonl"
    assert refused(full("data.source=file", f"data.path={missing}", checkpoint)).startswith(f"data.path={missing}: cannot be read")


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("paths.outputs", "below"),
        ("paths.store", "below"),
        ("paths.results", "below/results.json"),
        ("paths.tracking_uri", "sqlite"),
    ],
)
def test_unwritable_places(full, tmp_path: Path, setting: str, place: str):
    file = tmp_path / "file"
    file.write_text("in the way")
    where = f"sqlite:///{file}/below/mlflow.db" if place == "sqlite" else f"{file}/{place}"
    message = refused(full(f"{setting}={where}"))
    assert message.startswith(setting)
    assert str(file) in message


def test_a_sweep_over_an_unwritable_place(full, tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    assert refused(full("-m", "seed=1,2", f"paths.outputs={tmp_path}/file/below")).startswith("paths.outputs")


def test_every_failed_job_of_a_sweep_is_told(full):
    code, lines = full("-m", "rounds.0.window=0,-1", "dry_run=true")
    assert code == 2
    assert lines == [f"error: job {i} (rounds.0.window={w}): rounds.0.window must be above 0, got {w}" for i, w in enumerate((0, -1))]


def manifests(folder: Path) -> list[str]:
    return sorted(json.loads(path.read_text())["stage"] for path in folder.glob(f"store/*/{MANIFEST}"))


@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (UserError("model.path=x: is broken; choose another"), 2, "error: model.path=x: is broken; choose another"),
        (RuntimeError("boom\nand more"), 1, "error: stage base failed: RuntimeError: boom"),
        (ValueError(), 1, "error: stage base failed: ValueError"),
    ],
)
def test_a_failing_stage_keeps_what_is_finished(full, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outputs: Path, raised, code: int, line: str):
    def fail(*arguments):
        raise raised

    monkeypatch.setattr(base_stage, "run", fail)
    assert full() == (code, [line])
    assert manifests(tmp_path) == ["prompts"]
    newest = max(outputs.glob("runs/*/*/full_run.log"), key=lambda path: path.stat().st_mtime)
    assert ("Traceback" in newest.read_text()) is (code == 1)  # a bug is told in full in the log, a mistake is not


def remote(cause: Exception, text: str) -> RayTaskError:
    """As the driver gets what a worker raised: the traceback is text, the class is Ray's."""
    traceback = f'ray::work() (pid=1, ip=127.0.0.1)\n  File "x.py", line 1, in work\n    raise\n{text}'
    return RayTaskError("work", traceback, cause, proctitle="ray::work()", pid=1, ip="127.0.0.1")


def test_what_ray_wraps_is_told_by_its_own_message():
    told = remote(UserError("pack.max_length: raise it"), "tasks.stage.UserError: pack.max_length: raise it").as_instanceof_cause()
    assert isinstance(told, UserError)
    assert user_error(told) == "pack.max_length: raise it"
    udf = "tasks.stage.UserError: model.path: mend it\n\nThe above exception was the direct cause\n\nray.exceptions.UserCodeException: UDF failed"
    wrapped = remote(UserCodeException("UDF failed"), udf)
    assert user_error(wrapped.as_instanceof_cause()) == user_error(ActorDiedError(wrapped)) == "model.path: mend it"
    assert user_error(WorkerGroupError("1 worker failed", {1: told})) == "pack.max_length: raise it"


def test_what_is_no_mistake_of_the_user_is_told_as_such():
    bug = remote(KeyError("weights"), "KeyError: 'weights'")
    assert user_error(bug) is None
    assert summary(bug) == "KeyError: 'weights'"
    chain = "KeyError: 'weights'\n\nThe above exception was the direct cause\n\nray.exceptions.UserCodeException: UDF failed\nTo change retries"
    assert summary(remote(UserCodeException("UDF failed"), chain).as_instanceof_cause()) == "KeyError: 'weights'"
    assert user_error(WorkerGroupError("1 worker failed", {0: bug})) is None
    assert summary(WorkerGroupError("1 worker failed", {0: bug})) == "KeyError: 'weights'"
    assert summary(RuntimeError("first\nsecond")) == "RuntimeError: first"


def from_outside(*overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pipelines.full_run", "experiment=smoke", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_exit_code_and_the_one_line_seen_from_outside(tmp_path: Path, checkpoint: str):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\nnonsense\n')
    done = from_outside(f"paths.outputs={tmp_path}/out", "rounds.0.windo=3")
    assert (done.returncode, done.stderr) == (2, "error: rounds.0.windo: no such setting; nearest: rounds.0.window\n")
    settings = [f"paths.outputs={tmp_path}/out", f"paths.store={tmp_path}/store", checkpoint]
    done = from_outside(*settings, "data.source=file", f"data.path={tmp_path}/prompts.jsonl")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if "error" in line.lower()] == [done.stderr.splitlines()[-1]]
    assert done.stderr.splitlines()[-1].startswith(f"error: data.path={tmp_path}/prompts.jsonl, row 2: not JSON")
