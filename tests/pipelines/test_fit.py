"""Fitting a run to the lengths of answers: the rule, number by number, and that what the user has set stays."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipelines.config import schema
from pipelines.fit import Lengths, concerns, fitted, given_names, said
from pipelines.fit_run import fit_to_answers
from pipelines.stages import build_graph
from pipelines.store import Store
from tasks.stage import UserError
from tests.pipelines.configs import built


@pytest.fixture
def config_of(tmp_path: Path):
    """overrides -> the config of `experiment=convert` on a model that holds 2,048 tokens and 40 prompts."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(40)))
    places = [f"model.path={model}", f"data.path={tmp_path}/prompts.jsonl"]
    return lambda *overrides: built("experiment=convert", "data.test=8", *places, *overrides)


def fit(config, *answers: float, given=(), train=5000, context=2048, longest=100, mean=100):
    lengths = Lengths(answers, longest_prompt=longest, mean_prompt=mean, train=train, context=context)
    return fitted(config, lengths, given=set(given))


def rounds(config) -> list[tuple[int, int]]:
    return [(r.block_size, r.window) for r in config.rounds]


@pytest.mark.parametrize(
    ("median", "expected", "schedule"),
    [
        (1200, [(16, 16), (32, 8)], "linear"),  # the paper's
        (256, [(16, 16), (32, 8)], "linear"),  # just long enough
        (255, [(16, 1), (32, 1)], "random"),  # the paper's window would be longer than the answer: clean context
        (127, [(16, 1), (32, 1)], "random"),
        (50, [(8, 1), (16, 1)], "random"),  # four blocks of the first round's, two of the second's
        (10, [(4, 1), (4, 1)], "random"),
    ],
)
def test_blocks_and_windows(config_of, median, expected, schedule):
    found, _ = fit(config_of(), median)
    assert rounds(found) == expected and found.noise_schedule == schedule


def test_the_cap_leaves_room_above_most_answers(config_of):
    found, told = fit(config_of(), *[100.0] * 19, 900.0)
    assert found.trajectories.max_new_tokens == found.evaluate.max_new_tokens == 128  # 100 x 1.25, in steps of 32; one in twenty is cut
    assert found.pack.max_length == 384  # 100 + 2 x 128 = 356, in steps of 64
    assert found.evaluate.block_sizes == [16, 32, 64, 128] and found.distill.probe.max_new_tokens == 128
    assert "20 measured answers of 100 to 900 tokens" in said(told)


def test_the_cap_ends_where_the_context_does(config_of):
    found, _ = fit(config_of(), 5000.0)
    assert found.trajectories.max_new_tokens == 2048 - 512  # data.max_prompt_tokens is what a prompt may have
    schema.check_fitted(found)  # nothing else objects


