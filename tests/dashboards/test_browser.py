"""Report page, figures and app in a headless Chromium: clicked through, looked at (screenshots), and checked for who reads them otherwise.

Screenshots are written to the folder that SCREENSHOTS names, else thrown away. Without Chromium these tests fail: it is Debian's package
`chromium`, with `chromium-driver`.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pandas as pd
import pytest
from plotly.offline import get_plotlyjs
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from dashboards import figures
from dashboards.stored import Packed, TrajectoryPart
from dashboards.views.packed import _visible
from tests.dashboards.accessibility import problems
from tests.dashboards.made_report import write_report, write_sweep_page
from tests.dashboards.made_store import Made, part_of
from tests.test_figures import CURVES, PROBES, ROWS, curves

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE = 240  # seconds, on a busy machine
UNFOLDED = "return [...document.querySelectorAll('details pre')].some((pre) => pre.checkVisibility())"
CHARTS = "return document.querySelectorAll('.js-plotly-plot .main-svg').length > 0 ? document.querySelectorAll('.js-plotly-plot').length : 0"


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert program and driver, "no chromium or chromedriver here; install Debian's packages chromium and chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--window-size=1400,1000"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture(scope="module")
def address(tracked_runs: Made) -> Iterator[str]:
    """The app, served as `make dashboard` does."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "streamlit", "run", str(REPOSITORY / "dashboards/app.py"), "--server.port", str(port)]
    server = subprocess.Popen([*command, "--", f"outputs={tracked_runs.outputs}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        WebDriverWait(server, PATIENCE, ignored_exceptions=[OSError]).until(_answers(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()  # a polite end waits until the browser has closed its page
        printed = server.communicate(timeout=60)[0]
    assert "Traceback" not in printed, printed
    assert "0.0.0.0" not in printed and "External URL" not in printed  # this machine only


def _answers(port: int):
    def check(server: subprocess.Popen) -> bool:
        assert server.poll() is None, server.stdout.read()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=5) as answer:
            return answer.status == 200

    return check


def until(browser: webdriver.Chrome, script: str, what: str):
    """Waits for a script's value to be true."""
    return WebDriverWait(browser, PATIENCE).until(lambda b: b.execute_script(script), f"{what}; the page says: {_text(browser)[-1500:]}")


def _text(browser: webdriver.Chrome) -> str:
    return browser.execute_script("return document.body.innerText")


def keep(browser: webdriver.Chrome, name: str) -> None:
    """A picture of the whole page, where somebody wants it."""
    if folder := os.environ.get("SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        height = browser.execute_script(
            "return Math.max(document.body.scrollHeight, document.querySelector('[data-testid=stMain]')?.scrollHeight || 0)"
        )
        browser.set_window_size(1400, height + 150)
        browser.execute_async_script("const done = arguments[0]; setTimeout(done, 700)")  # charts follow the window's width
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))
        browser.set_window_size(1400, 1000)


def opened(browser: webdriver.Chrome, path: Path) -> None:
    browser.get_log("browser")
    browser.get(path.as_uri())
    until(browser, CHARTS, "no chart was drawn")
    assert browser.get_log("browser") == []
    asked = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in asked if not name.startswith(("file:", "data:"))] == []  # works offline


