"""everyday: prompts that a small instruct model answers well and that people have use for, without reference answers.

Three kinds, in turn: small Python functions, small edits of a given text or snippet, and facts of a made-up note as JSON. What is trained on is
the model's own answer, so nothing here tells right from wrong.

Every prompt is about an item: the function asked for (whatever its names, wording and constants), the text that is edited, the note's facts.
sha256 of the item alone decides its split: about 85 % train, 5 % validation, 10 % test. So no item of a test prompt is seen in training.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from tasks.problem_sets import everyday_pieces as pieces

SPACE = 10_000  # distinct prompts of each kind, all splits together
SPLITS = ("train", "validation", "test")

ASK_FUNCTION = (
    "Write a Python function `{call}` that {does}.{end}",
    "Please write a small Python function {call} that {does}.{end}",
    "Define {call} in Python, a function that {does}.{end}",
    "I need a Python function called `{name}` with the arguments `{args}` that {does}.{end}",
    "Implement `{call}` in Python: a function that {does}.{end}",
)
# The empty object in a fence: asked for "JSON with the fields ...", SmolLM2-135M mostly nests objects until it is cut.
ASK_FACTS = (
    "Text: {note}\n\nComplete this JSON with the values of the text:\n```json\n{form}\n```",
    "Text: {note}\n\nFill in this JSON with the values from the text above:\n```json\n{form}\n```",
    "{note}\n\nComplete this JSON with the values of this text:\n```json\n{form}\n```",
    "{note}\n\nExtract the values from this text. Complete this JSON:\n```json\n{form}\n```",
)
ENDS = ("", "", " Only give the code.", " Keep it short.", " No explanation, please.")


@dataclass(frozen=True)
class Everyday:
    """One prompt. item: what it is about, free of wording."""

    kind: str
    item: str
    prompt: str


def _pick(rng: random.Random, choices: str) -> str:
    return rng.choice(choices.strip().split("/"))


def _function(rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        names, arguments, does = rng.choice(pieces.FUNCTIONS).split(" | ")
        item, name, args, does = names, _pick(rng, names), _pick(rng, arguments), _pick(rng, does)
    else:
        thing, key, fields = rng.choice(pieces.RECORDS).split(" | ")
        things = thing[:-1] + "ies" if thing.endswith("y") else thing + "s"
        name, does = rng.choice(pieces.RECORD_TASKS).split(" | ")
        words = {"thing": thing, "things": things, "key": key, "field": rng.choice(fields.split(", ")), "n": "{n}"}
        name, does = name.format(**words), does.format(**words)
        item, args = f"{thing} {name}", rng.choice([things, "records", "rows", "data"])
    does = does.replace("{n}", str(rng.randint(2, 12)))
    ask = rng.choice(ASK_FUNCTION).format(call=f"{name}({args})", name=name, args=args, does=does, end=rng.choice(ENDS))
    return item, ask.replace("the arguments", "the argument") if "," not in args else ask


def _sentence_edit(rng: random.Random) -> tuple[str, str]:
    who, action, when = rng.choice(pieces.SUBJECTS), rng.choice(pieces.ACTIONS), rng.choice(pieces.WHEN)
    sentence = f"{who} {action} {when}."
    longest = max(action.split(), key=len)
    at = rng.randrange(len(longest) - 2) + 1
    typo = longest[:at] + longest[at + 1] + longest[at] + longest[at + 2 :] if longest[at] != longest[at + 1] else longest[:at] + longest[at + 1 :]
    other = rng.choice([p for p in pieces.PEOPLE if p != who])
    asks = (
        f"Rewrite this sentence in the past tense: {sentence}",
        f"Put this into the past tense.\n\n{sentence}",
        f"Write this sentence in uppercase: {sentence}",
        f'Convert to upper case letters: "{sentence}"',
        f"Fix the typo in this sentence: {sentence.replace(longest, typo)}",
        f"One word is misspelled here. Give the corrected sentence.\n\n{sentence.replace(longest, typo)}",
        f'Replace "{who}" with "{other}" in this sentence: {sentence}',
        f"Turn this sentence into a question: {sentence}",
        f"Make this sentence negative: {sentence}",
    )
    return sentence, rng.choice(asks)


def _formal_edit(rng: random.Random) -> tuple[str, str]:
    message = rng.choice(pieces.INFORMAL).format(name=rng.choice(pieces.PEOPLE), thing=rng.choice(pieces.DOCUMENTS), day=rng.choice(pieces.DAYS))
    asks = ("Make this message formal: {}", "Rewrite this in a polite, formal tone:\n\n{}", 'Rewrite as a formal e-mail sentence: "{}"')
    return message, rng.choice(asks).format(message)


def _list_edit(rng: random.Random) -> tuple[str, str]:
    numbers = rng.random() < 0.4
    items = (
        [str(n) for n in rng.sample(range(1, 100), rng.randint(4, 8))] if numbers else rng.sample(rng.choice(pieces.LISTS).split(), rng.randint(4, 6))
    )
    line, bullets = ", ".join(items), "\n".join(f"- {item}" for item in items)
    twice = ", ".join(rng.sample([*items, *rng.sample(items, 2)], len(items) + 2))
    order = rng.choice(["from smallest to largest", "in descending order"]) if numbers else "alphabetically"
    asks = (
        f"Sort this list {order}: {line}",
        f"Put these in order, {order}:\n{bullets}",
        f"Remove the duplicates from this list: {twice}",
        f"Delete repeated entries, keep the order: {twice}",
        f"Turn this bullet list into one line with commas:\n{bullets}",
        f"Write this as a bullet list: {line}",
        f"Write this as a numbered list: {line}",
        f"Reverse the order of this list: {line}",
        f"Write this list as a Python list: {line}",
    )
    return " ".join(sorted(items)), rng.choice(asks)


def _code_edit(rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(list(pieces.SETUPS))
    start, uses = rng.choice(pieces.SETUPS[kind]), rng.sample(pieces.USES[kind], 2)
    old, new = rng.sample(pieces.NAMES[kind], 2)
    asks = (
        "Rename the variable `{old}` to `{new}` in this code:\n```python\n{code}\n```",
        "In the code below, change the variable name {old} to {new}. Only give the code.\n\n{code}",
        "Use the name `{new}` in place of `{old}`:\n```python\n{code}\n```",
    )
    code = "\n".join([start, *uses]).replace("{v}", old)
    return "\n".join([start, *sorted(uses)]), rng.choice(asks).format(old=old, new=new, code=code)


def _edit(rng: random.Random) -> tuple[str, str]:
    return rng.choice([_sentence_edit, _sentence_edit, _formal_edit, _list_edit, _code_edit])(rng)


def _facts(rng: random.Random) -> tuple[str, str]:
    first, last, origin, city = rng.choice(pieces.PEOPLE), rng.choice(pieces.SURNAMES), *rng.sample(pieces.CITIES, 2)
    price = f"{rng.randint(5, 900)}.{rng.choice(['00', '50', '95', '99'])}"
    facts = {
        "person": f"{first} {last}", "city": city, "origin": origin, "company": rng.choice(pieces.COMPANIES), "product": rng.choice(pieces.PRODUCTS),
        "quantity": str(rng.randint(2, 60)), "price": rng.choice([f"${price}", f"{price} euros", f"{price} dollars"]),
        "date": rng.choice([f"{rng.choice(pieces.MONTHS)} {rng.randint(1, 28)}", f"2025-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"]),
        "time": f"{rng.randint(8, 19)}:{rng.choice(['00', '15', '30', '45'])}", "email": f"{first}.{last}@example.com".lower(),
        "phone": f"555-{rng.randint(0, 9999):04d}", "number": str(rng.randint(1000, 9999)), "age": str(rng.randint(19, 64)),
        "job": rng.choice(pieces.JOBS), "event": rng.choice(pieces.EVENTS),
    }  # fmt: skip
    about = rng.choice(list(pieces.NOTES))
    template = rng.choice(pieces.NOTES[about])
    told = [name for name in facts if f"{{{name}}}" in template]
    form = json.dumps(dict.fromkeys(rng.sample(told, rng.randint(3, min(4, len(told)))), ""))
    item = f"{about}: " + ", ".join(facts[name] for name in told)
    return item, rng.choice(ASK_FACTS).format(form=form, note=template.format(**facts))


KINDS: dict[str, Callable[[random.Random], tuple[str, str]]] = {"function": _function, "edit": _edit, "extraction": _facts}


@lru_cache(maxsize=1)
def _space() -> dict[str, dict[str, list[Everyday]]]:
    """Split -> kind -> prompts. The same for every seed of `generate`, which only chooses and orders them."""
    space: dict[str, dict[str, list[Everyday]]] = {split: {kind: [] for kind in KINDS} for split in SPLITS}
    for kind, draw in KINDS.items():
        rng, seen = random.Random(f"everyday/{kind}"), set()
        while len(seen) < SPACE:
            item, prompt = draw(rng)
            if prompt not in seen:
                seen.add(prompt)
                bucket = int(hashlib.sha256(item.encode()).hexdigest()[:8], 16) % 100
                space["test" if bucket < 10 else "validation" if bucket < 15 else "train"][kind].append(Everyday(kind, item, prompt))
    return space


def generate(*, split: str, count: int, seed: int) -> list[Everyday]:
    """`count` distinct prompts from "train", "validation" or "test", the kinds in turn, chosen and ordered by `seed`: every item once before any
    of them twice.

    ValueError if the split is unknown or holds fewer prompts than `count`.
    """
    if split not in SPLITS:
        raise ValueError(f"split: {split!r} is none of {', '.join(SPLITS)}")
    rng, of_kind = random.Random(f"{split}/{seed}"), _space()[split]
    most = len(KINDS) * min(len(found) for found in of_kind.values())
    if not 0 <= count <= most:
        raise ValueError(f"{count} everyday prompts asked for, but the {split} split has {most}")
    ordered = [_items_first(rng.sample(found, len(found))) for found in of_kind.values()]
    return [prompt for turn in zip(*ordered, strict=False) for prompt in turn][:count]


def _items_first(prompts: list[Everyday]) -> list[Everyday]:
    met: Counter[str] = Counter()

    def occurrence(prompt: Everyday) -> int:
        met[prompt.item] += 1
        return met[prompt.item]

    return sorted(prompts, key=occurrence)
