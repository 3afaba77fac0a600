"""From what a model wrote to a verdict: finds the code in a completion, builds the program, runs it in the sandbox.

A program is `problem.preamble` + the completion's code + `problem.tests`. The preamble may end in the signature and docstring the model was
shown: a completion that defines the function replaces that stub, and one that only holds the function's body continues it.
Knows nothing about problem sets, models or tokens.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Sequence

from tasks.problem_sets.problem import Problem
from tasks.problem_sets.sandbox import SandboxConfig, SandboxResult, run_many
from tasks.stage import UserError

# An opening fence with any tag, then everything up to a closing fence on a line of its own, or the end of a truncated completion.
FENCE = re.compile(r"^([ \t]*)```[ \t]*[\w+.-]*[ \t]*\n(.*?)(^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
CODE_START = re.compile(r"^(def |async def |class |import |from \S+ import|@)", re.MULTILINE)
# Lines without indentation that go on with code; anything else after the function is prose.
CODE_LINE = re.compile(
    r"^(\s|$|#|@|[)\]}]|(def|async def|class|import|from|if|elif|else|for|while|try|except|finally|with|assert)\b|[A-Za-z_][\w.\[\]]*\s*[=(])"
)


def extract_code(completion: str, entry_point: str) -> str:
    """The Python source in a completion that defines `entry_point`.

    Of several fenced blocks the first that defines and implements it is taken (an echoed stub does not count), then the first that defines
    it, then the first at all. Without a fence, the text from the first line of code up to the first line of prose after the function.
    Truncated code loses its last, incomplete lines. Empty where the completion holds no code.
    """
    blocks = []
    for fence in FENCE.finditer(completion):
        indent, body, closing = fence.groups()
        body = textwrap.dedent(body) if indent else body
        blocks.append(body if closing else _longest_valid(body) or _longest_valid(body, header="def f():\n") or body)
    if not blocks:
        return _unfenced(completion, entry_point)
    for wanted in (_implements, _defines):
        for block in blocks:
            if wanted(block, entry_point):
                return block
    return blocks[0]


def build_program(problem: Problem, code: str) -> str:
    """The source that the sandbox runs for `code`, an answer to `problem`."""
    return "\n".join([problem.preamble, after_preamble(problem, code), problem.tests])


def after_preamble(problem: Problem, code: str) -> str:
    """`code` as what follows `problem.preamble`: indented where it is only the body of the function that the preamble begins."""
    if not _defines(code, problem.entry_point) and _defines(problem.preamble, problem.entry_point):
        return _as_body(code)
    return code


def score(problems: Sequence[Problem], completions: Sequence[str], sandbox_config: SandboxConfig) -> list[SandboxResult]:
    """The verdict on each completion, in order; `no_completion` where there is no code to run.

    Raises:
        UserError: as many completions as problems are needed; or the sandbox refuses (see sandbox.run_program).
    """
    if len(problems) != len(completions):
        raise UserError(f"score: {len(problems)} problems but {len(completions)} completions; give one completion per problem")
    codes = [extract_code(completion, problem.entry_point) for problem, completion in zip(problems, completions, strict=True)]
    results = [SandboxResult(False, "no_completion", "the completion holds no code")] * len(problems)
    answered = [index for index, code in enumerate(codes) if code.strip()]
    verdicts = run_many([build_program(problems[index], codes[index]) for index in answered], sandbox_config)
    for index, verdict in zip(answered, verdicts, strict=True):
        results[index] = verdict
    return results


def _defines(code: str, entry_point: str) -> bool:
    name = re.escape(entry_point)
    return re.search(rf"^(?:(?:async )?def|class) +{name}\b|^{name} *(?::[^=\n]+)?=[^=]", code, re.MULTILINE) is not None


def _implements(code: str, entry_point: str) -> bool:
    """Whether `code` defines the function with more than a docstring, `pass` or `...` in it."""
    tree = _parse(code)
    if tree is None or not _defines(code, entry_point):
        return False
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry_point:
            return not all(isinstance(line, ast.Pass) or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)) for line in node.body)
    return True  # bound in another way, such as `f = lambda ...`


def _unfenced(text: str, entry_point: str) -> str:
    """Code in text without fences: the definition and what belongs to it, or the text itself where it reads as a function's body."""
    start = CODE_START.search(text)
    if not start or not _defines(text, entry_point):
        return _longest_valid(_as_body(text), header="def f():\n")
    lines, kept, inside = text[start.start() :].split("\n"), [], False
    for line in lines:
        inside = inside or _defines(line, entry_point)
        if inside and not CODE_LINE.match(line):
            break
        kept.append(line)
    code = "\n".join(kept)
    return _longest_valid(code) or code


def _as_body(code: str) -> str:
    """`code` as a function's body: indented by four as a whole, as it is, or with its first line alone indented (a strip took that)."""
    code = code.strip("\n")
    candidates = (textwrap.indent(textwrap.dedent(code), "    "), code, "    " + code)
    return max(candidates, key=lambda body: _longest_valid(body, header="def f():\n").count("\n"))


def _longest_valid(code: str, header: str = "") -> str:
    """`code` without the trailing lines that a token limit or prose left incomplete; empty where no beginning of it parses after `header`."""
    lines = code.split("\n")
    for end in range(len(lines), 0, -1):
        prefix = "\n".join(lines[:end])
        if prefix.strip() and _parse(header + prefix):
            return prefix
    return ""


def _parse(code: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the model's escapes, not ours
            return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
