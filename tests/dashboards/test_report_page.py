"""What a report and a sweep's page hold, without a browser: real stages' files in, figures and sentences out."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import plotly.io
import pytest
from plotly.offline import get_plotlyjs

from dashboards.costs import link_runs
from dashboards.report_figures import Evidence, report_figures
from jacobi_core import dense_mask
from jacobi_core.distillation.packing import PackedRow
from tasks import report, trajectory_files
from tasks.excerpts import CANDIDATES
from tasks.packed_files import PackedRows
from tasks.report import FIGURES
from tasks.stage import StageContext
from tests.dashboards.made_report import report_inputs, sweep_jobs, write_report, write_sweep_page
from tests.dashboards.made_store import Made, part_of
from tests.results import ar_row, row

LOADED = {"src", "srcset", "data", "poster", "xlink:href"}  # attributes that a browser follows by itself
EVERY = {"tpf_minicode", "speed_accuracy_minicode", "accepted_minicode", "parallelism_minicode", "accepted_along"}
EVERY |= {"losses", "probes", "tpf_by_tokens", "trajectory_round1", "packed", "mask", "latency"}


class Page(HTMLParser):
    """What a page loads, and what its headings and captions say."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.said: dict[str, list[str]] = {}
        self._open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open = tag
        self.loads += [str(value) for name, value in attrs if name in LOADED or (name == "href" and tag == "link")]

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.said.setdefault(self._open, []).append(data)


@pytest.fixture(scope="module")
def page(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(made, tmp_path_factory.mktemp("report"))


def test_the_page_has_every_figure_with_its_data_in_words_and_loads_nothing(page: Path):
    text = page.read_text()
    read = Page(text)
    assert read.loads == [] and text.count(get_plotlyjs()) == 1 and page.stat().st_size < 8e6
    assert "@import" not in text.replace(get_plotlyjs(), "") and "url(" not in text.replace(get_plotlyjs(), "")
    assert len(read.said["figcaption"]) == len(EVERY) == text.count("Plotly.newPlot(") == text.count('role="img" aria-label="')
    captions = " ".join(read.said["figcaption"])
    for data in ("32 prompts of minicode", "200 problems", "jacobi@16", "jacobi@8", "as the base decoded it", "The first of ", "quickest of five"):
        assert data in captions, data


def test_every_figure_is_kept_on_its_own(page: Path):
    files = {file.stem: file for file in (page.parent / FIGURES).iterdir()}
    assert files.keys() == EVERY
    for file in files.values():
        figure = plotly.io.read_json(file)
        assert figure.data and figure.layout.meta["caption"] and figure.layout.meta["title"]


def test_trajectory_and_packed_row_are_those_of_the_stages(made: Made, page: Path):
    drawn = plotly.io.read_json(page.parent / FIGURES / "trajectory_round1.json").data[0]
    stored = [block for row_ in trajectory_files.read_rows(part_of(made)) for block in row_.states][: CANDIDATES * 9]
    assert any(len(block) >= len(drawn.y) and block.shape[1] == len(drawn.x) for block in stored)
    (packed,) = PackedRows(made.stage("round1/pack") / "packed.parquet").read([0])
    z = plotly.io.read_json(page.parent / FIGURES / "mask.json").data[0].z
    mask = np.frombuffer(base64.b64decode(z["bdata"]), z["dtype"]).reshape([int(size) for size in z["shape"].split(",")])
    batch = PackedRow(**{name: values[None] for name, values in vars(packed).items()})
    whole = dense_mask(batch)[0, 0].numpy()
    first = next(i for i in range(len(whole)) if np.array_equal(whole[i : i + len(mask), i : i + len(mask)], mask))
    assert first == max(0, int((packed.block >= 0).nonzero()[0]) - report.MASK_PROMPT)


def test_the_papers_numbers_stand_beside_ours_and_costs_below(page: Path):
    text = page.read_text()
    assert "It measured none of the benchmarks here" in text and "<td>4.01</td>" in text
    for stage in ("prompts", "round1/trajectories", "round1/distill"):
        assert f'<span data-run="run{stage.replace("/", "")}">{stage}</span>' in text
    assert "tokens packed; 3,000 tokens trained on." in text and "seed = 0" in text


def test_a_published_page_leads_to_the_stages_runs(page: Path):
    linked = link_runs(page.read_text(), 'http://tracker:5000/"')
    assert '<a href="http://tracker:5000/&quot;/#/runs/runprompts">prompts</a>' in linked and "<span data-run" not in linked
    assert '/#/runs/runround1distill">round1/distill</a>' in linked


def test_what_is_missing_is_a_sentence(made: Made, tmp_path: Path):
    """An old run: no excerpts, no probes, no accepted lengths; nothing to judge answers by; one model."""
    inputs = {name: path for name, path in report_inputs(made, tmp_path).items() if name in ("evaluate/base", "export/final")}
    evaluation = json.loads((inputs["evaluate/base"] / "evaluation.json").read_text())
    del evaluation["accepted_lengths"]
    evaluation |= {"rows": [ar_row(accuracy=None, accuracy_prompts=0), row(accuracy=None, accuracy_prompts=0)], "samples": []}
    (inputs["evaluate/base"] / "evaluation.json").write_text(json.dumps(evaluation))
    report.run(report.ReportConfig("x"), inputs, tmp_path, StageContext())
    text = (tmp_path / "report.html").read_text()
    for sentence in (
        "Nothing tells right answers from wrong ones here.",
        "No forwards of drafts are recorded",
        "How a single prompt was decoded is not recorded",
        "Nothing was trained, or no step was logged.",
        "made before excerpts of them were kept",
        "Not measured by this run; tune=true measures it",
        "What the stages took is not recorded for this run.",
        "No answer was kept side by side.",
    ):
        assert sentence in text, sentence
    assert text.count("Plotly.newPlot(") == 1  # tokens per forward are always there
    assert {file.stem for file in (tmp_path / FIGURES).iterdir()} == {"tpf_minicode"}


@pytest.mark.parametrize(
    ("excerpts", "sentences"),
    [
        ({"trajectories": [{"round": "round1", "missing": "Only <one> state."}], "packed": [{"round": "round1", "missing": "No row."}]}, 2),
        ({"trajectories": [], "packed": [], "decoded": []}, 2),
    ],
)
def test_excerpts_without_an_excerpt_are_sentences(excerpts: Mapping, sentences: int):
    shown = report_figures({"rows": [ar_row(), row()], "parallelism": []}, Evidence(excerpts=excerpts))["What the rounds trained on"]
    assert [part.figure for part in shown] == [None] * sentences and all(part.note.endswith(".") for part in shown)


def test_ids_are_shown_where_there_is_no_tokenizer():
    trajectory = {
        "round": "round2",
        "prompt_id": 1,
        "answers": 1,
        "blocks": 1,
        "block": 0,
        "block_size": 2,
        "forwards": 1,
        "states": [[8, 9], [7, 9]],
    }
    (shown, *_) = report_figures({"rows": [ar_row(), row()], "parallelism": []}, Evidence(excerpts={"trajectories": [trajectory], "texts": None}))[
        "What the rounds trained on"
    ]
    assert list(shown.figure.data[0].text[0]) == ["8", "9"] and "as round1's model decoded it in 1 forward:" in shown.note


def test_a_report_imports_no_torch(made: Made, tmp_path: Path):
    inputs = {name: str(path) for name, path in report_inputs(made, tmp_path).items()}
    check = (
        "import json, sys; from pathlib import Path; from tasks.report import *; from tasks.stage import StageContext; "
        "inputs = {name: Path(path) for name, path in json.loads(sys.argv[1]).items()}; "
        "run(ReportConfig('x'), inputs, Path(sys.argv[2]), StageContext()); "
        "assert not {'torch', 'transformers', 'ray', 'mlflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", check, json.dumps(inputs), str(tmp_path)], check=True)


