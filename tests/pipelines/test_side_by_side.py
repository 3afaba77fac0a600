"""`python -m pipelines.generate` on a terminal: both answers grow side by side, and showing them changes no figure."""

from __future__ import annotations

import io
import re
import time

from rich.console import Console

from pipelines import generate, side_by_side

ERASED = "\x1b[1A\x1b[2K"  # one line up, clear it: how a picture makes room for the next


def live(checkpoint, *argv: str, height: int = 24) -> tuple[str, list[str]]:
    """What a terminal of 100 columns is sent, and the lines that stay on it."""
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=height, color_system=None, legacy_windows=False)
    assert generate.main([f"model={checkpoint}", "prompt=def f(x): return x = 1", "dtype=float64", *argv], console=console) == 0
    sent = console.file.getvalue()
    return sent, sent.split(ERASED)[-1].splitlines()


def test_generate_shows_both_answers_live_on_a_terminal(checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(side_by_side, "REDRAW_SECONDS", 0.0)
    sent, kept = live(checkpoint, "max_new_tokens=20", "block_size=4")
    assert capsys.readouterr().out == ""  # all of it goes to the terminal
    pictures = [picture for picture in re.split(r"(?:\x1b\[1A\x1b\[2K)+", sent) if "┃" in picture]
    assert "waiting" in pictures[0] and "tokens/s" not in pictures[0]
    speeds = [[cell.strip() for cell in next(line for line in p.splitlines() if "TPF" in line).strip("┃ ").split("┃")] for p in pictures[1:]]
    assert all(left.endswith("TPF 1.00") for left, _ in speeds)  # AR first, alone
    ours = [right for _, right in speeds]
    assert ours[0] == "waiting" and "TPF" in ours[-1] and ours == sorted(ours, key=lambda speed: speed != "waiting")
    texts = [[row.strip("│ ").split("│") for row in p.splitlines() if row.startswith("│")] for p in pictures]
    said = ["".join(row[-1].strip() for row in rows) for rows in texts]
    assert len(set(said)) > 2  # it grows
    assert "both answers are equal, token for token" in kept
    assert any(line.startswith("ar: 20 tokens, 20 forwards, ") for line in kept)
    assert any(line.startswith("mr+ngram, block size 4: ") for line in kept)
    assert any(line.startswith("speedup ") for line in kept)


def test_a_live_text_may_be_longer_than_the_terminal(checkpoint, monkeypatch):
    monkeypatch.setattr(side_by_side, "REDRAW_SECONDS", 0.0)
    monkeypatch.setattr(side_by_side.Run, "text", property(lambda run: "".join(f"line {i}\n" for i in range(run.tokens)), lambda run, text: None))
    sent, _ = live(checkpoint, "max_new_tokens=40", "block_size=4", height=16)
    pictures = re.split(r"(?:\x1b\[1A\x1b\[2K)+", sent)
    assert max(len(p.splitlines()) for p in pictures[:-1]) <= 16
    last = pictures[-2]
    assert "line 39" in last and "line 5 " not in last  # its end
    assert "line 5 " in pictures[-1] and "line 39" in pictures[-1]  # and at last all of it


def test_a_terminal_shows_ar_alone_where_that_is_asked_for(checkpoint):
    sent, kept = live(checkpoint, "max_new_tokens=8", "method=ar")
    assert any(line.startswith("ar: 8 tokens, 8 forwards") for line in kept)
    assert "equal" not in sent and "speedup" not in sent


def test_a_models_text_does_not_move_the_cursor():
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    with side_by_side.Columns(console, [side_by_side.Run("ar", text="a\x1b[2Jb [bold]c[/bold]\r👩‍👩‍👧‍👦", tokens=1, forwards=1, seconds=1.0)]):
        pass
    sent = console.file.getvalue()
    assert "\x1b[2J" not in sent and "\r👩" not in sent
    assert "a\ufffd[2Jb [bold]c[/bold]\ufffd👩‍👩‍👧‍👦" in sent


def test_drawing_and_spelling_do_not_count_as_decoding(checkpoint, monkeypatch):
    """A terminal that takes 50 ms per picture, and a tokenizer that takes 20 ms per piece, change no figure."""
    from jacobi_core.decoding.stream import TextPieces

    push = TextPieces.push
    monkeypatch.setattr(TextPieces, "push", lambda self, tokens: time.sleep(0.02) or push(self, tokens))
    monkeypatch.setattr(side_by_side, "REDRAW_SECONDS", 0.0)
    draw = side_by_side.Columns.draw
    monkeypatch.setattr(side_by_side.Columns, "draw", lambda self: time.sleep(0.05) or draw(self))
    begun = time.perf_counter()
    _, kept = live(checkpoint, "max_new_tokens=20", "block_size=4", "method=ar")
    elapsed = time.perf_counter() - begun
    seconds = float(re.search(r"20 forwards, ([\d.]+) s", "\n".join(kept)).group(1))
    assert seconds < elapsed - 20 * 0.07


def test_pictures_are_drawn_at_most_ten_times_a_second(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(side_by_side.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), force_terminal=True, width=60, color_system=None)
    run = side_by_side.Run("ar")
    with side_by_side.Columns(console, [run]) as columns:
        before = len(console.file.getvalue())
        run.text = "more"
        for _ in range(9):
            now[0] += 0.01
            columns.draw()
        assert len(console.file.getvalue()) == before
        now[0] += 0.02
        columns.draw()
        assert "more" in console.file.getvalue()[before:]


def test_generate_is_live_only_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert generate._terminal() is None
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert generate._terminal() is not None
    monkeypatch.setenv("TERM", "dumb")
    assert generate._terminal() is None
