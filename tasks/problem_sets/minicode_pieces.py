"""The parts minicode problems are composed of: conditions, changes, reductions and names.

Every part holds its wordings, its Python text, and its meaning as a callable written apart from that text, so that the expected values of
a problem's tests never come from running its solution. Nothing here knows how parts become a problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ELEMENTS = range(-30, 61)  # the inputs over which two parts count as the same, and from which test lists are drawn

VERBS = ("get", "find", "make", "pick", "collect", "compute", "build", "solve", "handle", "process", "gather", "select")
NOUNS = ("values", "numbers", "items", "scores", "prices", "levels", "points", "codes", "sizes", "ages", "marks", "steps")
ARGUMENTS = ("values", "numbers", "nums", "items", "data", "xs", "row", "seq")


@dataclass(frozen=True)
class Part:
    """A condition or a change of one number. `code` has {x} for the element."""

    name: str  # stands for the meaning: parts of one name differ in nothing
    wordings: tuple[str, ...]
    code: str
    meaning: Callable[[int], int]


def _with_constants(name: str, constants: Sequence[int], wordings: Sequence[str], code: str, meaning: Callable[[int, int], int]) -> list[Part]:
    """One part per constant; {c} in name, wordings and code is the constant."""
    return [
        Part(name.format(c=c), tuple(w.format(c=c) for w in wordings), code.replace("{c}", str(c)), lambda x, c=c: meaning(x, c)) for c in constants
    ]


# Families of parts that differ in a constant alone; to draw one, draw the family first, so that none is rare. Wordings of conditions complete
# "numbers ...".
DIVISIBILITY = [
    [Part("even", ("even", "divisible by two"), "{x} % 2 == 0", lambda x: not x & 1)],
    [Part("odd", ("odd", "not even"), "{x} % 2 == 1", lambda x: x & 1)],
    _with_constants("div{c}", range(3, 10), ("divisible by {c}", "multiples of {c}"), "{x} % {c} == 0", lambda x, c: x == x // c * c),
    _with_constants("ndiv{c}", range(3, 10), ("not divisible by {c}", "no multiples of {c}"), "{x} % {c} != 0", lambda x, c: x != x // c * c),
]
SIZE = [
    [Part("pos", ("positive", "above zero"), "{x} > 0", lambda x: max(x, 0))],
    [Part("neg", ("negative", "below zero"), "{x} < 0", lambda x: min(x, 0))],
    _with_constants("gt{c}", range(2, 10), ("greater than {c}", "above {c}", "larger than {c}"), "{x} > {c}", lambda x, c: max(x - c, 0)),
    _with_constants("lt{c}", range(2, 10), ("less than {c}", "below {c}", "smaller than {c}"), "{x} < {c}", lambda x, c: max(c - x, 0)),
    _with_constants("ne{c}", range(2, 10), ("not equal to {c}", "different from {c}"), "{x} != {c}", lambda x, c: x - c),
]

# Wordings of changes are commands about "each" kept number.
CHANGES = [
    [Part("square", ("square each", "take the square of each"), "{x} * {x}", lambda x: x**2)],
    [Part("cube", ("cube each", "take the cube of each"), "{x} ** 3", lambda x: x * x * x)],
    [Part("abs", ("take the absolute value of each", "drop the sign of each"), "abs({x})", lambda x: max(x, -x))],
    [Part("minus", ("negate each", "flip the sign of each"), "-{x}", lambda x: 0 - x)],
    _with_constants("add{c}", range(1, 10), ("add {c} to each", "increase each by {c}"), "{x} + {c}", lambda x, c: c + x),
    _with_constants("sub{c}", range(1, 10), ("subtract {c} from each", "decrease each by {c}"), "{x} - {c}", lambda x, c: -(c - x)),
    _with_constants("mul{c}", range(2, 10), ("multiply each by {c}", "scale each by {c}"), "{x} * {c}", lambda x, c: sum([x] * c)),
]


def draw_part(families: Sequence[Sequence[Part]], rng: random.Random) -> Part:
    """One part, every family being equally likely."""
    return rng.choice(rng.choice(families))


@dataclass(frozen=True)
class Reduction:
    """What is returned, in three code styles. {value}: the changed element, {x}: the element, {clause}: `for .. in .. if ..`."""

    name: str
    wordings: tuple[str, ...]  # complete "and return ..."
    comprehension: str  # one expression
    steps: str  # an expression over the lists `kept` and `changed`
    start: str | None  # a loop's first statement; None for none
    update: tuple[str, ...]  # a loop's statements for one kept element
    end: str  # what follows the loop
    meaning: Callable[[list[int], list[int]], object]  # (kept, changed) -> result
    imports: str = ""  # above the function, in the comprehension and steps styles
    returns: str = "int"  # annotation of the function


def _extreme(name: str, adjectives: tuple[str, str], sign: str, meaning: Callable[[list[int]], int]) -> Reduction:
    return Reduction(
        name,
        tuple(f"the {adjective} result, or 0 if there is none" for adjective in adjectives),
        f"{name}(({{value}} {{clause}}), default=0)",
        f"{name}(changed, default=0)",
        "best = None",
        ("value = {value}", f"if best is None or value {sign} best:", "    best = value"),
        "return 0 if best is None else best",
        lambda kept, changed: meaning(changed) if changed else 0,
    )


def _product(kept: list[int], changed: list[int]) -> int:
    result = 1
    for value in changed:
        result *= value
    return result


REDUCTIONS = [
    Reduction("sum", ("the sum", "the total"), "sum({value} {clause})", "sum(changed)", "total = 0", ("total += {value}",), "return total",
              lambda kept, changed: sum(changed)),
    Reduction("product", ("the product",), "prod({value} {clause})", "prod(changed)", "product = 1", ("product *= {value}",), "return product",
              _product, imports="from math import prod\n\n\n"),
    _extreme("max", ("largest", "highest"), ">", max),
    _extreme("min", ("smallest", "lowest"), "<", min),
    Reduction("list", ("the results as a list", "a list of the results"), "[{value} {clause}]", "changed", "result = []",
              ("result.append({value})",), "return result", lambda kept, changed: changed, returns="list[int]"),
    Reduction("sorted", ("the results sorted", "a sorted list of the results"), "sorted({value} {clause})", "sorted(changed)", "result = []",
              ("result.append({value})",), "return sorted(result)", lambda kept, changed: sorted(changed), returns="list[int]"),
    Reduction("reversed", ("the results in reverse order", "a reversed list of the results"), "[{value} {clause}][::-1]", "changed[::-1]",
              "result = []", ("result.insert(0, {value})",), "return result", lambda kept, changed: list(reversed(changed)), returns="list[int]"),
    Reduction("distinct", ("how many distinct results there are", "the number of different results"), "len({{{value} {clause}}})",
              "len(set(changed))", "seen = set()", ("seen.add({value})",), "return len(seen)",
              lambda kept, changed: len(dict.fromkeys(changed))),
    Reduction("first", ("the first result, or -1 if there is none",), "next(({value} {clause}), -1)", "changed[0] if changed else -1", None,
              ("return {value}",), "return -1", lambda kept, changed: [*changed, -1][0]),
    Reduction("text", ("the results joined by spaces", "a string of the results with spaces between"), '" ".join(str({value}) {clause})',
              '" ".join(str({x}) for {x} in changed)', "words = []", ("words.append(str({value}))",), 'return " ".join(words)',
              lambda kept, changed: " ".join(f"{value}" for value in changed), returns="str"),
    Reduction("dict", ("a dict from each number to its result", "a dict that maps numbers to results"), "{{{x}: {value} {clause}}}",
              "dict(zip(kept, changed))", "result = {{}}", ("result[{x}] = {value}",), "return result",
              lambda kept, changed: dict(zip(kept, changed, strict=True)), returns="dict[int, int]"),
]  # fmt: skip
