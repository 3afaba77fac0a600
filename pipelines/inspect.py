"""`python -m pipelines.inspect trajectories=DIR`: what a trajectory set holds, and a few blocks in which a person sees tokens freeze.

Reads the finished parts of a stage that may still be running; `help` lists the settings. Exit code 2 for a mistake in them. Changes nothing.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipelines.arguments import run_tool
from tasks import artifacts, trajectory_files
from tasks.stage import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.trajectory_files import TrajectoryRow

BAR = 40  # characters of the longest histogram bar
ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
PLAIN_WIDTH = 10_000  # of lines that go to a file or pipe: never cut
Show = Callable[[Sequence[int]], str]  # token ids -> one line of text


@dataclass
class InspectArguments:
    """python -m pipelines.inspect trajectories=DIR: counts, sizes, drop reasons, iterations, and blocks rendered state by state.

    One line per Jacobi state; what is left of the mark (dimmed in a terminal) equals the fixed point and is frozen.
    """

    trajectories: Annotated[str, "folder of a trajectories stage, finished or running"]
    model: Annotated[str | None, "checkpoint whose tokenizer turns ids into text; none: that of the run's prompts, where it is found"] = None
    blocks: Annotated[int, "how many blocks to render, spread evenly over the set"] = 3
    id: Annotated[int | None, "render all blocks of this prompt id instead"] = None
    trust_remote_code: Annotated[bool, "may the checkpoint bring its own Python code?"] = False

    def __post_init__(self) -> None:
        if self.blocks < 0:
            raise ValueError(f"blocks must not be negative, got {self.blocks}")


@dataclass
class Summary:
    """Totals over all rows, and the rows picked for rendering."""

    rows: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    longest_answer: int = 0
    states: int = 0
    stop_reasons: Counter[str] = field(default_factory=Counter)
    block_sizes: Counter[int] = field(default_factory=Counter)
    iterations: Counter[int] = field(default_factory=Counter)  # forwards until a block was its fixed point -> blocks
    picked: list[TrajectoryRow] = field(default_factory=list)

    def add(self, row: TrajectoryRow) -> None:
        self.rows += 1
        self.prompt_tokens += len(row.prompt_ids)
        self.answer_tokens += len(row.answer_ids)
        self.longest_answer = max(self.longest_answer, len(row.answer_ids))
        self.stop_reasons[row.stop_reason] += 1
        self.block_sizes[row.block_size] += 1
        self.states += sum(map(len, row.states))
        self.iterations.update(len(states) - 1 for states in row.states)


def main(argv: list[str]) -> int:
    """Exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model's text need not fit the terminal's encoding
    return run_tool(argv, InspectArguments, _run)


