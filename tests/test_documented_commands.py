"""README and docs/ can be believed: every command in them could run, every snippet of Python compiles, every quoted message is in the source.

That the commands do run is shown by tests/documented/run_commands.py, in a clean clone.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import jacobi_core
from pipelines.config.schema import PipelineConfig
from tests.documented import run_commands
from tests.documented.checks import check, check_extras, check_module
from tests.documented.commands import COMMANDS, KINDS, LANGUAGES, ROOT, Block, blocks, documents, inline_code

DOCUMENTS = {str(path.relative_to(ROOT)): path for path in documents()}
BLOCKS = [block for path in DOCUMENTS.values() for block in blocks(path)]
SHELL = [(block, command) for block in BLOCKS if block.language == COMMANDS for command in block.commands]
PYTHON = [block for block in BLOCKS if block.language == "python"]
HIDDEN = re.compile(r"^\s*(\$ |\.venv/bin/|python3? -m |make \w|pip install |ray (start|job) )")


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a command finds after a quickstart, and the files of a reader's that pages name."""
    for model in ("outputs/models/quickstart",):
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 512}))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Why?"}\n')
    (tmp_path / "my_conf" / "experiment").mkdir(parents=True)
    own = next(block for block in BLOCKS if block.language == "yaml" and "my_conf/" in block.text)
    (tmp_path / own.text.splitlines()[1].removeprefix("# ")).write_text(own.text)  # the first line is Hydra's
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


@pytest.mark.parametrize(("block", "command"), SHELL, ids=[f"{block.where}: {command}" for block, command in SHELL])
def test_a_documented_command_could_run(block: Block, command: str, readers_folder: Path):
    check(command)


