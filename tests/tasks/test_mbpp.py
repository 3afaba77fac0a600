import pytest

from tasks.problem_sets import mbpp
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.problem_sets.scoring import score
from tasks.stage import UserError
from tests.tasks.tiny_benchmarks import MBPP
from tests.tasks.tiny_stage import write_jsonl

CONFIG = SandboxConfig(allow_code_execution=True, timeout_s=20)
PROMPT = """Please refer the given examples and generate a python function for my problem.
Examples are listed as follows:
- Example 1:
>>> Problem:
Write a function to add 2 to a number.
>>> Test Cases:
assert add_2(0) == 2
assert add_2(1) == 3
assert add_2(2) == 4

>>> Code:
```python
def add_2(x):
    return x + 2
```

- Example 2:"""


def test_prompt_and_problems_are_those_of_the_published_protocol(tmp_path):
    problems = mbpp.load(str(write_jsonl(tmp_path / "mbpp.jsonl", reversed(MBPP))))  # by number, not by place
    assert [problem.problem_id for problem in problems] == ["Mbpp/11", "Mbpp/12", "Mbpp/510"]
    assert problems[0].prompt.startswith(PROMPT) and problems[0].prompt.count("- Example") == 3
    assert problems[0].prompt.endswith(
        "\n\nHere is my problem:\n>>> Problem:\nWrite a function to add 11 to a number.\n>>> Test Cases:\n"
        "assert add_11(0) == 11\nassert add_11(1) == 12\nassert add_11(2) == 13\n"
    )


def test_reference_code_passes_and_other_code_fails(tmp_path):
    set_up = {
        "task_id": 20,
        "text": "t",
        "test_setup_code": "y = max_of([4, 3])",
        "code": "def max_of(x):\n  return max(x)",
        "test_list": ["assert y == max_of([4])"],
    }
    first, _, setup, _ = mbpp.load(str(write_jsonl(tmp_path / "mbpp.jsonl", [*MBPP, set_up])))
    assert setup.entry_point == "max_of"
    answers = [first.solution, "```python\ndef add_11(x): return x\n```", setup.solution, "def max_of(x):\n    return x[0]\n"]
    found = score([first, first, setup, setup], answers, CONFIG)
    assert [result.reason for result in found] == ["passed", "failed", "passed", "passed"]


@pytest.mark.parametrize(
    "rows, message",
    [
        (MBPP[:2] + MBPP[3:], "no row with task_id 3"),
        (MBPP[:4], "no test problem"),
        ([*MBPP, {**MBPP[4], "task_id": 20, "text": None}], "row 9: field 'text'"),
        ([*MBPP, {**MBPP[4], "task_id": 20, "test_list": "assert True"}], "row 9: field 'test_list' is missing or no list of strings"),
        ([*MBPP, {**MBPP[4], "task_id": 20, "test_list": ["assert other(1) == 2"]}], "row 9: test_list calls nothing that code defines"),
        ([*MBPP, {**MBPP[4], "task_id": 20, "code": "def f("}], "row 9: code or test_list is no Python"),
        ([*MBPP, MBPP[4]], "row 9: task_id 11 occurs twice"),
        ([], "no rows"),
    ],
)
def test_bad_data_is_named(tmp_path, rows, message):
    with pytest.raises(UserError, match=message) as caught:
        mbpp.load(str(write_jsonl(tmp_path / "mbpp.jsonl", rows)))
    assert "mbpp.jsonl" in str(caught.value) and "\n" not in str(caught.value)


def test_the_hub_is_asked_for_both_splits(monkeypatch):
    import datasets

    asked = []

    def load(name, subset, *, split, revision):
        asked.append((name, subset, split, revision))
        return datasets.Dataset.from_list([row for row in MBPP if (row["task_id"] < 11) == (split == "prompt")])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(mbpp.load(revision="v1")) == 3
    assert asked == [(mbpp.HUB_ID, "full", "prompt", "v1"), (mbpp.HUB_ID, "full", "test", "v1")]


def test_saved_by_datasets(tmp_path):
    import datasets

    splits = {"prompt": MBPP[:4], "test": MBPP[4:7], "train": MBPP[7:]}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(tmp_path / "mbpp")
    assert [problem.problem_id for problem in mbpp.load(str(tmp_path / "mbpp"))] == ["Mbpp/11", "Mbpp/12", "Mbpp/510"]


def test_offline_the_error_tells_how_to_get_a_local_copy():
    with pytest.raises(UserError, match="hf download --repo-type dataset google-research-datasets/mbpp"):
        mbpp.load()