def test_the_report_page(browser: webdriver.Chrome, made: Made, tmp_path: Path):
    """Opened, every section gone to, everything that is folded unfolded, a token pointed at."""
    opened(browser, write_report(made, tmp_path))
    charts(browser, 12)
    assert not browser.execute_script(UNFOLDED)
    sections = browser.execute_script("return [...document.querySelectorAll('nav a')].map((link) => link.textContent)")
    assert sections[0] == "Results" and sections[-1] == "Samples" and len(sections) == 8
    for section in sections:
        browser.find_element("link text", section).click()
        at = "document.querySelector(decodeURIComponent(location.hash)).getBoundingClientRect().top"
        until(browser, f"const top = {at}; return top >= -1 && top < window.innerHeight", f"{section} is not to be seen")
    assert problems(browser, charts_described=True) == []
    browser.execute_script("document.querySelectorAll('details').forEach((part) => part.querySelector('summary').click())")
    assert browser.execute_script(UNFOLDED)
    assert "trained on." in _text(browser) and "tests passed" in _text(browser)
    cell = browser.find_element("css selector", '[aria-label^="A block\'s trajectory"] .nsewdrag')
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", cell)
    ActionChains(browser).move_to_element(cell).perform()
    told = "return [...document.querySelectorAll('.hoverlayer')].some((layer) => layer.textContent.includes('position'))"
    until(browser, told, "nothing is told of a token")
    assert problems(browser, charts_described=True) == []
    _keep_in_both(browser, "report")


def test_a_sweeps_page(browser: webdriver.Chrome, tmp_path: Path):
    opened(browser, write_sweep_page(tmp_path))
    charts(browser, 3)
    for section in ("Figures", "Samples"):
        browser.find_element("link text", section).click()
    assert not browser.execute_script(UNFOLDED)
    browser.execute_script("document.querySelectorAll('details').forEach((part) => part.querySelector('summary').click())")
    assert browser.execute_script(UNFOLDED)
    links = "return [...document.querySelectorAll('a')].map((link) => link.getAttribute('href')).filter((to) => to.endsWith('report.html'))"
    assert browser.execute_script(links) == [f"{number}/report.html" for number in range(4)]
    assert problems(browser, charts_described=True) == []
    _keep_in_both(browser, "sweep")


def _keep_in_both(browser: webdriver.Chrome, name: str) -> None:
    """In colour and in grey."""
    keep(browser, name)
    browser.execute_script("document.body.style.filter = 'grayscale(1)'")
    keep(browser, f"{name}_grey")
    browser.execute_script("document.body.style.filter = ''")


def test_every_figure_is_drawn_and_described(browser: webdriver.Chrome, made: Made, tmp_path: Path):
    part, packed = TrajectoryPart.read(part_of(made)), Packed.read(made.stage("round1/pack"))
    tokens = packed.tokens(0, None)
    shares = pd.DataFrame([{"model": m, "position": k, "share": s / k} for m, s in (("base", 0.1), ("round1", 0.9)) for k in range(1, 9)])
    along = pd.DataFrame([("AR", 1, "draft")] * 9 + [("mr", 4, "draft"), ("mr", 5, "ngram")], columns=["name", "committed", "source"])
    drawn = {
        "Speed and accuracy": figures.speed_accuracy(ROWS),
        "Speed and accuracy over runs": figures.runs_pareto(pd.concat([ROWS.assign(run="a"), ROWS.assign(run="b", accuracy=0.9)])),
        "Tokens per forward": figures.tpf_by_block_size(ROWS),
        "Losses": figures.training_curves(CURVES),
        "Probes": figures.probe_curves(PROBES),
        "Tokens per forward by tokens": figures.tpf_by_tokens(figures.probes_by_tokens(PROBES, CURVES)),
        "Latency": figures.latency(curves(knee=2.5)),
        "Acceptance by position": figures.accepted_by_position(shares),
        "Accepted along an answer": figures.accepted_along(along),
        "A trajectory": figures.trajectory(part.block(0, 0, None)),
        "A packed row": figures.packed_sequence(tokens),
        "Its mask": figures.attention_mask(tokens, _visible(tokens, "nc")),
    }
    parts = "".join(f"<h2>{title}</h2>{figures.described(figure, title)}" for title, figure in drawn.items())
    head = f'<meta charset="utf-8"><title>figures</title><script>{get_plotlyjs()}</script>'
    path = tmp_path / "figures.html"
    path.write_text(f'<!DOCTYPE html><html lang="en"><head>{head}</head><body><h1>Figures</h1>{parts}</body></html>', encoding="utf-8")
    opened(browser, path)
    until(browser, f"return document.querySelectorAll('.js-plotly-plot').length === {len(drawn)}", "figures are missing")
    _keep_in_both(browser, "figures")
    assert problems(browser, charts_described=True) == []


