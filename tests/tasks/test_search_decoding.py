"""The search: which settings are tried, how rounds narrow them down (by a made-up clock), and what is left behind for an export."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest

from jacobi_core.decoding.config import DecodingConfig, Method
from tasks import artifacts
from tasks.evaluate import decoders
from tasks.evaluate.decoders import Answer, Timed
from tasks.search_decoding import SearchDecodingConfig, halving, run
from tasks.search_decoding.config import carried, crossed, label
from tasks.search_decoding.halving import REPEATS, Trial, measure, search
from tasks.stage import StageContext, UserError

SMALL = {
    "methods": ["jacobi", "mr"],
    "block_sizes": [4, 8],
    "max_blocks": [2],
    "spawn_ratios": [0.85],
    "verification_sizes": [4],
    "drafts": [1],
    "prompts": 2,
    "heldout_prompts": 3,
    "max_new_tokens": 12,
    "finalists": 1,
    "dtype": "float64",
}
FACTS = {"tps", "tpf", "speedup", "speedup_paper", "heldout_tps", "heldout_tpf", "heldout_speedup", "heldout_speedup_paper"}
FACTS |= {"heldout_speedup_transformers", "heldout_equals_ar"}


class Clock:
    """Time that passes only when a decoder runs."""

    def __init__(self, monkeypatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(halving.time, "monotonic", lambda: self.now)


class Scripted:
    """A decoder whose every answer takes as long as told."""

    learns = False

    def __init__(self, seconds: float, *, clock: Clock | None = None, log: list | None = None, name: str = "") -> None:
        self.seconds, self.clock, self.log, self.name = seconds, clock, log, name

    def __call__(self, prompts) -> Timed:
        if self.clock is not None:
            self.clock.now += self.seconds
        if self.log is not None:
            self.log.append((self.name, prompts[0].id))
        return Timed([Answer([1] * 10, "eos", [5, 5])], self.seconds, self.seconds)


def prompts(count: int) -> list[artifacts.Prompt]:
    return [artifacts.Prompt(i, "validation", [], [1, 2], {}) for i in range(count)]


# ---- what is tried


def test_candidates_turn_one_knob_at_a_time():
    found = SearchDecodingConfig(max_new_tokens=64).candidates()
    paper = found[0]
    assert (paper.method, paper.block_size, paper.max_blocks, paper.spawn_ratio, paper.verification_size) == (Method.mr, 64, 2, 0.85, 4)
    assert all(found.count(c) == 1 for c in found) and len({label(c) for c in found}) == len(found)
    assert {c.method for c in found} == set(Method) - {Method.ar}
    assert {c.block_size for c in found} == {8, 16, 32, 64}  # 128 is longer than any answer
    assert any(c.auto and c.ngram for c in found) and any(c.drafts == 4 for c in found)
    for c in found:
        turned = [k for k in ("max_blocks", "spawn_ratio", "ngram", "drafts", "auto") if getattr(c, k) != getattr(DecodingConfig(), k)]
        assert len(turned) <= 1 or turned == ["ngram", "auto"]
        assert c.method in (Method.multi_block, Method.mr) or (c.max_blocks, c.spawn_ratio) == (2, 0.85)


def test_survivors_are_crossed():
    plain = DecodingConfig(method="mr", block_size=16)
    slow, wide = (
        DecodingConfig(method="mr", block_size=16, spawn_ratio=0.3),
        DecodingConfig(method="mr", block_size=16, drafts=8, verification_size=8),
    )
    other = DecodingConfig(method="multi_block", block_size=16, max_blocks=3)
    (both,) = crossed([slow, wide, other])
    assert (both.spawn_ratio, both.drafts, both.verification_size) == (0.3, 8, 8)
    assert crossed([plain, slow, other]) == []  # gives slow again
    few = DecodingConfig(method="mr", block_size=16, verification_size=2)
    assert crossed([few, wide]) == []  # its drafts need the 8: gives wide again


def test_names_and_what_an_export_carries():
    config = DecodingConfig(method="mr", block_size=16, spawn_ratio=0.3, ngram=True, auto=True, max_new_tokens=7, seed=3)
    assert label(config) == "mr@16 (r=0.3, ngram, auto)" and label(DecodingConfig(method="jacobi", block_size=8)) == "jacobi@8"
    assert DecodingConfig(**carried(config), max_new_tokens=7, seed=3) == config
    assert "max_new_tokens" not in carried(config) and "temperature" not in carried(config)


# ---- how it is narrowed down


def test_the_quickest_go_on(monkeypatch):
    """40 settings of known speed: 40, then 10, then the finals with those that always take part."""
    clock, told = Clock(monkeypatch), []
    candidates = [DecodingConfig(method="running_window", block_size=n) for n in range(2, 42)]
    always = [DecodingConfig(method="ar", block_size=1)]
    speed = {c.block_size: 1 + abs(c.block_size - 30) / 10 for c in [*candidates, *always]}  # block 30 is the quickest
    rounds = search(
        candidates,
        always,
        prompts(100),
        lambda c: Scripted(speed[c.block_size], clock=clock),
        budget_s=600.0,
        keep_one_in=4,
        finalists=3,
        order=random.Random(0),
        told=lambda number, trials: told.append((number, len(trials))),
    )
    assert [len(r) for r in rounds] == [40, 10, 4] and told == [(1, 40), (2, 10), (3, 4)]
    names = [t.name for t in rounds[-1]]
    assert names[0] == "running_window@30" and set(names[1:3]) == {"running_window@29", "running_window@31"} and names[3] == "ar@1"
    for trials in rounds:
        assert len({t.prompts for t in trials}) == 1  # the same prompts for all
        assert [t.tps for t in trials] == sorted((t.tps for t in trials), reverse=True)
    decoded = [r[0].prompts * n for r, n in zip(rounds, (1, 1, REPEATS), strict=True)]
    assert decoded[0] < decoded[1] < decoded[2]  # the fewer are left, the better they are known
    assert sum(t.kept for t in rounds[0]) == 10 and sum(t.kept for t in rounds[1]) == 3
    assert clock.now < 1.3 * 600


def test_a_budget_that_is_too_small_draws_lots(monkeypatch):
    """Settings that had no turn in time are left out, the plainest ones have theirs first; the finals are measured whole."""
    clock = Clock(monkeypatch)
    plain = [DecodingConfig(method="running_window", block_size=n) for n in range(2, 12)]
    candidates = [*(dataclasses.replace(c, ngram=True) for c in plain), *plain, *(dataclasses.replace(c, drafts=2) for c in plain)]
    rounds = search(
        candidates,
        [DecodingConfig(method="ar", block_size=1)],
        prompts(3),
        lambda c: Scripted(1.0, clock=clock),
        budget_s=30.0,
        keep_one_in=4,
        finalists=2,
        order=random.Random(0),
        told=lambda *_: None,
    )
    assert 5 <= len(rounds[0]) <= 12 and all(t.prompts == 1 for t in rounds[0])
    assert sum(t.turned == 0 for t in rounds[0]) == min(10, len(rounds[0]))
    second = {t.name for t in rounds[1]} - {t.name for t in rounds[0]}
    assert second and all(t.kept for t in rounds[0] if any(name.startswith(f"{t.name} ") for name in second))  # survivors' variants
    assert "ar@1" in [t.name for t in rounds[-1]] and len({t.prompts for t in rounds[-1]}) == 1
    assert clock.now < 2 * 30


def test_everybody_has_the_same_prompts_in_another_order_each_time():
    log: list = []
    contenders = [(Trial(str(i), None), Scripted(float(i + 1), log=log, name=str(i))) for i in range(4)]
    answers: dict = {}
    measure(contenders, prompts(5), seconds=60, order=random.Random(1), whole=True, answers=answers)
    assert log.pop(0) == ("0", 0)  # to warm up
    turns = [log[i : i + 4] for i in range(0, len(log), 4)]
    assert [{p for _, p in turn} for turn in turns] == [{i} for i in range(5) for _ in range(REPEATS)]
    assert all(sorted(n for n, _ in turn) == list("0123") for turn in turns) and len({tuple(n for n, _ in turn) for turn in turns}) > 1
    for i, (trial, _) in enumerate(contenders):
        assert (trial.prompts, trial.tokens, trial.forwards, trial.seconds, trial.tpf) == (5, 50, 10, 5 * (i + 1), 5)
    assert len(answers) == 20


def test_a_disturbance_is_not_a_decoders_speed():
    steady = Scripted(1.0)
    times = itertools.cycle([9.0, 0.5, 30.0])
    disturbed = lambda asked: Timed(steady(asked).answers, next(times), 0.1)  # noqa: E731
    disturbed.learns = False
    contenders = [(Trial("steady", None), steady), (Trial("disturbed", None), disturbed)]
    measure(contenders, prompts(4), seconds=60, order=random.Random(0), whole=True)
    assert [t.seconds for t, _ in contenders] == [4.0, 2.0]


def test_what_a_decoder_learns_first_is_not_its_speed():
    log: list = []
    eager, learner = Scripted(1.0, log=log, name="eager"), Scripted(2.0, log=log, name="learner")
    learner.learns = True
    contenders = [(Trial("eager", None), eager), (Trial("learner", None), learner)]
    measure(contenders, prompts(3), seconds=60, order=random.Random(0), whole=False)
    assert log.count(("learner", 0)) == 2 and log.count(("learner", 1)) == log.count(("learner", 2)) == 1
    assert [t.prompts for t, _ in contenders] == [3, 3] and contenders[1][0].seconds == 6.0


# ---- the stage


def test_the_winner_is_written_for_an_export(tmp_path, prompts_folder, base_folder):
    inputs = {"prompts": prompts_folder, "model": base_folder}
    reported = []
    context = StageContext(report=lambda metrics, step: reported.append((step, metrics)))
    metrics = run(SearchDecodingConfig(**SMALL), inputs, tmp_path, context)
    search_, decoding = artifacts.read_json(tmp_path / "search.json"), artifacts.read_json(tmp_path / "decoding.json")
    finals = {t["name"]: t for t in search_["rounds"][-1]}
    paper, winner = finals[search_["paper"]], finals[search_["winner"]]
    assert search_["paper"] == "mr@64" and "ar@1" in finals
    assert winner["tps"] == max(t["tps"] for t in finals.values()) >= paper["tps"]  # beats or equals it, on the same prompts in the same run
    assert {t["prompts"] for t in finals.values()} == {2}
    assert metrics["speedup_paper"] == pytest.approx(winner["tps"] / paper["tps"]) and metrics["speedup_paper"] >= 1
    heldout = {t["name"]: t for t in search_["heldout"]}
    assert {"ar@1", "mr@64", "transformers", search_["winner"]} == set(heldout)
    assert metrics["heldout_tps"] == pytest.approx(heldout[search_["winner"]]["tps"]) and metrics["heldout_equals_ar"] == 1
    assert {t["prompts"] for t in heldout.values()} == {3} and len({t["tokens"] for t in heldout.values()}) == 1
    assert decoding["name"] == search_["winner"] and decoding["decoding"] == winner["decoding"]
    assert DecodingConfig(**decoding["decoding"])  # as it is
    assert decoding["measured"].keys() >= FACTS and metrics.keys() >= FACTS and decoding["measured"]["dtype"] == "float64"
    assert [step for step, _ in reported] == list(range(1, len(search_["rounds"]) + 1))
    assert all(isinstance(v, int | float) for v in metrics.values())


def test_the_last_measurement_is_part_of_the_budget(tmp_path, prompts_folder, base_folder, monkeypatch):
    """Every decoder takes a second a text: no part goes beyond its share by more than one prompt."""
    clock = Clock(monkeypatch)
    for decoder in (decoders.OurDecoder, decoders.TransformersDecoder):
        monkeypatch.setattr(decoder, "__call__", lambda self, asked: Scripted(1.0, clock=clock)(asked))
    changes = {"budget_s": 80.0, "prompts": 4, "heldout_prompts": 9}
    metrics = run(SearchDecodingConfig(**SMALL | changes), {"prompts": prompts_folder, "model": base_folder}, tmp_path, StageContext())
    heldout = artifacts.read_json(tmp_path / "search.json")["heldout"]
    assert metrics["search_seconds"] == clock.now
    assert 80 <= clock.now <= 80 + len(heldout) * REPEATS and {t["prompts"] for t in heldout} == {heldout[0]["prompts"]}
    assert heldout[0]["prompts"] < 9


def test_a_round_that_took_too_long_is_paid_by_those_after_it(monkeypatch):
    clock = Clock(monkeypatch)
    candidates = [DecodingConfig(method="running_window", block_size=n) for n in range(2, 18)]
    rounds = search(
        candidates,
        [],
        prompts(100),
        lambda c: Scripted(1.0, clock=clock),
        budget_s=600.0,
        keep_one_in=4,
        finalists=2,
        order=random.Random(0),
        told=lambda number, _: setattr(clock, "now", clock.now + 300 * (number == 1)),
    )
    assert len(rounds) == 3 and clock.now < 600 + 20


def test_a_setting_that_is_wrong_shows(tmp_path, prompts_folder, base_folder, monkeypatch):
    original = decoders.OurDecoder.__call__

    def corrupt(self, asked):
        timed = original(self, asked)
        if self.method != "ar" and asked[0].split == "test":
            timed.answers[0].tokens[0] += 1
        return timed

    monkeypatch.setattr(decoders.OurDecoder, "__call__", corrupt)
    metrics = run(SearchDecodingConfig(**SMALL), {"prompts": prompts_folder, "model": base_folder}, tmp_path, StageContext())
    winner = artifacts.read_json(tmp_path / "decoding.json")["name"]
    assert metrics["heldout_equals_ar"] == (1 if winner == "ar@1" else 0)


def test_what_does_not_fit_the_model_is_refused(tmp_path, prompts_folder, base_folder):
    with pytest.raises(UserError, match=r"^search\.max_new_tokens=1000: "):
        run(SearchDecodingConfig(**SMALL | {"max_new_tokens": 1000}), {"prompts": prompts_folder, "model": base_folder}, tmp_path, StageContext())


@pytest.mark.parametrize("setting", ["split", "heldout_split"])
def test_an_empty_split_is_refused(tmp_path, prompts_folder, base_folder, setting):
    with pytest.raises(UserError, match=rf"^search\.{setting}=nothing"):
        run(SearchDecodingConfig(**SMALL | {setting: "nothing"}), {"prompts": prompts_folder, "model": base_folder}, tmp_path, StageContext())


@pytest.mark.parametrize(
    ("changes", "says"),
    [({name: 0}, name) for name in ("prompts", "heldout_prompts", "max_new_tokens", "finalists", "budget_s")]
    + [({"keep_one_in": 1}, "keep_one_in"), ({"heldout_split": "validation"}, "heldout_split"), ({"block_sizes": [0]}, "block_size")]
    + [({"spawn_ratios": [2.0]}, "spawn_ratio"), ({"methods": ["magic"]}, "magic"), ({"dtype": "int8"}, "dtype")],
)
def test_bad_settings_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        SearchDecodingConfig(**changes)
