"""Whether a documented command could run, found out without running it: its module is there, its arguments parse, its config composes.

`check` raises AssertionError, or what the command's own parser raises, for one that could not. A program that is not known here is one mistake too,
so that no command goes unchecked. Where a command names a model or prompts of the reader's, the caller has put stand-ins into the working directory.
"""

from __future__ import annotations

import importlib
import itertools
import re
import shlex
import tomllib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from pipelines.arguments import HELP, parse
from pipelines.config import schema
from tests.documented.commands import ROOT
from tests.pipelines.configs import composed

PIPELINES = ("pipelines.full_run", "pipelines.run_stage")
TOOLS = {  # module, and its command where it has some -> the dataclass of its settings
    "pipelines.generate": "GenerateArguments",
    "pipelines.doctor": "DoctorArguments",
    "pipelines.evidence": "EvidenceArguments",
    "pipelines.inspect": "InspectArguments",
    "pipelines.serve": "ServeArguments",
    "pipelines.tracking.__main__": "Arguments",
    "pipelines.store.__main__ list": "ListArguments",
    "pipelines.store.__main__ prune": "PruneArguments",
    "pipelines.store.__main__ verify": "VerifyArguments",
}
OTHERS = {"cd", "curl", "git", "lm_eval", "source", "vllm"}  # not ours, and as they were when the page was written
STAGE = re.compile(
    r"(prompts|base|answer_lengths|latency|search|final|report|(\w+/)?\w+/(answers|speed|evaluate)|\w+/prompts|(round\d+|cllm)/(trajectories|pack|distill|export))"
)
_ASSIGNMENT = re.compile(r"\w+=\S*")


def check(command: str) -> None:
    """One line of a shell block."""
    words = shlex.split(command, comments=True)
    while words and _ASSIGNMENT.fullmatch(words[0]):
        del words[0]
    assert words, f"nothing to run: {command}"
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program in ("python", "python3"):
        _check_python(arguments)
    elif program == "make":
        _check_make(arguments)
    elif program == "pip":
        check_extras(" ".join(arguments))
    elif program == "ray":
        if "--" in arguments:  # a job
            check(shlex.join(arguments[arguments.index("--") + 1 :]))
    elif program in ("pre-commit", "mkdocs", "ruff"):
        assert find_spec(program.replace("-", "_")), f"{program} is not installed by the extra dev"
    else:
        assert program in OTHERS, f"{program}: no command that is known here"


def _check_python(arguments: Sequence[str]) -> None:
    assert (arguments and arguments[0] == "-m") or (ROOT / arguments[0]).is_file(), f"no such file: {arguments[:1]}"
    if arguments[0] != "-m":
        return
    module, rest = arguments[1], list(arguments[2:])
    check_module(module)
    name = f"{module}.__main__" if find_spec(module).submodule_search_locations else module
    if module in PIPELINES:
        _check_pipeline(rest, stage=module.endswith("run_stage"))
    elif module == "pipelines.store" and rest and rest[0] == "explain":
        _check_pipeline(rest[1:], stage=False)
        assert STAGE.fullmatch(rest[1]) or "-" in rest[1], f"{rest[1]}: no stage, no folder"
    elif module.startswith("pipelines."):
        key = f"{name} {rest.pop(0)}" if module == "pipelines.store" else name
        if not HELP & set(rest):
            parse(rest, getattr(importlib.import_module(name), TOOLS[key]))
    elif module == "pytest":
        _check_pytest(rest)
    elif module.startswith(("benchmarks.", "tasks.", "tests.")):
        _check_flags(module, rest)
    else:
        assert module == "mlflow", f"{module}: no module that is known here"


def check_module(module: str) -> None:
    assert find_spec(module) is not None, f"{module}: no such module"


def _check_pipeline(arguments: list[str], *, stage: bool) -> None:
    """Every job of it composes, and its config is sound."""
    if stage:
        assert STAGE.fullmatch(arguments[0]), f"{arguments[0]}: no stage is called so"
        del arguments[0]
    given = get_args_parser().parse_args(arguments)
    overrides = [override for override in given.overrides if STAGE.fullmatch(override) is None]
    parsed = [(OverridesParser.create().parse_override(text), text) for text in overrides]
    choices = [_values(override) if given.multirun and override.is_sweep_override() else [text] for override, text in parsed]
    own = [f"hydra.searchpath=[file://{given.config_dir}]"] if given.config_dir else []
    for job in itertools.product(*choices):
        schema.build(composed(*own, *job))


def _values(override: Override) -> list[str]:
    return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]


def _check_make(arguments: Sequence[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.+)$", text, re.MULTILINE)[1].split()
    variables = re.findall(r"^(\w+) \?=", text, re.MULTILINE)
    for argument in arguments:
        assert argument.partition("=")[0] in (variables if "=" in argument else targets), f"make {argument}: no such target or variable"


def check_extras(text: str) -> None:
    """Extras that are named as in `jacobi-forcing[serve]` or `.[serve]`."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"(?:jacobi-forcing|\.)\[([\w,]+)\]", text):
        assert set(names.split(",")) <= known.keys(), f"no such extra: {names}"


def _check_pytest(arguments: Sequence[str]) -> None:
    markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["markers"]
    known = {marker.partition(":")[0] for marker in markers}
    for before, argument in zip(["", *arguments], arguments, strict=False):
        if before == "-m":
            assert set(re.findall(r"\w+", argument)) - {"and", "or", "not"} <= known, f"pytest -m {argument}: no such marker"
        elif not argument.startswith("-"):
            assert (ROOT / argument.partition("::")[0]).exists(), f"{argument}: no such test file"


def _check_flags(module: str, arguments: Sequence[str]) -> None:
    """Flags of a module with argparse, which may import torch: looked for in its source."""
    spec = find_spec("lm_eval._cli.run" if module == "tasks.problem_sets.lm_eval_cli" else module)
    source = Path(spec.origin).read_text(encoding="utf-8")
    for argument in arguments:
        if argument.startswith("--"):
            assert f'"{argument.partition("=")[0]}"' in source, f"{module}: has no {argument}"
