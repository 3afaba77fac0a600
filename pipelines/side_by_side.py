"""Two decoders of one prompt, one after the other: what each says and how fast, live in two columns where there is a terminal.

Each decoder runs alone and its clock runs only inside its forwards: neither drawing nor turning tokens into text counts as decoding.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jacobi_core.decoding.config import DecodingConfig

if TYPE_CHECKING:
    import torch
    from rich.console import Console, RenderableType
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from jacobi_core.decoding.stats import Generation
    from jacobi_core.decoding.tokens import TokenRules

REDRAW_SECONDS = 0.1  # at most ten pictures a second
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # in a model's text they would move the cursor


@dataclass
class Run:
    """One decoder at work. `generation` is there once it has finished; `text` is what it has said, special tokens left out."""

    name: str
    text: str = ""
    tokens: int = 0
    forwards: int = 0
    seconds: float = 0.0
    generation: Generation | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    def figures(self) -> str:
        """One line about a finished run."""
        stats = self.generation.stats
        accepted = sum(committed - 1 for committed in stats.committed_per_forward) / stats.forwards
        sources = ", ".join(f"{source} {count}" for source, count in stats.accepted_from.most_common())
        return (
            f"{self.name}: {stats.tokens} tokens, {stats.forwards} forwards, {self.seconds:.2f} s, {self.tokens_per_second:.1f} tokens/s, "
            f"TPF {stats.tpf:.2f}, mean acceptance length {accepted:.2f} draft tokens, tokens by source: {sources}; "
            f"stopped by {stats.stop_reason}"
        )


def decode(
    run: Run,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: torch.Tensor,
    config: DecodingConfig,
    rules: TokenRules,
    after_forward: Callable[[], None],
) -> None:
    """Fills `run`, forward by forward, prompt included; what a first forward costs once is spent before."""
    from jacobi_core.decoding.generate import generate
    from jacobi_core.decoding.stream import TextPieces, stream

    generate(model, prompt, replace(config, max_new_tokens=min(2, config.max_new_tokens)), rules=rules)
    pieces = TextPieces(tokenizer)
    start = time.perf_counter()
    tokens = stream(model, prompt, config, rules=rules)
    while True:
        committed = next(tokens, None)  # token ids on the host: nothing is left to wait for
        run.seconds += time.perf_counter() - start
        if committed is None:
            break
        run.tokens, run.forwards = run.tokens + len(committed), run.forwards + 1
        run.text += pieces.push(committed)
        after_forward()
        start = time.perf_counter()
    run.text += pieces.end()
    run.generation = tokens.generation


class Columns:
    """The runs beside each other on a terminal, redrawn as their texts grow and left there whole at the end. A context manager."""

    def __init__(self, console: Console, runs: list[Run]) -> None:
        from rich.live import Live

        self._console, self._runs = console, runs
        self._live = Live(console=console, auto_refresh=False, transient=True)  # no thread of its own: it would slow the decoder
        self._drawn = 0.0

    def __enter__(self) -> Columns:
        self._live.__enter__()
        self.draw()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.__exit__(*error)
        if error[0] is None:
            self._console.print(self._table(height=None))

    def draw(self) -> None:
        """At most every REDRAW_SECONDS."""
        if time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._live.update(self._table(height=self._console.height - 6), refresh=True)
            self._drawn = time.monotonic()

    def _table(self, *, height: int | None) -> RenderableType:
        """height: show only so many last lines of each text."""
        from rich.table import Table
        from rich.text import Text

        table = Table(expand=True)
        width = max(1, (self._console.width - 1) // len(self._runs) - 3)
        cells = []
        for run in self._runs:
            speed = f"{run.tokens_per_second:.1f} tokens/s, TPF {run.tokens / run.forwards:.2f}" if run.forwards else "waiting"
            table.add_column(Text(f"{run.name}\n{speed}"), ratio=1)
            lines = Text(CONTROLS.sub("\ufffd", run.text)).wrap(self._console, width)
            cells.append(Text("\n").join(lines if height is None else lines[-height:]))
        table.add_row(*cells)
        return table
