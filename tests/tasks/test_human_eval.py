import gzip
import json

import pytest

from tasks.problem_sets import human_eval
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.problem_sets.scoring import score
from tasks.stage import UserError

ROW = {
    "task_id": "T/0",
    "prompt": 'def one() -> int:\n    """Returns one."""\n',
    "entry_point": "one",
    "canonical_solution": "    return 1\n",
    "test": "def check(candidate):\n    assert candidate() == 1\n",
}
CONFIG = SandboxConfig(allow_code_execution=True, timeout_s=20)


def write(path, *rows):
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def test_package_has_the_known_problems():
    problems = human_eval.load()
    assert len({problem.problem_id for problem in problems}) == 164
    assert problems[0].entry_point == "has_close_elements"
    assert "def has_close_elements(" in problems[0].prompt


def test_canonical_solutions_pass_and_broken_ones_fail():
    problems = human_eval.load()
    right = [f"Here it is:\n```python\n{problem.solution}```\nIt works." for problem in problems]
    assert [p.problem_id for p, result in zip(problems, score(problems, right, CONFIG), strict=True) if not result.passed] == []
    wrong = [f"```python\ndef {problem.entry_point}(*args):\n    return object()\n```" for problem in problems]
    assert sum(result.passed for result in score(problems, wrong, CONFIG)) == 0


def test_solutions_without_their_signature_pass():
    problems = human_eval.load()[::8]
    bodies = [problem.solution.removeprefix(problem.preamble) for problem in problems]
    assert [p.problem_id for p, result in zip(problems, score(problems, bodies, CONFIG), strict=True) if not result.passed] == []


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_local_file(tmp_path, name):
    (problem,) = human_eval.load(write(tmp_path / name, ROW))
    results = score([problem] * 2, [f"```python\n{problem.solution}```", "```python\ndef one():\n    return 2\n```"], CONFIG)
    assert [result.reason for result in results] == ["passed", "failed"]


@pytest.mark.parametrize(
    "rows, message",
    [
        ([ROW, "{no json"], "row 2: not JSON"),
        ([ROW, "[1]"], "row 2: field 'task_id'"),
        ([ROW, {**ROW, "task_id": "T/1", "test": None}], "row 2: field 'test'"),
        ([{**ROW, "entry_point": "a b"}], "row 1: entry_point"),
        ([ROW, ROW], "row 2: task_id 'T/0' occurs twice"),
        ([], "no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(UserError, match=message) as caught:
        human_eval.load(write(tmp_path / "rows.jsonl", *rows))
    assert "rows.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(UserError, match=r"missing\.jsonl: cannot be read"):
        human_eval.load(str(tmp_path / "missing.jsonl"))
    truncated = tmp_path / "rows.jsonl.gz"
    truncated.write_bytes(gzip.compress(json.dumps(ROW).encode())[:-9])
    with pytest.raises(UserError, match="cannot be read"):
        human_eval.load(str(truncated))


def test_the_hub_is_asked_for_the_test_split(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k["split"], k["revision"])) or datasets.Dataset.from_list([ROW]))
    assert len(human_eval.load("openai/openai_humaneval", revision="v1")) == 1 and asked == [(("openai/openai_humaneval", None), "test", "v1")]


def test_prompt_is_that_of_the_published_protocol(tmp_path):
    (problem,) = human_eval.load(write(tmp_path / "rows.jsonl", {**ROW, "prompt": "\n" + ROW["prompt"]}))
    assert problem.prompt == (
        "Please continue to complete the function. You are not allowed to modify the given code and do the completion only. Please return all "
        'completed function in a codeblock. Here is the given code to do completion:\n```python\ndef one() -> int:\n    """Returns one."""\n```'
    )
