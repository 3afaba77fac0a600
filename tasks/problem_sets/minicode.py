"""minicode: a generated benchmark in the style of HumanEval, small enough for a model of a few million parameters.

A problem asks for one Python function: keep some numbers of a list, change each, reduce them. The prompt names the function, its argument,
the element variable where it is not `x`, and the code style, so that it determines the answer's text. The answer is code only, no fence.

Two problems are the same if they keep and change the numbers of ELEMENTS alike and reduce them alike, however they are worded or written
(`even` after `times 2` is no new problem). Each such problem occurs once, and sha256 of that meaning alone decides its split: about 85 %
train, 5 % validation, 10 % test. So no wording, name or style of a test problem's meaning is ever seen in training.

`long=True` gives the form of minicode_long: helpers, branches and edge cases, up to 300 tokens. Nothing here executes generated code.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache

from tasks.problem_sets import minicode_long
from tasks.problem_sets.minicode_asserts import write_asserts
from tasks.problem_sets.minicode_pieces import ARGUMENTS, CHANGES, DIVISIBILITY, ELEMENTS, NOUNS, REDUCTIONS, SIZE, VERBS, Part, Reduction, draw_part
from tasks.problem_sets.problem import Problem

SPACE, SPACE_LONG = 9_000, 10_000  # distinct problems of each form, all splits together
SPLITS = ("train", "validation", "test")

VARIABLES = ("x", "n", "v", "item", "num", "k")
TEMPLATES = (
    "Write a Python function {name}({arg}): keep the numbers {keep}, {change}, return {reduce}.{style}{variable}",
    "Define {name}({arg}) in Python. For all numbers {keep}, {change} and return {reduce}.{style}{variable}",
    "Function {name}({arg}) takes the numbers {keep}. It should {change} and return {reduce}.{variable}{style}",
    "Implement {name}({arg}). Of the numbers {keep}, {change}; return {reduce}.{style}{variable}",
)
STYLES = {
    "loop": (" Use a for loop.", " Write a loop."),
    "comprehension": (" Use a comprehension.", " Write one expression."),
    "steps": (" Use two lists, kept and changed.", " Go in steps: kept, then changed."),
}


@dataclass(frozen=True)
class Spec:
    """The meaning of a short problem, free of wording, names and style."""

    condition: Part
    change: Part
    reduction: Reduction

    @property
    def name(self) -> str:
        return "-".join([self.condition.name, self.change.name, self.reduction.name])

    def element(self, x: int) -> int | None:
        """What becomes of one number; None if it is not kept."""
        return self.change.meaning(x) if self.condition.meaning(x) else None

    def meaning(self, numbers: list[int]) -> object:
        """The expected result, evaluated directly."""
        kept = [x for x in numbers if self.element(x) is not None]
        return self.reduction.meaning(kept, [self.element(x) for x in kept])


def draw_spec(rng: random.Random) -> Spec:
    """A random spec; its condition is one on divisibility or one on size."""
    return Spec(draw_part(DIVISIBILITY + SIZE, rng), draw_part(CHANGES, rng), rng.choice(REDUCTIONS))


def write_solution(spec: Spec, *, name: str, arg: str, x: str, style: str) -> str:
    """The one text of the answer in the requested style."""
    condition = spec.condition.code.format(x=x)
    value, reduction = spec.change.code.format(x=x), spec.reduction
    head = f"def {name}({arg}: list[int]) -> {reduction.returns}:\n"
    if style == "loop":
        lines = [] if reduction.start is None else [reduction.start.format()]
        lines += [f"for {x} in {arg}:", f"    if {condition}:"]
        lines += ["        " + line.format(value=value, x=x) for line in reduction.update]
        return head + "".join(f"    {line}\n" for line in [*lines, reduction.end])
    if style == "comprehension":
        expression = reduction.comprehension.format(value=value, x=x, clause=f"for {x} in {arg} if {condition}")
        return f"{reduction.imports}{head}    return {expression}\n"
    assert style == "steps", style
    kept, changed = f"[{x} for {x} in {arg} if {condition}]", f"[{value} for {x} in kept]"
    return f"{reduction.imports}{head}    kept = {kept}\n    changed = {changed}\n    return {reduction.steps.format(x=x)}\n"


def write_problem(spec: Spec, rng: random.Random) -> Problem:
    """Choose wording, names and style for `spec`, and its test lists."""
    name, arg, x = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}", rng.choice(ARGUMENTS), rng.choice(VARIABLES)
    style = rng.choice(list(STYLES))
    prompt = rng.choice(TEMPLATES).format(
        name=name,
        arg=arg,
        keep=rng.choice(spec.condition.wordings),
        change=rng.choice(spec.change.wordings),
        reduce=rng.choice(spec.reduction.wordings),
        style=rng.choice(STYLES[style]),
        variable="" if x == "x" else rng.choice([f" Call each element {x}.", f" Each number is {x}."]),
    )
    solution = write_solution(spec, name=name, arg=arg, x=x, style=style)
    return Problem(f"minicode/{spec.name}", prompt, name, write_asserts(name, spec.element, spec.meaning, rng), solution)


@lru_cache(maxsize=2)
def _problem_space(long: bool) -> dict[str, list]:
    """Split -> specs. The same for every seed of `generate`, which only orders and words them."""
    rng = random.Random(f"minicode/{long}")
    draw = minicode_long.draw_spec if long else draw_spec
    seen: set[str] = set()
    space: dict[str, list] = {split: [] for split in SPLITS}
    while len(seen) < (SPACE_LONG if long else SPACE):
        spec = draw(rng)
        values = [spec.element(x) for x in ELEMENTS]
        if len(set(values) - {None}) < 4 or sum(v is not None for v in values) < 6:
            continue  # hardly any number passes, or all results are alike: another problem in disguise, and weak tests
        if spec.reduction.name == "distinct":  # only which results agree matters there
            values = [None if v is None else values.index(v) for v in values]
        identity = hashlib.sha256(repr((values, spec.reduction.name, getattr(spec, "extras", None))).encode()).hexdigest()
        if identity not in seen:
            seen.add(identity)
            bucket = int(identity[:8], 16) % 100
            space["test" if bucket < 10 else "validation" if bucket < 15 else "train"].append(spec)
    return space


def generate(*, split: str, count: int, seed: int, long: bool = False) -> list[Problem]:
    """`count` problems of distinct meaning from "train", "validation" or "test", ordered and worded by `seed`.

    ValueError if the split is unknown or holds fewer problems than `count`.
    """
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is none of {', '.join(SPLITS)}")
    specs = _problem_space(long)[split]
    if not 0 <= count <= len(specs):
        raise ValueError(f"{count} minicode problems asked for, but the {split} split has {len(specs)}")
    rng = random.Random(f"{split}/{seed}")
    write = minicode_long.write_problem if long else write_problem
    return [write(spec, rng) for spec in rng.sample(specs, count)]