def charts(browser: webdriver.Chrome, number: int) -> None:
    """Waits until so many charts are to be seen."""
    drawn = "(chart) => chart.checkVisibility() && chart.querySelector('.main-svg')"
    seen = f"return [...document.querySelectorAll('.js-plotly-plot')].filter({drawn}).length"
    WebDriverWait(browser, PATIENCE).until(lambda b: b.execute_script(seen) == number, f"{number} charts wanted; the page says: {_text(browser)}")


def click(browser: webdriver.Chrome, selector: str, text: str) -> None:
    found = f"[...document.querySelectorAll('{selector}')].find((element) => element.innerText.trim() === '{text}')"
    until(browser, f"return Boolean({found})", f"no {selector} {text!r}")
    browser.execute_script(f"{found}.click()")


def test_the_app(browser: webdriver.Chrome, address: str):
    """One walk through all pages, as a person takes it."""
    browser.get(address)
    charts(browser, 3)
    keep(browser, "app_runs")
    assert problems(browser, charts_described=False) == []
    for tab, number in (("Acceptance", 2), ("Training", 3), ("Machine", 2)):
        click(browser, "[role=tab]", tab)
        charts(browser, number)
        keep(browser, f"app_runs_{tab.lower()}")

    click(browser, "[data-testid=stSidebarNav] a", "Trajectories")
    until(browser, "return document.body.innerText.includes('Block 1 of trajectory 1')", "no trajectory")
    charts(browser, 1)
    keep(browser, "app_trajectories")
    assert problems(browser, charts_described=False) == []

    click(browser, "[data-testid=stSidebarNav] a", "Packed rows")
    until(browser, "return document.body.innerText.includes('who sees whom')", "no mask")
    charts(browser, 2)
    keep(browser, "app_packed")
    assert problems(browser, charts_described=False) == []

    click(browser, "[data-testid=stSidebarNav] a", "Side by side")
    until(browser, "return Boolean(document.querySelector('[aria-label=\"Most new tokens\"]'))", "no knobs")
    for keys in ((Keys.CONTROL, "a"), ("24", Keys.ENTER)):  # one call each: a modifier is held until the end of its call
        browser.find_element("css selector", '[aria-label="Most new tokens"]').send_keys(*keys)
    counts = "[...document.querySelectorAll('.count')].map((count) => count.innerText)"
    watch = "{subtree: true, childList: true, characterData: true}"
    browser.execute_script(f"window.seen = []; new MutationObserver(() => window.seen.push({counts})).observe(document.body, {watch})")
    click(browser, "button", "Decode")
    until(browser, f"const c = {counts}; return c.length === 2 && c.every((count) => count.endsWith('finished'))", "the race does not end")
    assert browser.execute_script("return window.seen.some((counts) => counts.some((count) => /^[1-9].* running$/.test(count)))")  # it was live
    clocks = "return [...document.querySelectorAll('.clock')].map((clock) => parseFloat(clock.innerText))"
    assert all(seconds > 0 for seconds in browser.execute_script(clocks))
    charts(browser, 1)
    until(browser, "return document.querySelectorAll('table').length === 1", "no table of what the knobs did")
    assert "Both answers are equal, token for token." in _text(browser)
    marked = "[...document.querySelectorAll('.race span[title]')].filter((token) => /^forward \\d+: /.test(token.title)).length"
    assert browser.execute_script(f"return {marked}") > 2  # every token tells how it was accepted
    keep(browser, "app_live")
    assert problems(browser, charts_described=False) == []
    asked = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert asked and [name for name in asked if not name.startswith((address, "data:", "blob:"))] == []  # nothing is sent anywhere
