"""The long form of minicode: two helper functions, branches, an edge case and a loop that may stop or skip; 100 to 300 tokens.

Defines what such a problem means and how prompt and answer are written; splits and counts are minicode's.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from tasks.problem_sets.minicode_asserts import write_asserts
from tasks.problem_sets.minicode_pieces import ARGUMENTS, CHANGES, DIVISIBILITY, ELEMENTS, NOUNS, REDUCTIONS, SIZE, VERBS, Part, Reduction, draw_part
from tasks.problem_sets.problem import Problem

KEEPERS = ("keep", "accept", "is_wanted", "passes", "allowed", "matches")
CHANGERS = ("change", "convert", "adjust", "update", "transform", "score")
TEMPLATES = (
    "Write a Python function {name}({arg}) with helpers {keeper}(x) and {changer}(x). {rules}",
    "Implement {name}({arg}) in Python; its helpers are {keeper}(x) and {changer}(x). {rules}",
    "Define helpers {keeper}(x) and {changer}(x), and with them {name}({arg}). {rules}",
)
RULES = (
    "{keeper} tells whether x is {keep}. {changer}: {branches}; otherwise {otherwise}. "
    "For an empty list return {empty}. Change the kept numbers of {arg}{guard}, and return {reduce}."
)


@dataclass(frozen=True)
class LongSpec:
    """The meaning of a long problem, free of wording and names."""

    conditions: tuple[Part, ...]  # all must hold for a number to be kept
    branches: tuple[tuple[Part, Part], ...]  # the first branch whose condition holds gives the change
    otherwise: Part
    reduction: Reduction
    guard: tuple[str, int] | None  # ("break" or "continue", limit): what happens once a result exceeds the limit
    empty: int  # returned for an empty list

    @property
    def name(self) -> str:
        branches = ";".join(f"{condition.name}?{change.name}" for condition, change in self.branches)
        guard = "" if self.guard is None else f"{self.guard[0]}{self.guard[1]}"
        return "-".join(["&".join(c.name for c in self.conditions), f"{branches};{self.otherwise.name}", guard, self.reduction.name, str(self.empty)])

    @property
    def extras(self) -> tuple:
        """What tells two problems apart besides `element` and the reduction: where the loop ends, and the edge case."""
        return tuple(x for x in ELEMENTS if self.stops(x)), self.empty

    def stops(self, x: int) -> bool:
        """Whether the loop ends at this number."""
        return self.guard is not None and self.guard[0] == "break" and self._changed(x) is not None and self.element(x) is None

    def element(self, x: int) -> int | None:
        """What becomes of one number, were it alone; None if it does not count."""
        value = self._changed(x)
        return None if value is None or (self.guard is not None and value > self.guard[1]) else value

    def meaning(self, numbers: list[int]) -> object:
        """The expected result, evaluated directly."""
        if not numbers:
            return self.empty
        reached = itertools.takewhile(lambda x: not self.stops(x), numbers)
        kept = [x for x in reached if self.element(x) is not None]
        return self.reduction.meaning(kept, [self.element(x) for x in kept])

    def branch(self, x: int) -> int | None:
        """Which branch changes this number (len(branches) is `otherwise`); None if it is not kept."""
        for condition in self.conditions:
            if not condition.meaning(x):
                return None
        for index, (condition, _) in enumerate(self.branches):
            if condition.meaning(x):
                return index
        return len(self.branches)

    def _changed(self, x: int) -> int | None:
        index = self.branch(x)
        if index is None:
            return None
        return (self.otherwise if index == len(self.branches) else self.branches[index][1]).meaning(x)


def draw_spec(rng: random.Random) -> LongSpec:
    """A random spec with two to four branches, each of which counts for some numbers."""
    while True:
        kinds = rng.choice([[DIVISIBILITY], [SIZE], [DIVISIBILITY, SIZE]])
        branches = tuple((rng.choice(family), draw_part(CHANGES, rng)) for family in rng.sample(DIVISIBILITY + SIZE, rng.randint(2, 4)))
        guard = rng.choice([None, ("break", rng.randint(20, 90)), ("continue", rng.randint(20, 90))])
        conditions = tuple(draw_part(families, rng) for families in kinds)
        spec = LongSpec(conditions, branches, draw_part(CHANGES, rng), rng.choice(REDUCTIONS), guard, rng.randint(-3, 9))
        used: set[int | None] = {None}
        for x in ELEMENTS:
            index = spec.branch(x)
            if index not in used and spec.element(x) is not None:
                used.add(index)
                if len(used) == len(branches) + 2:  # None, the branches and `otherwise`
                    return spec


def write_solution(spec: LongSpec, *, name: str, arg: str, keeper: str, changer: str) -> str:
    """The one text of the answer."""
    lines = [f"def {keeper}(x):", "    return " + " and ".join(c.code.format(x="x") for c in spec.conditions), "", ""]
    lines += [f"def {changer}(x):"]
    for condition, change in spec.branches:
        lines += [f"    if {condition.code.format(x='x')}:", f"        return {change.code.format(x='x')}"]
    lines += [f"    return {spec.otherwise.code.format(x='x')}", "", ""]
    lines += [f"def {name}({arg}):", f"    if not {arg}:", f"        return {spec.empty}"]
    lines += [] if spec.reduction.start is None else ["    " + spec.reduction.start.format()]
    lines += [f"    for x in {arg}:", f"        if not {keeper}(x):", "            continue", f"        value = {changer}(x)"]
    if spec.guard is not None:
        lines += [f"        if value > {spec.guard[1]}:", f"            {spec.guard[0]}"]
    update = [line.format(value="value", x="x") for line in spec.reduction.update]
    lines += ["        " + line for line in update if line != "value = value"]
    return "\n".join([*lines, f"    {spec.reduction.end}", ""])


def write_problem(spec: LongSpec, rng: random.Random) -> Problem:
    """Choose wording and names for `spec`, and its test lists."""
    name, arg = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}", rng.choice(ARGUMENTS)
    keeper, changer = rng.choice(KEEPERS), rng.choice(CHANGERS)
    branches = [f"if x is {c.wordings[0]}, {_about_x(change, rng)}" for c, change in spec.branches]
    guard = ""
    if spec.guard is not None:
        guard = {"break": ", stop at the first result above {}", "continue": ", skip results above {}"}[spec.guard[0]].format(spec.guard[1])
    rules = RULES.format(
        keeper=keeper,
        changer=changer,
        arg=arg,
        keep=" and ".join(c.wordings[0] for c in spec.conditions),
        branches="; ".join(branches),
        otherwise=_about_x(spec.otherwise, rng),
        empty=spec.empty,
        guard=guard,
        reduce=rng.choice(spec.reduction.wordings),
    )
    prompt = rng.choice(TEMPLATES).format(name=name, arg=arg, keeper=keeper, changer=changer, rules=rules)
    solution = write_solution(spec, name=name, arg=arg, keeper=keeper, changer=changer)
    return Problem(f"minicode_long/{spec.name}", prompt, name, write_asserts(name, spec.element, spec.meaning, rng, lists=10), solution)


def _about_x(change: Part, rng: random.Random) -> str:
    return rng.choice(change.wordings).replace("each", "it")
