"""`pipelines.evidence` on reports as the report stage writes them: pages, copies that give the same pages again, and every mistake in one line."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from dashboards.sweep import sweep_rows
from pipelines import evidence
from pipelines.evidence_copy import run_copy
from tests.dashboards.made_report import sweep_jobs, write_report
from tests.dashboards.made_store import ACCEPTED, Made, make_store, results

SECRET = "/".join(("", "srv", "someone", "store"))  # a place of this machine


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make_store(tmp_path_factory.mktemp("store") / "outputs")


@pytest.fixture(scope="module")
def reported(made, tmp_path_factory) -> Path:
    """The folder of a run: its report, and what it was asked for."""
    folder = tmp_path_factory.mktemp("run")
    write_report(made, folder)
    stages = {}
    for stage, metrics, seconds in (
        ("base", {"parameters": 3_626_240}, 9.0),
        ("round1/distill", {}, 90.0),
        ("round1/export", {}, 1.0),
        ("round1/evaluate", {}, 1.0),
    ):
        stages[stage] = str(folder / "stages" / stage.replace("/", "-"))
        hashes = {"model.safetensors": "ab" * 32, "config.json": "cd" * 32}
        write(Path(stages[stage]) / "manifest.json", {"metrics": metrics, "seconds": seconds, "hashes": hashes})
    probes = [{"step": step, "tpf": 1 + step / 8, "equal_to_teacher": 0.75} for step in (0, 2, 4, 8, 16)]
    curves = [{"step": step, "tokens": 1000 * step} for step in (4, 8, 16)]
    write(Path(stages["round1/distill"]) / "training.json", {"probes": probes, "curves": curves})
    write(
        Path(stages["round1/evaluate"]) / "evaluation.json",
        {"benchmark": "minicode", "accepted_lengths": {"jacobi@16": ACCEPTED["round1"], "ar@1": {}}},
    )
    overrides = ["experiment=tiny", f"paths.store={SECRET}", f"model.path={SECRET}/qwen", "rounds.0.epochs=2"]
    write(folder / "job.json", {"overrides": overrides, "config": {"seed": 3}, "stages": stages})
    return folder


@pytest.fixture
def swept(tmp_path) -> Path:
    rows = sweep_rows(sweep_jobs())
    write(tmp_path / "sweep" / "sweep.json", {"schema_version": 1, "shared": ["experiment=ablate", "seed=1"], "paper": "table4", "rows": rows})
    write(tmp_path / "sweep" / "1" / "results.json", results() | {"git_sha": "0123456789abcdef"})
    write(tmp_path / "sweep" / "command.json", {"overrides": ["experiment=ablate", "seed=1", f"paths.outputs={SECRET}"], "swept": ["noise_schedule"]})
    return tmp_path / "sweep"


def write(path: Path, value) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(value))
    return path


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def refused(capsys, *argv: str) -> str:
    assert evidence.main(list(argv)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0].removeprefix("error: ")


def test_pages_and_copies(reported, swept, tmp_path, capsys):
    output = tmp_path / "docs" / "results"
    assert evidence.main([f"runs={reported}", f"sweeps={swept}", f"output={output}"]) == 0
    assert "| **confirmed** |" in capsys.readouterr().out
    found = files(output)
    figure = "tpf-tiny-3.6M-minicode.svg"
    bought = "tokens-tiny-3.svg"
    assert found.keys() == {"claims.md", "index.md", figure, bought, "data/tiny-3.json", "data/ablate-1.json"}
    for picture in (figure, bought):
        ElementTree.fromstring(found[picture])
    index = found["index.md"]
    assert f"]({figure})" in index and "(data/tiny-3.json)" in index and "(data/ablate-1.json)" in index
    assert "| Jacobi Forcing, round 1 | 16 | 1 | 4.00 | 200.0 | 2.40 | 90.0 | 1.50 | 1.5 |" in index
    assert "| jacobi@16 | 75 % | 75 % | 50 % | 50 % |" in index
    assert "`python -m pipelines.full_run experiment=tiny model.path=.../qwen rounds.0.epochs=2`" in index
    assert "| - | - | 0123456789ab | - | - | `python -m pipelines.full_run -m experiment=ablate seed=1` |" in index
    assert "| 3 | 3,626,240 |" in index and "2.13.0+cpu" in index
    assert f"]({bought})" in index and "through 4 probes" in index and "| round1 | 2 | 2,000 | 1.250 | 75.0% |" in index
    assert f"| tiny-3 | round1 | `model.safetensors` | `{'ab' * 32}` |" in index and "cdcd" not in index
    assert "tiny (3.6M), minicode: TPF 1.000" in found["claims.md"] and "points +0.0; base % 95.0" in found["claims.md"]


def test_copies_hold_no_place_no_host_and_no_text_and_are_small(reported, swept, tmp_path):
    stored = json.loads((reported / "results.json").read_text())
    assert stored["final_model"] and stored["hardware"]
    stored["rows"] *= 100
    write(tmp_path / "big" / "results.json", stored | {"host": "box7", "rows": [row | {"host": "box7", "tpf": 10 / 3} for row in stored["rows"]]})
    assert evidence.main([f"runs={reported},{tmp_path / 'big'}", f"sweeps={swept}", f"output={tmp_path / 'out'}"]) == 0
    found = files(tmp_path / "out")
    for name, text in found.items():
        for hidden in (SECRET, str(reported), str(tmp_path), "box7", "script>", stored["hardware"]["platform"]):
            assert hidden not in text, (name, hidden)
        assert len(text) < 200_000
    assert "3.33333," in found["data/tiny.json"]


def test_copies_give_the_same_pages_again(reported, swept, tmp_path):
    evidence.main([f"runs={reported}", f"sweeps={swept}", f"output={tmp_path / 'first'}"])
    data = tmp_path / "first" / "data"
    evidence.main([f"runs={data / 'tiny-3.json'}", f"sweeps={data / 'ablate-1.json'}", f"output={tmp_path / 'again'}"])
    assert files(tmp_path / "again") == files(tmp_path / "first")
    assert run_copy(data / "tiny-3.json") == json.loads((data / "tiny-3.json").read_text())


def test_a_sweeps_folder_is_all_its_runs(reported, tmp_path):
    results = json.loads((reported / "results.json").read_text())
    for seed in (0, 1):
        faster = [row | {"tpf": row["tpf"] + seed} if row["model"] != "base" else row for row in results["rows"]]
        write(tmp_path / "sweep" / str(seed) / "results.json", results | {"rows": faster})
        write(tmp_path / "sweep" / str(seed) / "job.json", {"overrides": [f"seed={seed}"], "config": {"seed": seed}, "stages": {"base": "gone"}})
    assert evidence.main([f"runs={tmp_path / 'sweep'}", f"output={tmp_path / 'out'}"]) == 0
    index = (tmp_path / "out" / "index.md").read_text()
    assert "| Jacobi Forcing, round 1 | 16 | 2 | 4.50 [4.00, 5.00] |" in index and "minutes" not in index.partition("| method")[2].partition("\n")[0]


def test_without_a_store_beside_it_a_group_is_its_name(reported, tmp_path):
    file = write(tmp_path / "results.json", json.loads((reported / "results.json").read_text()))
    assert evidence.main([f"runs={file}", f"output={tmp_path / 'out'}"]) == 0
    assert {"tpf-tiny-minicode.svg", "data/tiny.json"} < files(tmp_path / "out").keys()
    assert "## tiny, minicode" in (tmp_path / "out" / "index.md").read_text()


def test_a_sweep_alone(swept, tmp_path):
    assert evidence.main([f"sweeps={swept}", f"output={tmp_path / 'out'}"]) == 0
    assert files(tmp_path / "out").keys() == {"claims.md", "index.md", "data/ablate-1.json"}


def test_mistakes(reported, swept, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results, sweep = (json.loads(path.read_text()) for path in (reported / "results.json", swept / "sweep.json"))
    Path("empty").mkdir()
    Path("text.json").write_text("{")
    write(Path("bad/results.json"), results)
    write(Path("bad/job.json"), ["no job"])
    made = {
        "list.json": [],
        "rowless.json": results | {"rows": []},
        "old.json": results | {"schema_version": 2},
        "nan.json": results | {"rows": [results["rows"][0] | {"tpf": float("nan")}]},
        "unnamed.json": results | {"rows": [{"tpf": 1.0}]},
        "unequal.json": results | {"rows": [{**results["rows"][0], "equals_ar": None}]},
        "machine.json": results | {"timed_on": [3]},
        "other.json": sweep | {"paper": None},
        "half.json": sweep | {"rows": [{"number": 1, "error": None}]},
        "worded.json": sweep | {"rows": [row | {"tpf": {"jacobi@64": "fast"}} for row in sweep["rows"]]},
    }
    for name, value in made.items():
        write(Path(name), value)
    for argv, message in {
        "": "runs and sweeps are both missing; give runs=DIR",
        "runs=nope": "runs=nope: holds no results.json; give the folder of a run that has finished",
        "runs=empty": "runs=empty: holds no results.json",
        "runs=text.json": "text.json: not a readable JSON file",
        "runs=list.json": "runs=list.json: is no results.json of a run (it has no experiment or no rows)",
        "runs=rowless.json": "runs=rowless.json: is no results.json of a run (it has no rows)",
        "runs=old.json": "runs=old.json: is no results.json of a run (its schema_version is 2, expected 1)",
        "runs=nan.json": "runs=nan.json: is no results.json of a run (row 0 has no number in tpf)",
        "runs=unnamed.json": "runs=unnamed.json: is no results.json of a run (row 0 lacks a text in model",
        "runs=unequal.json": "runs=unequal.json: is no results.json of a run (row 0 has no number in equals_ar)",
        "runs=machine.json": "runs=machine.json: is not as the pipeline writes it",
        "runs=bad": "runs=bad/results.json: is not as the pipeline writes it",
        f"runs={reported},{reported}": f"runs: {reported}/results.json and {reported}/results.json are both tiny-3; give one of them",
        "sweeps=empty": "sweeps=empty: holds no sweep.json",
        "sweeps=list.json": "sweeps=list.json: is no sweep.json",
        "sweeps=other.json": "sweeps=other.json: is no sweep of the paper's Table 4 or 5",
        "sweeps=half.json": "sweeps=half.json: is not as the pipeline writes it",
        "sweeps=worded.json": "sweeps=worded.json: is not as the pipeline writes it (ValueError: a row lacks a number in tpf)",
    }.items():
        assert refused(capsys, *argv.split(), "output=out").startswith(message)
    assert not Path("out").exists()
    assert refused(capsys, f"runs={reported}").startswith("output is missing")
    assert refused(capsys, f"runs={reported}", "output=text.json").startswith("output=text.json")


def test_help(capsys):
    assert evidence.main(["help"]) == 0
    assert "sweeps=" in capsys.readouterr().out