@pytest.mark.parametrize("block", PYTHON, ids=[block.where for block in PYTHON])
def test_a_documented_snippet_compiles_and_its_imports_are_there(block: Block):
    for node in ast.walk(ast.parse(block.text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module] if isinstance(node, ast.ImportFrom) else []
        for module in names:
            check_module(module)
        if names == ["jacobi_core"] and isinstance(node, ast.ImportFrom):
            assert {alias.name for alias in node.names} <= set(jacobi_core.__all__)


def test_blocks_say_what_they_are_and_no_command_hides():
    for block in BLOCKS:
        assert block.language in LANGUAGES, f"{block.where}: begin the block with one of {', '.join(LANGUAGES)}"
        runs = block.language in (COMMANDS, "python")
        assert runs or not (block.skip or block.serves), f"{block.where}: nothing here is run, so there is nothing to mark"
        assert block.skip is None or block.skip in KINDS, f"{block.where}: skip one of {', '.join(KINDS)}, and say why"
        assert "<<" not in block.text or block.language != COMMANDS, f"{block.where}: one command per line, no here-documents"
        assert block.language != "text" or not any(HIDDEN.match(line) for line in block.text.splitlines()), f"{block.where}: commands are `bash`"
    for name, path in DOCUMENTS.items():
        indented = [line for line in path.read_text().splitlines() if line.startswith("    ") and HIDDEN.match(line)]
        assert not indented, f"{name}: fence it"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_is_named_in_passing_exists(name: str):
    """Modules, make targets, extras, files and settings of the pipeline in running text."""
    typed = OmegaConf.structured(PipelineConfig)
    sections = {field.name for field in dataclasses.fields(PipelineConfig)}
    for code in inline_code(DOCUMENTS[name]):
        if found := re.match(r"(?:\.venv/bin/)?python -m ([\w.]+)", code):
            check_module(found[1])
        if re.match(r"make [a-z-]+( |$)", code):
            check(code.partition(" ...")[0])
        check_extras(code)
        if re.fullmatch(r"(?:jacobi_core|tasks|pipelines|dashboards|conf|docs|tests|benchmarks)/[\w./-]+", code) and "NAME" not in code:
            assert (ROOT / code).exists(), f"{name}: {code} is not there"
        for setting in re.findall(r"(?<![\w./{])([a-z_]+(?:\.\w+)+)=", code):
            parts = re.sub(r"\.(\d+|N)\.", ".0.", setting).split(".")
            if parts[0] in sections:
                _select(typed, parts, f"{name}: {setting}")


def _select(node, parts: list[str], told: str) -> None:
    for part in parts:
        assert part.isdecimal() or part in node, f"{told}: no such setting"
        node = node[int(part) if part.isdecimal() else part]


def test_troubleshooting_quotes_messages_of_the_source():
    """What stands in the first column, as code, between the dots: a reader looks for what he sees."""
    sources = "\n".join(path.read_text() for folder in ("jacobi_core", "tasks", "pipelines") for path in (ROOT / folder).rglob("*.py"))
    sources += (ROOT / "Makefile").read_text()
    sources = re.sub(r'"\n\s*f?"', "", sources)  # a text over several lines
    missing = []
    for line in (ROOT / "docs" / "troubleshooting.md").read_text().splitlines():
        first = re.match(r"\| (`[^|]+`)[^|]*\|", line)
        for message in re.findall(r"`([^`]+)`", first[1]) if first else []:
            pieces = [piece.strip() for piece in message.split("...") if len(piece.strip()) > 3]
            missing += [message for piece in pieces if piece not in sources]
    assert not missing


def test_pictures_say_in_words_what_they_show():
    for name, path in DOCUMENTS.items():
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", path.read_text()):
            assert len(alt.split()) >= 5, f"{name}: {target} needs a text for those who do not see it"
            assert (path.parent / target).is_file(), f"{name}: {target} is not there"


def test_the_checks_can_fail(readers_folder: Path):
    for command in (
        "python -m pipelines.full_runn",
        "python -m pipelines.full_run experiment=quick",
        "python -m pipelines.full_run -m noise_schedule=linear,rising",
        "python -m pipelines.full_run rounds.0.windows=4",
        "python -m pipelines.run_stage round1/packs",
        "python -m pipelines.generate model=DIR promt=x",
        "python -m pipelines.store prune older=30d",
        "python -m benchmarks.serve --modle DIR",
        "python -m pytest tests/no_such_file.py",
        "python -m pytest -m gpus",
        "make quick",
        'pip install -e ".[servee]"',
        "ray job submit -- python -m pipelines.full_run experiment=quick",
        "rm -rf outputs",
    ):
        with pytest.raises((Exception, SystemExit)):
            check(command)


def test_marks_and_commands_are_read_off_blocks(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n\n<!-- skip gpu: eight -->\n```bash\n# why\none \\\n    more\ntwo  # three\n```\n\n<!-- serves: ready -->\n```bash\nup\n```\n"
    )
    first, second = blocks(page)
    assert (first.skip, first.reason, first.line, first.commands) == ("gpu", "eight", 4, ["one more", "two  # three"])
    assert (second.serves, second.skip, second.commands) == ("ready", None, ["up"])
    page.write_text("<!-- skip: no kind -->\n")
    with pytest.raises(ValueError, match=r"page\.md:1"):
        blocks(page)


def test_the_runner_runs_in_order_serves_and_tells(tmp_path: Path):
    page = tmp_path / "clone" / "page.md"
    page.parent.mkdir()
    serve = 'python3 -c \'import pathlib, time; print("up", flush=True); pathlib.Path("there").touch(); time.sleep(300)\''
    page.write_text(
        "```bash\ntouch first\nfalse\n```\n<!-- skip long: hours -->\n```bash\ntouch never\n```\n```python\nopen('second', 'w')\n```\n"
        f"<!-- serves: up -->\n```bash\n{serve}\ntest -e first -a -e second\n```\n"
    )
    told: list[dict] = []
    records = run_commands.run_all([page], run_commands.Runner(page.parent), kinds=[], tell=told.append)
    assert records == told
    assert [(r["command"][:12], r.get("status"), r["skipped"]) for r in records] == [
        ("touch first", 0, None),
        ("false", 1, None),
        ("touch never", None, "long: hours"),
        ("(python, 1 l", 0, None),
        (serve[:12], 0, None),
        ("test -e firs", 0, None),
    ]
    assert not (page.parent / "never").exists()
    assert find_spec("tests.documented.run_commands") is not None