def test_passes_until_enough_was_seen(config_of):
    sample = 100 + 2 * 400  # tokens of a packed one
    for train, epochs in ((20_000, 1.0), (3_000, 2.0), (100, 3.0)):
        found, told = fit(config_of(), 400, train=train)
        assert found.distill.epochs == epochs == max(1, min(3, -(-10e6 // (train * sample * 2))))
    assert "few: expect little" in said(told)
    assert fit(config_of("fit.train_tokens=1e8"), 400, train=20_000)[0].distill.epochs == 3.0
    assert fit(config_of("trajectories.prompts=3000"), 400, train=20_000)[0].distill.epochs == 2.0


def test_one_long_prompt_makes_rows_long_and_training_no_shorter(config_of):
    found, told = fit(config_of(), 20, longest=500, mean=40)
    assert found.pack.max_length == 576  # 500 + 2 x 32, in steps of 64
    assert "5000 prompts are 0.8 million packed tokens" in said(told) and found.distill.epochs == 3.0


def test_what_the_user_sets_stays_and_the_rest_follows(config_of):
    overrides = ["trajectories.max_new_tokens=64", "rounds.0.block_size=4", "pack.max_length=700", "+distill.epochs=7"]
    config = config_of(*overrides[:3], "distill.epochs=7")
    given = given_names(overrides, config, schema.PipelineConfig())
    found, told = fit(config, 400, given=given)
    assert found.trajectories.max_new_tokens == 64 == found.evaluate.max_new_tokens
    assert rounds(found)[0] == (4, 16) and rounds(found)[1][0] == 32  # 64 tokens are 16 blocks of 4
    assert found.pack.max_length == 700 and found.distill.epochs == 7
    kept = {f.name for f in told if f.set_by_user}
    assert kept == {"trajectories.max_new_tokens", "rounds.0.block_size", "pack.max_length", "distill.epochs"}


def test_a_default_that_is_set_on_purpose_stays_too(config_of):
    given = given_names(["trajectories.max_new_tokens=256", "rounds=[{block_size: 8, window: 3}]"], config_of(), schema.PipelineConfig())
    found, _ = fit(config_of("rounds=[{block_size: 8, window: 3}]"), 900, given=given)
    assert found.trajectories.max_new_tokens == 256 and rounds(found) == [(8, 3)]


def test_what_an_experiment_file_sets_counts_as_set(config_of):
    config = config_of("evaluate.block_sizes=[16]", "noise_schedule=reverse")
    assert given_names([], config, schema.PipelineConfig()) == {"evaluate.block_sizes", "noise_schedule"}


def test_mistakes_about_what_will_be_fitted_wait(config_of):
    assert concerns("rounds.0.window=16 is more than the 4 blocks") and not concerns("data.path is missing")
    config = config_of("trajectories.max_new_tokens=40")  # rounds of 16 x 16 would not fit, but are not meant
    found, _ = fit(config, 400, given={"trajectories.max_new_tokens"})
    schema.check_fitted(found)
    wrong = config_of("trajectories.max_new_tokens=40", "rounds.0.window=9", "rounds.0.block_size=16")
    found, _ = fit(wrong, 400, given={"trajectories.max_new_tokens", "rounds.0.window", "rounds.0.block_size"})
    with pytest.raises(UserError, match=r"rounds\.0\.window=9 is more than the 3 blocks"):
        schema.check_fitted(found)


def test_a_dry_run_measures_nothing_and_says_so(config_of, tmp_path: Path, capsys: pytest.CaptureFixture):
    config, store = config_of("dry_run=true"), Store(tmp_path / "store")

    def graph_of(changed):
        graph = build_graph(changed, identity_cache=tmp_path)
        return graph.until(changed.until) if changed.until else graph

    def track(name):
        raise AssertionError("nothing may run")

    found = fit_to_answers(config, store, overrides=["dry_run=true"], graph_of=graph_of, track=track)
    printed = capsys.readouterr().out
    assert "have not been measured (until=answer_lengths does); fitted to assumed ones" in printed
    assert rounds(found) == [(16, 16), (32, 8)] and "1 assumed answers of 256 to 256 tokens" in printed


def test_the_measurement_is_a_stage_of_the_graph_that_rests_on_prompts_and_model_only(config_of, tmp_path: Path):
    graphs = [build_graph(config_of(*o), identity_cache=tmp_path) for o in ([], ["rounds.0.window=2"], ["distill.epochs=3"], ["data.seed=5"])]
    prints = [graph.fingerprints["answer_lengths"] for graph in graphs]
    assert prints[0] == prints[1] == prints[2] != prints[3]
    assert [s.id for s in graphs[0].until("answer_lengths").stages] == ["prompts", "base", "answer_lengths"]


def test_the_stage_counts_tokens_and_caps_at_the_context(tmp_path: Path):
    from tasks.measure_answers import FILE, MeasureAnswersConfig, run
    from tasks.stage import StageContext
    from tests.tasks.tiny_stage import CONTEXT_LENGTH, build_base, build_prompts

    build_prompts(tmp_path / "prompts")
    build_base(tmp_path / "base", tmp_path / "prompts" / "tokenizer")
    (tmp_path / "out").mkdir()
    inputs = {"prompts": tmp_path / "prompts", "model": tmp_path / "base"}
    metrics = run(MeasureAnswersConfig(prompts=6, batch_size=4), inputs, tmp_path / "out", StageContext())
    found = SimpleNamespace(**json.loads((tmp_path / "out" / FILE).read_text()))
    assert len(found.answer_tokens) == len(found.ended) == metrics["answers"] == 6
    assert found.context == CONTEXT_LENGTH and found.max_new_tokens == CONTEXT_LENGTH - max(found.prompt_tokens)
    assert all(ended or length == found.max_new_tokens for ended, length in zip(found.ended, found.answer_tokens, strict=True))
    assert any(found.ended) and metrics["answer_tokens_mean"] == sum(found.answer_tokens) / 6
