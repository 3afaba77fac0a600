import pytest

from tasks.problem_sets.problem import Problem
from tasks.problem_sets.sandbox import SandboxConfig
from tasks.problem_sets.scoring import build_program, extract_code, score
from tasks.stage import UserError

CONFIG = SandboxConfig(allow_code_execution=True, timeout_s=10)
GOOD = "def double(x):\n    return 2 * x\n"
STUB = 'def double(x):\n    """Twice x."""\n'
PROBLEM = Problem("p/0", "Write double.", "double", "assert double(4) == 8", GOOD)
CONTINUED = Problem(
    "p/1", "Complete double.", "double", "assert double(4) == 8 and half(8) == 4", None, "def half(x):\n    return x // 2\n\n\n" + STUB
)


@pytest.mark.parametrize(
    "completion",
    [
        f"Sure!\n```python\n{GOOD}```\nDone.",
        f"```\n{GOOD}```",
        f"```py\n{GOOD}\n```",
        "   ```python\n   def double(x):\n       return 2 * x\n   ```",
        f"```bash\npip install x\n```\n```python\n{GOOD}```\n```python\nprint(double(1))\n```",
        f"```python\nimport os\n```\nthen\n```python\n{GOOD}```",
        f"Complete this:\n```python\n{STUB}```\nAnswer:\n```python\n{GOOD}```",
        f"```python\n{GOOD}```\nor\n```python\ndef double(x):\n    return x + 1\n```",
        f"```python\n{GOOD}",
        f"```python\n{GOOD}\nprint(double(",
        GOOD,
        f"Here is the function:\n\n{GOOD}\nThis function doubles x.",
        f"{STUB}    return 2 * x\n\nExplanation: easy.",
        f"import math\n\n{GOOD}\nThe end (of it",
        "```python\ndouble = lambda x: 2 * x\n```",
        "```python\ndef double(x):\n    return add(x, x)\n\ndef add(a, b):\n    return a + b\n```",
        "```python\nfrom dataclasses import dataclass\n@dataclass\nclass Pair:\n    a: int\ndef double(x):\n    return Pair(x).a * 2\n```",
        f"```python\n{GOOD}\nif __name__ == '__main__':\n    print(double(int(input())))\n```",
    ],
)
def test_right_answers_pass_in_every_dress(completion):
    (result,) = score([PROBLEM], [completion], CONFIG)
    assert result.passed, (result, extract_code(completion, "double"))


@pytest.mark.parametrize(
    "completion",
    [
        "    return 2 * x\n",
        "return 2 * x",
        "y = x\n    return 2 * y",
        "for _ in [0]:\n        y = x\n    return 2 * y\n\nprint(double(3))",
        "  y = x\n  return 2 * y",
        "```python\n    return 2 * x\n```",
        "```python\nreturn 2 * x\n```",
        "    return 2 * x\n\nThis continues the function (",
        f"```python\n{STUB}    return 2 * x\n```",
    ],
)
def test_bodies_continue_the_preamble(completion):
    (result,) = score([CONTINUED], [completion], CONFIG)
    assert result.passed, (result, build_program(CONTINUED, extract_code(completion, "double")))


@pytest.mark.parametrize(
    "completion, reason",
    [
        ("", "no_completion"),
        ("I'm sorry, I cannot do that.", "no_completion"),
        ("```python\n```", "no_completion"),
        ("```python\ndef triple(x):\n    return 2 * x\n```", "failed"),
        (f"```python\n{STUB}```", "failed"),
        ("```python\ndef double(x):\n    return 3 * x\n```", "failed"),
        ("```python\ndef double(x:\n    return\n```", "failed"),
    ],
)
def test_wrong_answers_do_not_pass(completion, reason):
    (result,) = score([PROBLEM], [completion], CONFIG)
    assert (result.passed, result.reason) == (False, reason)


def test_results_keep_the_order_of_the_problems():
    completions = [GOOD, "", "def double(x):\n    return 0\n", GOOD]
    assert [result.reason for result in score([PROBLEM] * 4, completions, CONFIG)] == ["passed", "no_completion", "failed", "passed"]


def test_as_many_completions_as_problems():
    with pytest.raises(UserError, match="2 problems but 1 completions"):
        score([PROBLEM] * 2, [GOOD], CONFIG)
