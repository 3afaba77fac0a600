"""The small tools from their command line: arguments, `generate` and `doctor` on a tiny checkpoint; every mistake is one line."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Annotated

import pytest

from jacobi_core.decoding.config import DecodingConfig
from pipelines import doctor, generate
from pipelines.arguments import parse, run_tool, usage
from tasks.stage import UserError


class Colour(Enum):
    red = "r"
    blue = "b"


@dataclass
class Settings:
    """What it is for."""

    text: Annotated[str, "any text"]
    flag: Annotated[bool, "yes or no"] = False
    count: Annotated[int, "how many"] = 3
    share: Annotated[float, "of all"] = 0.5
    colour: Annotated[Colour, "of it"] = Colour.red
    limit: Annotated[int | None, "none: no limit"] = None
    sizes: Annotated[list[int], "several"] = field(default_factory=lambda: [1, 2])

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count must not be negative, got {self.count}")


def test_values_are_verbatim_and_typed():
    found = parse(["text=def f(x): a = 'b, c'", "flag=True", "count=-0", "share=1e-3", "colour=b", "limit=4", "sizes=4, 8"], Settings)
    assert found == Settings("def f(x): a = 'b, c'", True, 0, 0.001, Colour.blue, 4, [4, 8])
    assert parse(["text="], Settings) == Settings("")
    assert parse(["text=none", "limit=None"], Settings) == Settings("none", limit=None)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "text is missing: any text; give text=..."),
        (["text=a", "colur=r"], "colur: no such setting; nearest: colour"),
        (["text=a", "--count=3"], "--count: no such setting; nearest: count"),
        (["qqq=1"], "qqq: no such setting; known: text, flag"),
        (["text"], "text: needs a value, as in text=..."),
        (["text=a", "text=b"], "text: given twice"),
        (["text=a", "flag=yes"], "flag=yes: expected true or false"),
        (["text=a", "count=1.5"], "count=1.5: expected a whole number"),
        (["text=a", "share=x"], "share=x: expected a number"),
        (["text=a", "colour=green"], "colour=green: expected one of r, b"),
        (["text=a", "limit=x"], "limit=x: expected a whole number or none"),
        (["text=a", "sizes=1,,2"], "sizes=1,,2: expected a comma separated list, each entry a whole number"),
        (["text=a", "count=-1"], "count must not be negative, got -1"),
    ],
)
def test_mistakes_in_arguments(argv, message):
    with pytest.raises(UserError) as error:
        parse(argv, Settings)
    assert str(error.value).startswith(message)


def test_help_lists_every_setting(capsys):
    assert run_tool(["help"], Settings, lambda _: 9) == 0
    printed = capsys.readouterr().out
    assert printed.strip() == usage(Settings)
    assert "What it is for." in printed
    for line in ("text=...    any text", "flag=false  yes or no", "colour=r    of it", "limit=none  none: no limit", "sizes=1,2   several"):
        assert line in printed


@pytest.mark.parametrize("tool", [generate, doctor])
def test_the_tools_explain_themselves(tool, capsys):
    assert tool.main(["--help"]) == 0
    assert "model=..." in capsys.readouterr().out


@pytest.fixture
def rawcheckpoint(checkpoint, tmp_path) -> Path:
    """Without a chat template."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "raw"))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_generate_shows_one_text_where_both_are_equal(checkpoint, capsys):
    code = generate.main([f"model={checkpoint}", "prompt=def f(x): return x = 1", "max_new_tokens=20", "block_size=4", "dtype=float64"])
    printed = capsys.readouterr().out
    assert code == 0
    assert "both answers are equal, token for token" in printed
    assert "ar: " in printed and "mr+ngram, block size 4: " in printed
    for figure in ("tokens/s", "TPF", "mean acceptance length", "tokens by source: draft", "stopped by", "speedup"):
        assert figure in printed
    assert "---" not in printed


def test_generate_shows_both_texts_where_they_differ(checkpoint, capsys, monkeypatch):
    from jacobi_core.decoding.verify import accepted_length

    monkeypatch.setattr("jacobi_core.decoding.text.accepted_length", lambda draft, p: min(len(draft), accepted_length(draft, p) + 1))
    assert generate.main([f"model={checkpoint}", "prompt=add", "max_new_tokens=20", "method=jacobi", "block_size=8", "ngram=false"]) == 0
    printed = capsys.readouterr().out
    assert "--- ar\n" in printed and "--- jacobi, block size 8\n" in printed
    assert "the answers differ from token " in printed


def test_generate_reads_stdin_and_runs_ar_alone(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("def f(x):\n    return x\n"))
    assert generate.main([f"model={checkpoint}", "prompt=-", "max_new_tokens=5", "method=ar"]) == 0
    printed = capsys.readouterr().out
    assert "TPF 1.00" in printed and "equal" not in printed


def test_generate_feeds_a_raw_text_only_where_asked(rawcheckpoint, capsys):
    assert refused(generate, capsys, f"model={rawcheckpoint}", "prompt=add").startswith("chat: the tokenizer has no chat template")
    assert generate.main([f"model={rawcheckpoint}", "prompt=add", "chat=false", "max_new_tokens=4", "block_size=2"]) == 0


