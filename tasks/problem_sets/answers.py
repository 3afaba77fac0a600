"""From what a model wrote to the answer it gives to a mathematics question, and whether that is the reference.

GSM8K: a number, compared exactly (1,234 = 1234.0, $5 = 5, 1/2 = 0.5). MATH: LaTeX, compared by math-verify. Where several places of a
completion could hold the answer, the last one of the most explicit kind counts; a cut-off `\\boxed{...` does not. Knows no data sets.
"""

from __future__ import annotations

import re
import threading
from fractions import Fraction

_THINKING = re.compile(r"<think>.*?(</think>|\Z)", re.DOTALL)
# GSM8K's own form: the mark, then a number. `#### Step 2: add` is a heading.
_MARKED = re.compile(r"####\s*(?:(?:the )?(?:final )?answer(?: is)?:?\s*)?(?=[-+$\\(\[<*{]*\s*\.?\d)([^\n]*)", re.IGNORECASE)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{|\\(?:boxed|fbox) +(?=[^\s{\\])")  # \boxed{5}, \fbox{5} and \boxed 5
_PHRASE = re.compile(r"answer(?: is|:|\s*=)\s*:?([^\n]*)", re.IGNORECASE)
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?|\.\d+)")  # the minus of 9-4 is none of the 4
_MATH = re.compile(r"\$([^$\n]+)\$|\\\((.+?)\\\)")
_INVISIBLE = re.compile(r"\\[!,;: ]|\\(?:left|right)(?![a-zA-Z])|\\?\$|\\?%|\{,\}")  # spacing, sizes, currency, percent, digit groups


def extract_number(completion: str) -> str | None:
    """The number a completion ends up with, digits only ("1,234 eggs" -> "1234"); None where it holds none.

    In this order: after the last `####`, in the last `\\boxed{}`, after the last "answer is", the last number at all.
    """
    text = _THINKING.sub(" ", completion).replace("−", "-").replace("{,}", ",").replace("\\!", "")
    marked = [place for place in map(_conclusion, _MARKED.findall(text)) if place]
    boxed = [place for place in (_conclusion(_plain_fractions(box)) for box in _boxes(text)) if place]
    phrases = [place for place in map(_conclusion, _PHRASE.findall(text)) if place]
    for found in (marked, boxed, phrases, _NUMBER.findall(text)):
        if found:
            return found[-1].replace(",", "")
    return None


def extract_math(completion: str) -> str | None:
    """The answer a completion ends up with, as LaTeX; None where it gives none.

    In this order: the last closed `\\boxed{}` or `\\fbox{}`, after the last `####`, after the last "answer is", the last `$...$`, the last number.
    """
    text = _THINKING.sub(" ", completion)
    boxes = [box for box in _boxes(text) if box.strip()]
    if boxes:
        return boxes[-1].strip()
    for kind in (_MARKED, _PHRASE):
        found = [place for place in (_sentence(line) for line in kind.findall(text)) if place]
        if found:
            return found[-1]
    formulas = [(dollars or brackets).strip() for dollars, brackets in _MATH.findall(text)]
    return next((found[-1] for found in (formulas, _NUMBER.findall(text)) if found), None)


def same_number(reference: str, answer: str | None) -> bool:
    """Whether both are the same rational number, exactly."""
    expected, given = _rational(reference), _rational(answer or "")
    return given is not None and expected == given


def same_math(reference: str, answer: str | None) -> bool:
    """Whether the two LaTeX expressions mean the same: the same text but for spacing, or equal for math-verify."""
    if answer is None:
        return False
    expected, given = _bare(reference), _bare(answer)
    if expected == given:
        return True
    from math_verify import parse, verify

    # its timeouts are alarms, which only the main thread can set
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    gold, found = (parse(f"\\boxed{{{text}}}", parsing_timeout=seconds) for text in (expected, given))
    return bool(gold and found and verify(gold, found, timeout_seconds=seconds))


def _boxes(text: str) -> list[str]:
    """What stands in each box that is closed, in order; a box inside a box is part of it."""
    found, at = [], 0
    while match := _BOX.search(text, at):
        start = at = match.end()
        if not match.group().endswith("{"):
            found.append(re.split(r"[\s$]", text[start:], maxsplit=1)[0].rstrip(".,;"))
            continue
        depth, end = 1, start
        while depth and end < len(text):
            if text[end] == "\\":
                end += 1  # an escaped brace is text
            else:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        if not depth:
            found.append(text[start : end - 1])
            at = end
    return found


def _conclusion(text: str) -> str | None:
    """The first number after the last equals sign: what `#### 5 + 3 = 8 eggs` says."""
    found = _NUMBER.search(text.rpartition("=")[2].replace("$", "").replace("- ", "-"))
    return found.group() if found else None


def _plain_fractions(latex: str) -> str:
    """\\frac{1}{2}, \\frac12 -> 1/2."""
    return re.sub(r"\\[dt]?frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))", lambda m: f"{m[1] or m[2]}/{m[3] or m[4]}", latex)


def _sentence(line: str) -> str:
    """The formula of the rest of a sentence, or the rest itself, without its full stop; empty for what only names the place of an answer."""
    formula = _MATH.search(line)
    text = (formula[1] or formula[2]) if formula else re.split(r"(?<=\S)\.(?=\s|$)", line, maxsplit=1)[0]
    text = text.strip(" *:`")
    return "" if re.fullmatch(r"<.*>", text) else text


def _rational(text: str) -> Fraction | None:
    try:
        return Fraction(re.sub(r"[,$%\s]", "", text))
    except (ValueError, ZeroDivisionError):
        return None


def _bare(latex: str) -> str:
    return re.sub(r"\s+", " ", _INVISIBLE.sub("", latex.replace("\\\\", "\0"))).replace("\0", "\\\\").strip().rstrip(".")