def test_a_sweeps_page_has_its_figures_costs_and_links(tmp_path: Path):
    text = write_sweep_page(tmp_path).read_text()
    read = Page(text)
    assert read.loads == [] and text.count("Plotly.newPlot(") == 3 and text.count('role="img" aria-label="') == 3
    captions = " ".join(read.said["figcaption"])
    for data in ("over 32 timed prompts", "at jacobi@64 in every job", "200 problems of minicode", "From its noise.json"):
        assert data in captions, data
    assert re.findall(r'href="(\d/report.html)">([^<]+)<', text)[0] == ("0/report.html", "linear, 8")
    assert "5 jobs, 246 s of wall time in all." in text and "no &lt;memory&gt;" in text and "<memory>" not in text
    assert "<script>alert" not in text


def test_a_sweep_of_old_jobs_says_what_is_not_recorded(tmp_path: Path):
    from dashboards.sweep import sweep_rows
    from dashboards.sweep_page import sweep_figures, sweep_page

    bare = [job | {"times": None, "sample": None, "report": None, "noise": None, "paper": None} for job in sweep_jobs()]
    for job in bare:
        job["rows"] = job["rows"] and [r | {"accuracy": None, "accuracy_prompts": 0} for r in job["rows"]]
    rows = sweep_rows(bare)
    text = sweep_page(rows, bare, sweep_figures(rows), title="Sweep", about=[])
    assert "What the jobs took is not recorded." in text and "No answer was kept side by side." in text
    assert "Nothing tells right answers from wrong ones here." in text and text.count("Plotly.newPlot(") == 1