def refused(tool, capsys, *argv: str) -> str:
    assert tool.main(list(argv)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["model=/nope/x"], "model: /nope/x does not exist"),
        (["model=."], "model: folder . is no checkpoint, it has no config.json"),
        (["model={checkpoint}", "block_size=0"], "block_size must be at least 1, got 0"),
        (["model={checkpoint}", "method=zigzag"], "method=zigzag: expected one of ar, jacobi, running_window"),
        (["model={checkpoint}", "dtype=int8"], "dtype must be one of float32, bfloat16, float64, got 'int8'"),
        (["model={checkpoint}", "max_new_tokens=5000"], "prompt ("),
        (["model={checkpoint}", "prompt="], "prompt: is empty; give some text"),
    ],
)
def test_mistakes_of_generate(checkpoint, capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    argv = [a.replace("{checkpoint}", str(checkpoint)) for a in argv]
    argv += [] if any(a.startswith("prompt=") for a in argv) else ["prompt=add"]
    assert refused(generate, capsys, *argv).startswith(message)


def test_generate_decodes_as_the_checkpoint_asks(tmp_path):
    def decoding(*argv: str) -> DecodingConfig:
        return parse([f"model={tmp_path}", "prompt=add", *argv], generate.GenerateArguments).decoding()

    assert decoding() == DecodingConfig(method="mr", block_size=64, ngram=True, max_new_tokens=256)
    (tmp_path / "jacobi_forcing.json").write_text('{"name": "round2", "block_size": 32}')
    assert decoding("seed=5") == DecodingConfig(method="running_window", block_size=32, ngram=True, auto=True, max_new_tokens=256, seed=5)
    assert decoding("method=jacobi", "max_new_tokens=9") == DecodingConfig(method="jacobi", block_size=32, max_new_tokens=9)
    assert decoding("block_size=8", "auto=false").block_size == 8


def test_weights_that_cannot_be_read_are_one_line(checkpoint, capsys, tmp_path):
    broken = Path(shutil.copytree(checkpoint, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"nothing")
    assert refused(generate, capsys, f"model={broken}", "prompt=add").startswith(f"model={broken}: cannot be loaded (")


def test_doctor_certifies_a_checkpoint(checkpoint, capsys, tmp_path):
    file = tmp_path / "new" / "report.json"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "add 1 to each"}\n{"messages": [{"role": "user", "content": "def f"}]}\n')
    code = doctor.main(
        [f"model={checkpoint}", f"prompts={prompts}", "max_new_tokens=12", "block_sizes=3", "dtypes=float32,float64", f"report={file}"]
    )
    printed = capsys.readouterr().out
    assert code == 0
    assert "lossless: no defect found" in printed
    assert "end of text: 2 '<|im_end|>' from tokenizer, generation_config, config" in printed
    report = json.loads(file.read_text())
    assert report["lossless"] is True
    assert report["eos_ids"]["2"] == ["tokenizer", "generation_config", "config"]
    assert report["tokenizer_size"] == report["embedding_rows"]
    assert [p["dtype"] for p in report["precisions"]] == ["float64", "float32"]  # the proof first
    assert [(p["equal_share"], p["defects"], len(p["runs"])) for p in report["precisions"]] == [(1.0, 0, 9)] * 2


def test_doctor_finds_a_wrong_decoder(checkpoint, capsys, tmp_path, monkeypatch):
    from jacobi_core.decoding.verify import accepted_length

    monkeypatch.setattr("jacobi_core.decoding.text.accepted_length", lambda draft, p: min(len(draft), accepted_length(draft, p) + 1))
    file = tmp_path / "report.json"
    assert doctor.main([f"model={checkpoint}", "max_new_tokens=16", "block_sizes=4", "dtypes=float64", f"report={file}"]) == 1
    printed = capsys.readouterr().out
    assert "NOT LOSSLESS" in printed
    assert "  defect: prompt 0, jacobi, block size 4: first differing token " in printed
    report = json.loads(file.read_text())
    assert report["lossless"] is False
    assert report["precisions"][0]["findings"][0]["kind"] == "defect"


def test_doctor_warns_of_settings_that_are_not_greedy(checkpoint, capsys, tmp_path):
    """A checkpoint with a repetition penalty: our methods agree with each other, and the ignored setting is named."""
    penalised = Path(shutil.copytree(checkpoint, tmp_path / "penalised"))
    settings = json.loads((penalised / "generation_config.json").read_text())
    (penalised / "generation_config.json").write_text(json.dumps({**settings, "repetition_penalty": 1.3}))
    assert doctor.main([f"model={penalised}", "max_new_tokens=8", "block_sizes=4", "dtypes=float64"]) == 0
    assert "warning: generation_config.repetition_penalty=1.3 is applied by transformers' generate()" in capsys.readouterr().out


def test_doctor_says_that_prompts_are_raw(rawcheckpoint, capsys):
    assert doctor.main([f"model={rawcheckpoint}", "max_new_tokens=4", "block_sizes=2", "dtypes=float64"]) == 0
    assert "no chat template; prompts are fed as they are" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prompts=nope.jsonl"], "prompts=nope.jsonl: cannot be read"),
        (["prompts=bad.jsonl"], 'prompts=bad.jsonl, row 1: needs "prompt"'),
        (["block_sizes=0"], "block_sizes and max_new_tokens must be at least 1, got 0"),
        (["dtypes=int8"], "dtypes must be one of"),
        (["max_new_tokens=5000", "dtypes=float32"], "prompt ("),
        (["report=bad.jsonl/report.json"], "report=bad.jsonl/report.json: cannot write there"),
    ],
)
def test_mistakes_of_doctor(checkpoint, capsys, tmp_path, monkeypatch, argv, message):
    monkeypatch.chdir(tmp_path)
    Path("bad.jsonl").write_text('{"text": 1}\n')
    assert refused(doctor, capsys, f"model={checkpoint}", *argv).startswith(message)
