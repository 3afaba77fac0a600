import pytest

from tasks.problem_sets import math500
from tasks.stage import UserError
from tests.tasks.tiny_benchmarks import MATH500
from tests.tasks.tiny_stage import write_jsonl


def test_problems_and_their_answers(tmp_path):
    questions = math500.load(str(write_jsonl(tmp_path / "test.jsonl", MATH500)))
    assert (questions[0].problem_id, questions[0].answer) == ("test/0.json", r"\frac{5}{6}")
    assert questions[0].prompt == "Problem: Compute $1/2 + 1/3$.\nMark your solution with \\boxed\nAnswer:"


@pytest.mark.parametrize(
    "rows, message",
    [
        ([MATH500[0], {**MATH500[1], "answer": 5}], "row 2: field 'answer' is missing or no string"),
        ([MATH500[0], MATH500[0]], "occurs twice"),
        ([{**MATH500[0], "unique_id": str(i)} for i in range(501)], "more than the 500 rows"),
        ([], "no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        math500.load(str(write_jsonl(tmp_path / "test.jsonl", rows)))


def test_the_hub_is_asked_for_the_test_split(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k["split"], k["revision"])) or datasets.Dataset.from_list(MATH500))
    assert len(math500.load(revision="v1")) == 3 and asked == [(("HuggingFaceH4/MATH-500", None), "test", "v1")]
