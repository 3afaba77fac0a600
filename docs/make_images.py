"""The pictures in docs/images, from a finished quickstart: `python docs/make_images.py outputs/runs/DAY/TIME/results.json`.

Plotly's figures are those of `dashboards.figures`, photographed by a headless Chromium (Debian's packages chromium and chromium-driver);
`race.svg` and `mask.svg` are written by make_svg.py. The screenshots of the app (app_*.png) were taken by hand.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
from make_svg import mask_svg, race_svg
from PIL import Image
from plotly.offline import get_plotlyjs
from selenium import webdriver

from dashboards import figures, race, stored
from dashboards.stored import Packed, Stages, TrajectoryPart
from jacobi_core.decoding.config import DecodingConfig, Method

IMAGES = Path(__file__).parent / "images"
WIDTH, SHARPNESS, COLOURS = 900, 1.5, 64
PROMPT = 0  # of the test split: the one that races


def main(results: Path) -> None:
    found = json.loads(results.read_text(encoding="utf-8"))
    model = Path(found["final_model"])
    stages = Stages(model.parent)
    (IMAGES / "race.svg").write_text(race_svg(*_raced(model, stages)), encoding="utf-8")
    (IMAGES / "mask.svg").write_text(mask_svg(), encoding="utf-8")
    with _camera() as photograph:
        for name, figure in _figures(found, stages).items():
            photograph(figure, IMAGES / f"{name}.png")


def _raced(model: Path, stages: Stages) -> tuple[race.Decoder, race.Decoder]:
    """The same prompt decoded one token at a time and in blocks of 32."""
    network, tokenizer = race.load(model, dtype="float32")
    text = stored.prompts(stages.named("prompts")[0], "test", PROMPT + 1)[PROMPT]
    config = DecodingConfig(method=Method.jacobi, block_size=32, max_new_tokens=128)
    ar, parallel = race.Decoder("ar", race.ar_of(config)), race.Decoder("jacobi", config)
    for _ in race.race(network, tokenizer, race.encode(tokenizer, text), [ar, parallel]):
        pass
    assert ar.generation.new_tokens.tolist() == parallel.generation.new_tokens.tolist()
    return ar, parallel


def _figures(results: dict, stages: Stages) -> dict[str, go.Figure]:
    rows = pd.DataFrame([row for row in results["rows"] if row["batch_size"] == 1])
    last = next(folder for folder in stages.named("trajectories") if "round2" in stages.title(folder))
    part = TrajectoryPart.read(sorted(last.glob("part-*.parquet"))[0])
    packed = next(folder for folder in stages.named("pack") if "round2" in stages.title(folder))
    shares = []
    for folder in stages.named("evaluate"):
        evaluation = stored.evaluation(folder)
        forwards = stored.accepted_lengths(evaluation).get("jacobi@64", {})
        shares += [
            {"model": evaluation["model"], "position": k, "share": share} for k, share in enumerate(figures.acceptance_shares(forwards), start=1)
        ]
    found = {
        "tpf": figures.tpf_by_block_size(rows[rows["method"].isin(["ar", "jacobi"])]),
        "acceptance": figures.accepted_by_position(pd.DataFrame(shares).sort_values(["model", "position"])),
        "trajectory": figures.trajectory(part.block(0, 0, stages.token_text(last))),
        "packed": figures.packed_sequence(Packed.read(packed).tokens(0, stages.token_text(packed))),
    }
    if "latency" in results:  # of a run with tune=true
        found["latency"] = figures.latency(results["latency"]["curves"])
    return found


@contextmanager
def _camera() -> Iterator[Callable[[go.Figure, Path], None]]:
    """A function that writes a figure into a PNG file."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", f"--force-device-scale-factor={SHARPNESS}"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    browser.set_window_size(WIDTH + 60, 900)

    def photograph(figure: go.Figure, file: Path) -> None:
        figure.update_layout(width=WIDTH)
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder, "figure.html")
            chart = figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False})
            page.write_text(f'<meta charset="utf-8"><script>{get_plotlyjs()}</script><div id="it">{chart}</div>', encoding="utf-8")
            browser.get(page.as_uri())
            image = browser.find_element("css selector", ".main-svg").screenshot_as_png
        Image.open(io.BytesIO(image)).convert("RGB").quantize(COLOURS).save(file, optimize=True)

    try:
        yield photograph
    finally:
        browser.quit()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
