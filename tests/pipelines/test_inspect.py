"""What is printed about a trajectory set: totals, reasons, sizes, and states in which tokens freeze from the left."""

from __future__ import annotations

import io
import json
import re
import shutil

import pytest
from rich.console import Console

from jacobi_core.hub import load_tokenizer
from pipelines import inspect
from tasks import artifacts, trajectory_files
from tests.tasks.tiny_stage import build_prompts, hand_trajectory


@pytest.fixture
def folder(tmp_path):
    """Two parts, in a store: 3 trajectories of 1, 2 and 1 blocks; dropped and quarantined prompts."""
    made = tmp_path / "trajectories-abc"
    made.mkdir()
    rows = [
        hand_trajectory(7, [65, 66, 67, 68, 69], block_size=5, unconverged=[[5, 3, 1, 0]]),
        hand_trajectory(8, [70, 71, 72, 73, 74, 75], block_size=5, unconverged=[[2, 0], [0]]),
        hand_trajectory(2**62, [80, 81], block_size=5, unconverged=[[2, 1, 0]]),
    ]
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(made, 0), rows[:2])
    trajectory_files.write_trajectories(trajectory_files.trajectory_part(made, 1), rows[2:])
    artifacts.write_json(made / "dropped-000000.json", [{"id": 1, "reason": "loop"}, {"id": 2, "reason": "empty"}])
    artifacts.write_json(made / "dropped-000001.json", [{"id": 3, "reason": "loop"}])
    artifacts.write_json(made / "quarantine-000001.json", [{"id": 4, "error": "ValueError: too long"}])
    return made


def shown(capsys, *arguments) -> str:
    assert inspect.main(list(arguments)) == 0
    return capsys.readouterr().out


def fact(text: str, name: str) -> str:
    return re.search(rf"^{name} {{2,}}(.*?) *$", text, re.M).group(1)


def test_totals_reasons_and_sizes(folder, capsys):
    text = shown(capsys, f"trajectories={folder}", "blocks=0")
    size = sum(part.stat().st_size for part in folder.glob("part-*"))
    assert fact(text, "trajectories") == "3 in 2 parts (no manifest: the stage is running or was interrupted)"
    assert fact(text, "block size") == "5"
    assert fact(text, "prompt tokens") == "6, mean 2.0"
    assert fact(text, "answer tokens") == "13, mean 4.3, longest 6"
    assert fact(text, "stopped by") == "eos 3"
    assert fact(text, "dropped") == "loop 2, empty 1"
    assert fact(text, "quarantined") == "ValueError 1"
    assert fact(text, "blocks") == "4, 10 states"
    assert fact(text, "size") == f"{size / 1e6:,.2f} MB, {size / 13:.2f} bytes per answer token"
    histogram = dict(line.split()[:2] for line in text.partition("stored states - 1)\n")[2].splitlines() if line.strip())
    assert histogram == {"0": "1", "1": "1", "2": "1", "3": "1"}


def test_states_freeze_from_the_left(folder, capsys):
    text = shown(capsys, f"trajectories={folder}", "id=7")
    states = text[text.index("prompt 7, block 1 of 1, 5 tokens, 3 forwards") :].splitlines()[1:]
    assert states == ["  0/5  | 1 1 1 1 1", "  2/5   65 66| 1 1 1", "  4/5   65 66 67 68| 1", "  5/5   65 66 67 68 69|"]


def test_all_blocks_of_an_id_and_what_stands_before_them(folder, capsys):
    text = shown(capsys, f"trajectories={folder}", "id=8")
    assert "prompt 8, block 1 of 2, 5 tokens, 1 forwards" in text
    assert "prompt 8, block 2 of 2, 1 tokens, 0 forwards\nafter   70 71 72 73 74\n  1/1   75|" in text
    assert inspect.main([f"trajectories={folder}", "id=99"]) == 2
    assert capsys.readouterr().err.startswith("error: id=99: no trajectory of")


@pytest.mark.parametrize(("blocks", "ids"), [(1, [7]), (2, [7, 8]), (3, [7, 8, 2**62]), (9, [7, 8, 2**62])])
def test_blocks_are_picked_from_all_over_the_set(folder, capsys, blocks, ids):
    text = shown(capsys, f"trajectories={folder}", f"blocks={blocks}")
    assert [int(i) for i in re.findall(r"^prompt (\d+), block", text, re.M)] == ids


def test_the_prompts_tokenizer_is_found_through_the_manifest(folder, capsys, tmp_path):
    build_prompts(tmp_path / "prompts-def")
    (folder / "manifest.json").write_text(json.dumps({"upstream": {"prompts": "def", "model": "x"}}))
    text = shown(capsys, f"trajectories={folder}", "id=7")
    assert fact(text, "trajectories") == "3 in 2 parts"
    tokenizer = load_tokenizer(tmp_path / "prompts-def" / "tokenizer")
    expected = "".join(inspect._one_line(tokenizer.decode([i])) for i in range(65, 70))
    assert f"  5/5  {expected}|" in text and "65 66" not in text
    shutil.rmtree(tmp_path / "prompts-def")
    assert "  5/5   65 66 67 68 69|" in shown(capsys, f"trajectories={folder}", "id=7")


def test_a_model_given_by_name_brings_its_tokenizer(folder, capsys, base_folder_path):
    text = shown(capsys, f"trajectories={folder}", "id=7", f"model={base_folder_path}")
    assert "  5/5   65 66 67 68 69|" not in text and "  5/5  " in text


@pytest.fixture
def base_folder_path(tmp_path):
    from tests.tasks.tiny_stage import build_base

    build_prompts(tmp_path / "stage")
    build_base(tmp_path / "base", tmp_path / "stage" / "tokenizer")
    return tmp_path / "base"


def test_a_terminal_dims_what_is_frozen_and_cuts_long_lines(folder):
    row = next(trajectory_files.read_rows(trajectory_files.trajectory_part(folder, 0)))
    console = Console(file=io.StringIO(), force_terminal=True, width=24, color_system="standard")
    inspect.print_block(console, row, 0, lambda ids: "".join(f" {int(i)}" for i in ids))
    lines = console.file.getvalue().splitlines()
    lines = lines[next(i for i, line in enumerate(lines) if line.startswith("  0/5")) :]
    assert len(lines) == 4
    assert re.search(r"\x1b\[2;32m 65 66\x1b\[0m\x1b\[1m\|\x1b\[0m\x1b\[1;33m 1 1", lines[1])
    assert all(len(re.sub(r"\x1b\[[\d;]*m", "", line)) <= 24 for line in lines)


def test_text_stays_on_its_line():
    assert inspect._one_line("a\r\n\tb\x1b[0m\u2028 é🙂") == "a\\r\\n\\tb\\x1b[0m\\x2028 é🙂"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "trajectories is missing"),
        (["trajectories=nowhere"], "trajectories=nowhere: holds no part-*.parquet"),
        (["trajectories=x", "blocks=-1"], "blocks must not be negative, got -1"),
        (["trajectory=x"], "trajectory: no such setting; nearest: trajectories"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert inspect.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {says}") and error.count("\n") == 1


def test_a_damaged_part_is_named(folder, capsys):
    part = trajectory_files.trajectory_part(folder, 1)
    part.write_bytes(b"PAR1")
    assert inspect.main([f"trajectories={folder}"]) == 2
    assert str(part) in capsys.readouterr().err
