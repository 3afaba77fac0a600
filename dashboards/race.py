"""Two decoders of one prompt, side by side: each forward goes to the decoder whose own clock is behind, so that both texts grow at their true speeds.

Only one decoder works at a time and its clock runs only inside its forwards: neither slows the other, and neither drawing nor turning tokens into
text counts. Needs torch and jacobi_core; knows nothing about Streamlit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from dashboards.stored import Unreadable
from jacobi_core.decoding.config import DecodingConfig, Method

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from jacobi_core.decoding.stats import Generation

OWN = "own"  # the one token that every forward yields anyway, whatever was drafted
SOURCES = {  # how a token came to be accepted -> what that means
    OWN: "the forward's own prediction",
    "draft": "accepted from the refreshed draft",
    "recycled": "accepted from a recycled n-gram",
    "ngram": "accepted from an n-gram copied from the text",
}


@dataclass(frozen=True)
class Token:
    """One committed token: its text (perhaps none yet), where it came from, and the number of its forward, from 1."""

    text: str
    source: str
    forward: int


@dataclass
class Decoder:
    """One decoder at work. `generation` is there once it has finished."""

    name: str
    config: DecodingConfig
    tokens: list[Token] = field(default_factory=list)
    committed: list[tuple[int, str]] = field(default_factory=list)  # per forward: how many tokens, and what they were accepted from
    seconds: float = 0.0
    generation: Generation | None = None

    @property
    def tpf(self) -> float:
        return len(self.tokens) / len(self.committed) if self.committed else 0.0

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0


def ar_of(config: DecodingConfig) -> DecodingConfig:
    """The same, one token per forward."""
    return replace(config, method=Method.ar, block_size=1, ngram=False, drafts=1, auto=False)


def load(folder: str | Path, *, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A checkpoint folder of this machine; never fetched, its own code never run. Raises Unreadable where it cannot be loaded."""
    from jacobi_core import hub

    if not (Path(folder) / "config.json").is_file():
        raise Unreadable(f"{folder} is no checkpoint folder: it was deleted, or the path is wrong.")
    try:
        return hub.load_model(folder, dtype=dtype), hub.load_tokenizer(folder)
    except Exception as error:  # every library below raises its own kinds
        raise Unreadable(f"The model in {folder} cannot be loaded ({' '.join(str(error).split())[:300]}).") from error


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """What the user says, through the chat template where there is one. Raises Unreadable for a text without a token."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))
    if ids := list(tokenizer(text)["input_ids"]):
        return ids
    raise Unreadable("The prompt has no token; write something.")


def race(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int], decoders: Sequence[Decoder], *, slower: float = 1.0
) -> Iterator[Decoder]:
    """Fills the decoders, forward by forward; yields whose turn it was. What a first forward costs once is spent before.

    slower: show it so many times slower than it was (waiting between forwards); no clock sees that.
    Raises ValueError for a prompt or setting that the decoder refuses.
    """
    import torch

    from jacobi_core.decoding.generate import generate
    from jacobi_core.decoding.stream import TextPieces, stream
    from jacobi_core.decoding.tokens import TokenRules

    rules, ids = TokenRules.of(model, tokenizer), torch.tensor(prompt)
    for decoder in decoders:
        generate(model, ids, replace(decoder.config, max_new_tokens=min(2, decoder.config.max_new_tokens)), rules=rules)
    streams = [stream(model, ids, decoder.config, rules=rules) for decoder in decoders]
    pieces = [TextPieces(tokenizer) for _ in decoders]
    began = time.perf_counter()
    while running := [i for i, decoder in enumerate(decoders) if decoder.generation is None]:
        i = min(running, key=lambda i: decoders[i].seconds)
        decoder, before = decoders[i], streams[i].generation.stats.accepted_from.copy()
        start = time.perf_counter()
        committed = next(streams[i], None)  # token ids on the host: nothing is left to wait for
        if committed is None:
            decoder.generation = streams[i].generation
            if rest := pieces[i].end():
                decoder.tokens[-1] = replace(decoder.tokens[-1], text=decoder.tokens[-1].text + rest)
        else:
            decoder.seconds += time.perf_counter() - start
            source = next(iter(streams[i].generation.stats.accepted_from - before))
            decoder.committed.append((len(committed), source))
            sources = [*[source] * (len(committed) - 1), OWN]
            texts = [pieces[i].push([token]) for token in committed]
            decoder.tokens += [Token(text, source, len(decoder.committed)) for text, source in zip(texts, sources, strict=True)]
        time.sleep(max(0.0, slower * decoder.seconds - (time.perf_counter() - began)) if slower > 1 else 0.0)
        yield decoder


STYLE = """<style>
.race { font: 14px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; color: #222; }
.race span { padding: 1px 0; border-bottom: 2px solid transparent; }
.race .draft { background: #d3e5f5; border-bottom: 2px solid #0b4f8a; }
.race .recycled { background: #f6d9c4; border-bottom: 3px double #a33e00; }
.race .ngram { background: #d5ecd9; border-bottom: 3px dotted #1b6e3c; }
.race i { font-style: normal; color: #5f5f5f; user-select: none; }
.clock { font: 600 22px ui-monospace, monospace; color: #222; }
.count { font: 14px ui-monospace, monospace; color: #222; }
</style>"""


def text_html(decoder: Decoder) -> str:
    """The text so far, every token marked by how it was accepted; a thin bar stands behind the tokens of each forward that committed several."""
    parts, last = [], 0
    for token in decoder.tokens:
        if token.forward != last and last and decoder.committed[last - 1][0] > 1:
            parts.append('<i aria-hidden="true">|</i>')
        last = token.forward
        parts.append(f'<span class="{token.source}" title="forward {token.forward}: {SOURCES[token.source]}">{escape(token.text)}</span>')
    return f'<div class="race">{"".join(parts)}</div>'


def clock_html(decoder: Decoder) -> str:
    state = "finished" if decoder.generation is not None else "running"
    figures = f"{len(decoder.tokens)} tokens, {len(decoder.committed)} forwards, TPF {decoder.tpf:.2f}, {state}"
    return f'<div class="clock">{decoder.seconds:.3f} s</div><div class="count">{figures}</div>'


def legend_html() -> str:
    """One example of each mark."""
    marks = " ".join(f'<span class="{source}">{meaning}</span>&ensp;' for source, meaning in SOURCES.items())
    return f'<div class="race">{marks}</div>'
