import pytest

from tasks.problem_sets import gsm8k
from tasks.stage import UserError
from tests.tasks.tiny_benchmarks import GSM8K
from tests.tasks.tiny_stage import write_jsonl


def test_questions_and_their_numbers(tmp_path):
    questions = gsm8k.load(str(write_jsonl(tmp_path / "test.jsonl", GSM8K)))
    assert [(q.problem_id, q.answer) for q in questions] == [("gsm8k/0", "3600"), ("gsm8k/1", "4800"), ("gsm8k/2", "6000")]
    assert questions[0].prompt == (
        "Solve the following grade-school math problem. Show your reasoning clearly and end your response with '#### <final answer>'.\n\n"
        "Question: Ann has 3 boxes of 1,200 eggs. How many eggs?\nAnswer:"
    )


@pytest.mark.parametrize(
    "rows, message",
    [
        ([GSM8K[0], {"question": "q", "answer": "7"}], "row 2: the answer has no number after ####"),
        ([GSM8K[0], {"question": "q", "answer": "7 ####"}], "row 2: the answer has no number after ####"),
        ([GSM8K[0], {"question": "q"}], "row 2: field 'answer' is missing"),
        ([GSM8K[0], GSM8K[0]], "occurs twice"),
        ([{**GSM8K[0], "question": str(i)} for i in range(1320)], "more than the 1319 rows"),
        ([], "no rows"),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, message):
    with pytest.raises(UserError, match=message):
        gsm8k.load(str(write_jsonl(tmp_path / "test.jsonl", rows)))


def test_the_hub_is_asked_for_the_test_split(monkeypatch):
    import datasets

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: asked.append((a, k["split"], k["revision"])) or datasets.Dataset.from_list(GSM8K))
    assert len(gsm8k.load(revision="v1")) == 3 and asked == [(("openai/gsm8k", "main"), "test", "v1")]