def _run(arguments: InspectArguments) -> int:
    folder = Path(arguments.trajectories)
    parts = trajectory_files.trajectory_parts(folder)
    if not parts:
        raise UserError(f"trajectories={folder}: holds no part-*.parquet; give the folder of a trajectories stage, in the store of its run")
    show = _shower(arguments, folder)
    summary = _summarize(parts, arguments)
    if arguments.id is not None and not summary.picked:
        raise UserError(f"id={arguments.id}: no trajectory of {folder} has this prompt id")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    _print_summary(console, folder, parts, summary)
    for row in summary.picked:
        blocks = range(len(row.states)) if arguments.id is not None else [len(row.states) // 2]
        for block in blocks:
            print_block(console, row, block, show)
    return 0


def _summarize(parts: list[Path], arguments: InspectArguments) -> Summary:
    total = sum(map(_row_count, parts))
    wanted = {i * total // arguments.blocks for i in range(arguments.blocks)} if arguments.id is None else set()
    summary = Summary()
    for number, row in enumerate(_rows(parts)):
        summary.add(row)
        if number in wanted or row.id == arguments.id:
            summary.picked.append(row)
    return summary


def _row_count(part: Path) -> int:
    try:
        return pq.ParquetFile(part).metadata.num_rows
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{part}: not a readable Parquet file ({error})") from error


def _rows(parts: list[Path]) -> Iterator[TrajectoryRow]:
    for part in parts:
        yield from trajectory_files.read_rows(part)


# ---- the summary


def _print_summary(console: Console, folder: Path, parts: list[Path], summary: Summary) -> None:
    size = sum(part.stat().st_size for part in parts)
    dropped = Counter(entry["reason"] for entry in _entries(folder, "dropped"))
    failed = Counter(entry["error"].partition(":")[0] for entry in _entries(folder, "quarantine"))
    finished = "" if (folder / "manifest.json").is_file() else " (no manifest: the stage is running or was interrupted)"
    table = Table(box=None, show_header=False, pad_edge=False)
    facts = {
        "trajectories": f"{summary.rows:,} in {len(parts):,} parts{finished}",
        "block size": _counts(summary.block_sizes) if len(summary.block_sizes) > 1 else f"{next(iter(summary.block_sizes), 0)}",
        "prompt tokens": f"{summary.prompt_tokens:,}, mean {summary.prompt_tokens / max(summary.rows, 1):.1f}",
        "answer tokens": f"{summary.answer_tokens:,}, mean {summary.answer_tokens / max(summary.rows, 1):.1f}, longest {summary.longest_answer:,}",
        "stopped by": _counts(summary.stop_reasons),
        "dropped": _counts(dropped),
        "quarantined": _counts(failed),
        "blocks": f"{sum(summary.iterations.values()):,}, {summary.states:,} states",
        "size": f"{size / 1e6:,.2f} MB, {size / max(summary.answer_tokens, 1):.2f} bytes per answer token",
    }
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
    if summary.iterations:
        console.print("\nforwards until a block was its fixed point (stored states - 1)")
        most = max(summary.iterations.values())
        for iterations in range(max(summary.iterations) + 1):
            blocks = summary.iterations[iterations]
            console.print(f"{iterations:>4} {blocks:>10,} {'#' * round(BAR * blocks / most)}".rstrip())


def _entries(folder: Path, kind: str) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob(f"{kind}-*.json")):
        yield from artifacts.read_json(path)


def _counts(counter: Counter) -> str:
    return ", ".join(f"{key} {count:,}" for key, count in counter.most_common()) or "none"


# ---- blocks


def print_block(console: Console, row: TrajectoryRow, block: int, show: Show) -> None:
    """One line per state: how many tokens are frozen, those tokens, the mark, the others."""
    states, fixed = row.states[block], row.states[block][-1]
    before = row.answer_ids[: block * row.block_size][-row.block_size :]
    console.print(f"\nprompt {row.id}, block {block + 1} of {len(row.states)}, {len(fixed)} tokens, {len(states) - 1} forwards")
    if len(before):
        console.print(Text(f"after  {show(before)}", style="dim"), no_wrap=True, overflow="ellipsis")
    for state in states:
        frozen = next((i for i, (token, final) in enumerate(zip(state, fixed, strict=True)) if token != final), len(fixed))
        line = Text(f"{frozen:>3}/{len(fixed):<3}").append(show(state[:frozen]), style="dim green").append("|", style="bold")
        console.print(line.append(show(state[frozen:]), style="bold yellow"), no_wrap=True, overflow="ellipsis")


def _shower(arguments: InspectArguments, folder: Path) -> Show:
    tokenizer = _tokenizer(arguments, folder)
    if tokenizer is None:
        return lambda ids: "".join(f" {int(i)}" for i in ids)
    # token by token: a token's text must not change with what stands before it, or nothing would be seen to freeze
    return lambda ids: "".join(_one_line(tokenizer.decode([int(i)])) for i in ids)


def _one_line(text: str) -> str:
    return "".join(ESCAPES.get(character, character if character.isprintable() else f"\\x{ord(character):02x}") for character in text)


def _tokenizer(arguments: InspectArguments, folder: Path) -> PreTrainedTokenizerBase | None:
    if arguments.model is not None:
        from pipelines.checkpoints import load_tokenizer

        return load_tokenizer(arguments.model, trust_remote_code=arguments.trust_remote_code)
    try:
        prompts = artifacts.read_json(folder / "manifest.json")["upstream"]["prompts"]
    except (UserError, KeyError, TypeError):  # not finished, or copied out of its store
        return None
    place = folder.parent / f"prompts-{prompts}" / "tokenizer"
    if not place.is_dir():
        return None
    from jacobi_core import hub

    return hub.load_tokenizer(place, trust_remote_code=arguments.trust_remote_code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
