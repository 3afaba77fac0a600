"""The app's pages without a browser: what they show of a store, and that whatever is missing is a sentence, never a traceback."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboards import views
from tests.dashboards.made_store import Made, part_of

PAGES = ("runs", "trajectories", "packed", "live")
PATIENCE = 240  # seconds, on a busy machine


def _script(page: str, outputs: str) -> None:
    import importlib

    from dashboards.views.common import place

    importlib.import_module(f"dashboards.views.{page}").page(place([f"outputs={outputs}"]))


def opened(page: str, outputs: Path) -> AppTest:
    app = AppTest.from_function(_script, args=(page, str(outputs)), default_timeout=PATIENCE).run()
    assert not app.exception
    return app


def said(app: AppTest) -> str:
    return " ".join(element.value for kind in (app.warning, app.info, app.error) for element in kind)


@pytest.mark.parametrize(
    ("page", "sentence"),
    [
        ("runs", "There is no tracking store at"),
        ("trajectories", "holds no trajectories stage"),
        ("packed", "holds no pack stage"),
        ("live", "holds no model yet"),
    ],
)
@pytest.mark.parametrize("there", [False, True])
def test_an_empty_store_is_a_sentence(tmp_path: Path, page: str, sentence: str, there: bool):
    if there:
        (tmp_path / "store").mkdir()
    assert sentence in said(opened(page, tmp_path))
    assert not (tmp_path / "mlflow.db").exists()


def test_the_app_listens_on_this_machine_only_and_sends_nothing():
    settings = tomllib.loads((Path(views.__file__).parents[1] / ".streamlit/config.toml").read_text())
    assert settings["server"]["address"] == "127.0.0.1" and settings["browser"]["gatherUsageStats"] is False


def test_runs_are_compared_and_looked_into(tracked_runs: Made):
    app = opened("runs", tracked_runs.outputs)
    assert not said(app)
    titles = [heading.value for heading in app.subheader]
    assert titles == [
        "Speed and accuracy over runs",
        "Tokens per forward before and after each round, minicode",
        "Speed and accuracy, minicode",
        "Accepted draft tokens by position, minicode, jacobi@16",
        "Losses",
        "Probes",
        "Latency of a forward",
    ]
    assert len(app.get("plotly_chart")) == len(titles)
    broken = next(option for option in app.multiselect[0].options if option.startswith("broken"))
    app.multiselect[0].select(broken).run()
    assert not app.exception and "did not reach its report" in said(app) and len(app.get("plotly_chart")) == len(titles)


def test_a_run_whose_stages_were_deleted_still_shows_its_results(tracked_runs: Made, tmp_path: Path):
    shutil.copy(tracked_runs.outputs / "mlflow.db", tmp_path)
    app = opened("runs", tmp_path)
    assert said(app).count("holds no stage") == 2  # acceptance and training
    assert [heading.value for heading in app.subheader][-1] == "Latency of a forward"


def test_a_trajectory_is_chosen_by_part_number_and_block(made: Made):
    app = opened("trajectories", made.outputs)
    assert [heading.value for heading in app.subheader] == ["Block 1 of trajectory 1"] and not said(app)
    app.number_input[1].set_value(2).run()
    assert [heading.value for heading in app.subheader] == ["Block 2 of trajectory 1"] and not app.exception


def test_damaged_trajectories_and_missing_texts_are_sentences(copied: Made):
    shutil.rmtree(copied.stage("prompts"))
    assert "token ids are shown instead of texts" in said(opened("trajectories", copied.outputs))
    part_of(copied).write_bytes(b"x")
    assert "cannot be read" in said(opened("trajectories", copied.outputs))


def test_a_packed_row_and_its_mask(made: Made):
    app = opened("packed", made.outputs)
    assert [heading.value for heading in app.subheader] == ["Row 1: what is fed", "Row 1, sample 0: who sees whom"] and not said(app)
    (mask,) = (box for box in app.selectbox if box.label == "Mask")
    mask.select("nc_ic").run()
    assert not app.exception


def test_decoding_fills_the_page_and_the_table_of_knobs(made: Made):
    app = opened("live", made.outputs)
    app.text_area[0].set_value("Write add_3(xs): add 3 to any number.")
    (tokens,) = (box for box in app.number_input if box.label == "Most new tokens")
    (shown,) = (box for box in app.selectbox if box.label == "Shown")
    tokens.set_value(12)
    shown.select(1)
    app.button[0].click().run()
    assert not app.exception and "token for token" in app.success[0].value
    (method,) = (box for box in app.selectbox if box.label == "Method")
    method.select("mr").run()
    assert [heading.value for heading in app.subheader][:2] == ["greedy AR", "jacobi@32"]  # what was decoded stays
    app.button[0].click().run()
    assert app.table[0].value.index.tolist() == ["mr@32", "jacobi@32"] and not app.exception


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda app: next(box for box in app.number_input if box.label.startswith("Drafts side")).set_value(2), "These settings do not go together"),
        (lambda app: app.text_area[0].set_value("  "), "The prompt is empty"),
        (lambda app: next(box for box in app.number_input if box.label == "Most new tokens").set_value(4000), "The decoder refuses this"),
    ],
)
def test_what_the_decoder_refuses_is_a_sentence(made: Made, change, sentence: str):
    app = opened("live", made.outputs)
    change(app)
    app.button[0].click().run()
    assert not app.exception and sentence in said(app)


def test_a_model_that_was_deleted_or_torn_meanwhile_is_a_sentence(copied: Made):
    app = opened("live", copied.outputs)
    (copied.stage("base") / "model.safetensors").unlink()
    app.button[0].click().run()
    assert not app.exception and "cannot be loaded" in said(app)
    shutil.rmtree(copied.stage("base"))
    app.button[0].click().run()
    assert not app.exception and "holds no model yet" in said(app)
