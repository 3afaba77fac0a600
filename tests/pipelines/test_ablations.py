"""The ablations compose into the grid they are meant to be, share what they can, and their windows fit the answers."""

import statistics
from pathlib import Path

import pytest
from hydra.types import RunMode

from dashboards.paper_numbers import TABLE4, TABLE5, paper_cell
from pipelines.stages import build_graph
from pipelines.store import plain
from tests.pipelines.configs import built, composed

GRID = [(schedule, window) for schedule in ("random", "linear", "reverse") for window in (4, 8, 16)]
MASKS = ("nc", "nc_ic")


def cell(experiment: str, **swept: object):
    return built(f"experiment={experiment}", *(f"{key}={value}" for key, value in swept.items()))


def noise_cell(kind: str, window: int):
    return cell("ablate_noise", **{"noise_schedule": kind, "rounds.0.window": window})


@pytest.mark.parametrize(
    ("experiment", "grid", "paper"),
    [
        ("ablate_noise", {"noise_schedule": "random,linear,reverse", "rounds.0.window": "4,8,16"}, "table4"),
        ("ablate_mask", {"distill.mask": "nc,nc_ic"}, "table5"),
        ("ablate_noise_paper", {"noise_schedule": "random,linear,reverse", "rounds.0.window": "8,16,32"}, "table4"),
        ("ablate_mask_paper", {"distill.mask": "nc,nc_ic"}, "table5"),
    ],
)
def test_the_config_itself_is_the_sweep(experiment: str, grid: dict, paper: str):
    hydra = composed(f"experiment={experiment}", hydra=True).hydra
    assert hydra.mode is RunMode.MULTIRUN
    assert hydra.sweeper.params == grid
    assert hydra.callbacks.sweep_table.paper == paper


def test_an_ordinary_run_is_no_sweep():
    hydra = composed("experiment=quickstart", hydra=True).hydra
    assert (hydra.mode, hydra.sweeper.params) == (None, None)
    assert hydra.callbacks.sweep_table == {"_target_": "pipelines.sweep.SweepTable", "paper": None}


def test_all_cells_share_base_prompts_and_trajectories_and_train_equally(tmp_path: Path):
    noise = {key: noise_cell(*key) for key in GRID}
    masks = {mask: cell("ablate_mask", **{"distill.mask": mask}) for mask in MASKS}
    graphs = {key: build_graph(config, identity_cache=tmp_path).fingerprints for key, config in {**noise, **masks}.items()}
    for stage in ("prompts", "base", "base/answers", "base/speed", "base/evaluate", "round1/trajectories"):
        assert len({fingerprints[stage] for fingerprints in graphs.values()}) == 1, stage
    assert len({fingerprints["round1/distill"] for fingerprints in graphs.values()}) == len(GRID) + len(MASKS) - 1
    assert graphs["nc"]["round1/evaluate"] == graphs["linear", 8]["round1/evaluate"]
    assert len({(config.distill.epochs, config.distill.max_steps, config.rounds[0].block_size) for config in noise.values()}) == 1


def test_the_papers_own_cells_share_what_they_can_and_stand_beside_its_numbers(tmp_path: Path):
    """n = 16 and windows of 8, 16, 32 of the paper's model and data, measured as there: HumanEval at block 256."""
    noise = {(kind, window): cell("ablate_noise_paper", **{"noise_schedule": kind, "rounds.0.window": window}) for kind, window in TABLE4}
    masks = {mask: cell("ablate_mask_paper", **{"distill.mask": mask}) for mask in MASKS}
    for (_, window), config in noise.items():
        (round_,) = config.rounds
        assert (round_.block_size, round_.window, config.model.path) == (16, window, "Qwen/Qwen2.5-Coder-7B-Instruct")
        assert window * round_.block_size <= config.trajectories.max_new_tokens
        assert [b.name.value for b in config.evaluate.benchmarks] == ["human_eval"]
        assert {(s.method.value, s.block_size) for s in config.evaluate.settings()} == {("ar", 1), ("jacobi", 256)}
    graphs = {key: build_graph(config, identity_cache=tmp_path).fingerprints for key, config in {**noise, **masks}.items()}
    for stage in ("prompts", "human_eval/prompts", "base", "base/human_eval/evaluate", "round1/trajectories"):
        assert len({fingerprints[stage] for fingerprints in graphs.values()}) == 1, stage
    assert graphs["nc"]["round1/human_eval/evaluate"] == graphs["linear", 16]["round1/human_eval/evaluate"]
    papers = {key: paper_cell("table4", plain_config(config)) for key, config in noise.items()}
    assert {key: round(100 * paper["accuracy"], 1) for key, paper in papers.items()} == {key: value[0] for key, value in TABLE4.items()}
    assert all(paper["window"] == window for (_, window), paper in papers.items())


def test_no_window_is_longer_than_the_median_answer(tmp_path: Path):
    from jacobi_core.hub import load_tokenizer
    from tasks import artifacts
    from tasks.prepare_prompts import run
    from tasks.prepare_prompts.config import PreparePromptsConfig
    from tasks.stage import StageContext

    config = noise_cell("linear", 16)
    settings = {**vars(config.data), "train": 300, "test": 1}
    run(PreparePromptsConfig(**settings, tokenizer=None), {}, tmp_path, StageContext())
    tokenizer = load_tokenizer(tmp_path / "tokenizer")
    answers = [len(tokenizer(p.meta["solution"], add_special_tokens=False)["input_ids"]) for p in artifacts.read_prompts(tmp_path, "train")]
    assert statistics.median(answers) >= 16 * config.rounds[0].block_size
    assert max(answers) < config.trajectories.max_new_tokens


def test_the_papers_cells():
    found = {key: paper_cell("table4", plain_config(noise_cell(*key))) for key in GRID}
    assert {key for key, paper in found.items() if paper is None} == {("reverse", 4), ("reverse", 16)}
    assert found["linear", 8] == {"accuracy": 0.817, "tpf": pytest.approx(1 / 0.46), "window": 16}  # as many noisy tokens more per block
    assert found["reverse", 8]["tpf"] == pytest.approx(1 / 0.62)
    assert {paper["window"] for paper in found.values() if paper} == {8, 16, 32}
    assert len(TABLE4) == sum(paper is not None for paper in found.values())
    speedups = {mask: paper_cell("table5", plain_config(cell("ablate_mask", **{"distill.mask": mask})))["speedup"] for mask in TABLE5}
    assert speedups == {"nc": 3.6, "nc_ic": 1.9}
    assert paper_cell(None, {}) is None
    with pytest.raises(ValueError, match="paper=table9"):
        paper_cell("table9", {})


def plain_config(config) -> dict:
    import dataclasses

    return plain(dataclasses.asdict(config))
