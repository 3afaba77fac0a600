"""Stage `search_decoding`: finds the fastest decoding setting for a model on this machine, and measures it again on prompts it never saw.

Successive halving over wall time on a validation split, settings interleaved in one process. Greedy AR and the paper's fixed setting are always
among the finalists, so the winner is at least as fast as they are on the same prompts in the same run. Every setting returns the same tokens.
Writes decoding.json (the winner, for an export to carry as its default) and search.json (every measurement).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks import artifacts
from tasks.artifacts import Prompt
from tasks.evaluate.room import check_room
from tasks.export_model import provenance
from tasks.search_decoding.config import SearchDecodingConfig, carried, label
from tasks.stage import StageContext, UserError

if TYPE_CHECKING:
    from jacobi_core.decoding.config import DecodingConfig
    from tasks.evaluate.decoders import OurDecoder
    from tasks.search_decoding.halving import Trial

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1
MOST_LOOPS = 0.1  # share of degenerate answers above which the search says so
HELDOUT_SHARE = 0.25  # of the budget: for the last measurement


def run(config: SearchDecodingConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: prompts, model. See docs/schemas.md for the files."""
    from jacobi_core.decoding.tokens import TokenRules
    from jacobi_core.hub import load_model, load_tokenizer
    from tasks.evaluate.config import Reference
    from tasks.evaluate.decoders import OurDecoder, StaticForwards, TransformersDecoder, neutral
    from tasks.machine import hardware
    from tasks.search_decoding.halving import Answers, Trial, measure, search

    began = time.monotonic()
    seen, heldout = _prompts(config, inputs["prompts"])
    trust = context.trust_remote_code
    check_room("search.max_new_tokens", config.max_new_tokens, inputs["model"], [*seen, *heldout], trust_remote_code=trust)
    tokenizer = load_tokenizer(inputs["model"], trust_remote_code=trust)
    model = load_model(inputs["model"], dtype=config.dtype, trust_remote_code=trust)
    rules = TokenRules.of(model, tokenizer)
    neutral(model, rules)
    forwards = StaticForwards(model, capacity=max(len(p.input_ids) for p in [*seen, *heldout]) + config.max_new_tokens)
    order = random.Random(config.seed)

    def told(number: int, trials: Sequence[Trial]) -> None:
        log.info("search: round %d, %d settings on %d prompts; %s", number, len(trials), trials[0].prompts, _ahead(trials))
        context.report({"search/best_tps": trials[0].tps, "search/settings": len(trials), "search/prompts": trials[0].prompts}, number)

    def make(setting: DecodingConfig) -> OurDecoder:
        if (forward := forwards.of(setting)) is not None:
            forward.capture()  # not while it is timed
        return OurDecoder(model, rules, setting, forwards=forwards)

    rounds = search(
        config.candidates(),
        [config.greedy_ar(), config.paper()],
        seen,
        make,
        budget_s=(1 - HELDOUT_SHARE) * config.budget_s - (time.monotonic() - began),
        keep_one_in=config.keep_one_in,
        finalists=config.finalists,
        order=order,
        told=told,
    )
    finals, winner = rounds[-1], rounds[-1][0]

    # the winner again, on prompts that had no part in choosing it
    settings = {label(s): s for s in (config.greedy_ar(), config.paper())}
    settings[winner.name] = _decoding(config, winner)
    contenders = [(Trial(name, carried(s)), make(s)) for name, s in settings.items()]
    theirs = TransformersDecoder(model, rules, Reference.transformers, max_new_tokens=config.max_new_tokens, lookup=1)
    contenders.append((Trial("transformers", None), theirs))
    answers: Answers = {}
    measure(contenders, heldout, seconds=began + config.budget_s - time.monotonic(), order=order, whole=True, answers=answers)
    searched = time.monotonic() - began
    again = {t.name: t for t, _ in contenders}
    equal = _equal_share(answers, winner.name, label(config.greedy_ar()))

    final = {t.name: t for t in finals}
    facts = {
        "tps": winner.tps,
        "tpf": winner.tpf,
        "speedup": winner.tps / final[label(config.greedy_ar())].tps,
        "speedup_paper": winner.tps / final[label(config.paper())].tps,
        "heldout_tps": again[winner.name].tps,
        "heldout_tpf": again[winner.name].tpf,
        "heldout_speedup": again[winner.name].tps / again[label(config.greedy_ar())].tps,
        "heldout_speedup_paper": again[winner.name].tps / again[label(config.paper())].tps,
        "heldout_speedup_transformers": again[winner.name].tps / again["transformers"].tps,
        "heldout_equals_ar": equal,
        "degenerate_share": winner.degenerate / winner.prompts,
    }
    loops = facts["degenerate_share"]
    if loops > MOST_LOOPS:
        log.warning("search: %.0f %% of the answers loop, so this is about repetition; search on prompts that the model can answer", 100 * loops)
    where = {"model": provenance(inputs["model"])["name"], "hardware": hardware(), "device": str(model.device), "dtype": config.dtype}
    artifacts.write_json(
        output / "search.json",
        {
            "schema_version": SCHEMA_VERSION,
            **where,
            "winner": winner.name,
            "paper": label(config.paper()),
            "search_seconds": searched,
            "rounds": [[t.record() for t in trials] for trials in rounds],
            "heldout": [t.record() for t in again.values()],
            **facts,
        },
    )
    artifacts.write_json(
        output / "decoding.json", {"schema_version": SCHEMA_VERSION, "name": winner.name, "decoding": winner.decoding, "measured": {**where, **facts}}
    )
    log.info(
        "search: %s is the fastest, %.2fx greedy AR and %.2fx the paper's setting; on held-out prompts %.2fx and %.2fx", winner.name, *_four(facts)
    )
    return {**facts, "search_seconds": searched, "settings": len(rounds[0]), "rounds": len(rounds)}


def _prompts(config: SearchDecodingConfig, folder: Path) -> tuple[list[Prompt], list[Prompt]]:
    found = []
    for setting, split, count in (("split", config.split, config.prompts), ("heldout_split", config.heldout_split, config.heldout_prompts)):
        rows = artifacts.PromptRows(folder, split)
        if not len(rows):
            raise UserError(f"search.{setting}={split}: the prompts hold no such prompt; raise data.{split}, {count} are enough")
        found.append(rows.read(range(min(len(rows), count))))
    return found[0], found[1]


def _decoding(config: SearchDecodingConfig, winner: Trial) -> Any:
    from jacobi_core.decoding.config import DecodingConfig

    return DecodingConfig(**winner.decoding, max_new_tokens=config.max_new_tokens, seed=config.seed)


def _equal_share(answers: Mapping[tuple[str, int], list[int]], name: str, ar: str) -> float:
    """Of the prompts measured: where the setting said what greedy AR said. Below 1 in fp32 there are ties; evaluation tells them from defects."""
    same = [tokens == answers[ar, identity] for (who, identity), tokens in answers.items() if who == name]
    return sum(same) / len(same)


def _ahead(trials: Sequence[Trial]) -> str:
    return ", ".join(f"{t.name} {t.tps:.0f}/s" for t in trials[:3])


def _four(facts: Mapping[str, float]) -> list[float]:
    return [facts[k] for k in ("speedup", "speedup_paper", "heldout_speedup", "heldout_speedup_paper")]
