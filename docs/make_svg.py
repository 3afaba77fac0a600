"""The two drawings of docs/images: the same answer in two decoders' forwards, and who sees whom in training. Text in, text out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from jacobi_core.distillation.attention import TokenFields, visible
from jacobi_core.distillation.attention_variant import MaskVariant

if TYPE_CHECKING:
    from dashboards.race import Decoder

INK, GREY, LINE, DARK, LIGHT = "#222222", "#5f5f5f", "#dddddd", "#0b4f8a", "#7fb2dd"
FONT = "font-family='system-ui, sans-serif'"
MONO = "font-family='ui-monospace, Menlo, Consolas, monospace'"


def race_svg(ar: Decoder, parallel: Decoder) -> str:
    """Positions across, forwards down: what every forward of each decoder committed; beside it the text, shaded by forward."""
    width, cell, top, left = 900, 9, 62, 24
    tokens = len(ar.tokens)
    gap = left + tokens * cell + 56
    parts = [
        _text(left, 26, f"one token per forward: {len(ar.committed)} forwards", bold=True),
        _text(gap, 26, f"after training, Jacobi decoding: {len(parallel.committed)} forwards", bold=True),
        _text(left, 46, f"{tokens} tokens of an answer →  one row per forward ↓", colour=GREY, size=12),
        _text(gap, 46, f"the same {tokens} tokens →", colour=GREY, size=12),
        *_steps(ar, left, top, cell),
        *_steps(parallel, gap, top, cell),
    ]
    bottom = top + len(parallel.committed) * cell + 34
    parts += [_text(gap, bottom, "the answer; a change of shade is a new forward", colour=GREY, size=12)]
    parts += _shaded(parallel, gap, bottom + 14)
    return _svg(width, top + len(ar.committed) * cell + 16, parts)


def _steps(decoder: Decoder, left: int, top: int, cell: int) -> list[str]:
    total, forwards = len(decoder.tokens), len(decoder.committed)
    parts = [f"<rect x='{left}' y='{top}' width='{total * cell}' height='{forwards * cell}' fill='#ffffff' stroke='{LINE}'/>"]
    done = 0
    for row, (count, _) in enumerate(decoder.committed):
        colour = DARK if row % 2 == 0 else LIGHT
        parts.append(f"<rect x='{left + done * cell}' y='{top + row * cell}' width='{count * cell}' height='{cell - 1}' fill='{colour}'/>")
        done += count
    return parts


def _shaded(decoder: Decoder, left: int, top: int) -> list[str]:
    """The text in a fixed-width grid, so that shades stand behind their tokens in every font."""
    wide, high, parts, column, line = 7.3, 19, [], 0, 0
    for token in decoder.tokens:
        colour = "#cfe0f0" if token.forward % 2 else "#eef4fa"
        for piece in token.text.splitlines(keepends=True):
            shown = piece.rstrip("\n")
            x, y = left + column * wide, top + line * high
            if shown:
                parts.append(f"<rect x='{x:.1f}' y='{y}' width='{len(shown) * wide:.1f}' height='{high - 2}' fill='{colour}'/>")
                parts.append(
                    f"<text x='{x:.1f}' y='{y + 13}' {MONO} font-size='12' fill='{INK}' xml:space='preserve' textLength='{len(shown) * wide:.1f}' "
                    f"lengthAdjust='spacingAndGlyphs'>{escape(shown)}</text>"
                )
            column += len(shown)
            if piece.endswith("\n"):
                column, line = 0, line + 1
    return parts


def mask_svg() -> str:
    """A sample of four blocks of three tokens in windows of two, by the rule that training uses; NC beside NC-IC."""
    cell, top, prompt, n, blocks = 11, 76, 3, 3, 4
    kinds = [(0, -1)] * prompt + [(kind, block) for block in range(blocks) for kind in (1, 2) for _ in range(n)]
    positions = [*range(prompt), *(prompt + block * n + k for block in range(blocks) for _ in (1, 2) for k in range(n))]
    kind, block = (torch.tensor(column) for column in zip(*kinds, strict=True))
    fields = TokenFields(torch.zeros_like(kind), kind, block, torch.where(block < 0, block, block // 2), torch.tensor(positions))
    queries, keys = fields.map(lambda f: f[:, None]), fields.map(lambda f: f[None, :])
    parts = []
    for i, (variant, title) in enumerate(((MaskVariant.nc, "NC (the method)"), (MaskVariant.nc_ic, "NC-IC (ablation)"))):
        seen = visible(queries=queries, keys=keys, variant=variant).tolist()
        parts += _mask(seen, kinds, left=70 + i * (len(kinds) * cell + 110), top=top, cell=cell, title=title)
    return _svg(2 * (len(kinds) * cell + 110) + 10, top + len(kinds) * cell + 46, parts)


def _mask(seen: Sequence[Sequence[bool]], kinds: Sequence[tuple[int, int]], *, left: int, top: int, cell: int, title: str) -> list[str]:
    size = len(seen) * cell
    parts = [_text(left, 22, title, bold=True), _text(left, 42, "a token sees the coloured columns of its row", colour=GREY, size=12)]
    for q, row in enumerate(seen):
        for k, sees in enumerate(row):
            if sees:
                colour = {0: "#8c8c8c", 1: "#e09a3e", 2: DARK}[kinds[k][0]]
                parts.append(f"<rect x='{left + k * cell}' y='{top + q * cell}' width='{cell - 1}' height='{cell - 1}' fill='{colour}'/>")
    edges = [0, *(i for i in range(1, len(kinds)) if kinds[i] != kinds[i - 1]), len(kinds)]
    for start, end in pairwise(edges):
        kind, block = kinds[start]
        name, middle = ("P", "N", "C")[kind] + ("" if kind == 0 else str(block)), (start + end) / 2 * cell
        parts.append(_text(left - 22, top + middle + 4, name, size=12))
        parts.append(_text(left + middle - 7, top - 8, name, size=12))
    for edge in edges:
        parts.append(f"<path d='M{left} {top + edge * cell}h{size}M{left + edge * cell} {top}v{size}' stroke='#aaaaaa' fill='none'/>")
    return [*parts, _text(left, top + size + 24, "grey: prompt, orange: noisy, blue: clean", colour=GREY, size=12)]


def _text(x: float, y: float, text: str, *, size: int = 14, colour: str = INK, bold: bool = False) -> str:
    weight = " font-weight='600'" if bold else ""
    return f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}'{weight} fill='{colour}'>{escape(text)}</text>"


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>"
    return "\n".join([head, f"<rect width='{width}' height='{height}' fill='#ffffff'/>", *parts, "</svg>", ""])
