"""`python -m pipelines.evidence runs=DIR,... sweeps=DIR,... output=DIR`: what finished runs say about the paper's claims, as files to commit.

Writes `claims.md`, `index.md` with a figure per group of runs, and under `data/` a copy of every input, from which the same pages come out again.
Computes nothing but means and ranges; exit code 2 for a mistake in the arguments or in what they name.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pipelines import evidence_copy
from pipelines.arguments import make_parent, run_tool
from tasks.artifacts import write_text
from tasks.stage import UserError


@dataclass
class EvidenceArguments:
    """python -m pipelines.evidence runs=DIR,... sweeps=DIR,... output=DIR: the paper's ten claims and a table of all runs, as markdown to commit.

    Runs of one experiment that differ in their seed only are averaged.
    """

    output: Annotated[str, "folder to write claims.md, index.md, figures and data/ into"]
    runs: Annotated[list[str], "folders of finished runs, or of a sweep of runs, or results.json files"] = field(default_factory=list)
    sweeps: Annotated[list[str], "folders of sweeps of the paper's Table 4 or 5, or sweep.json files"] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not (self.runs or self.sweeps):
            raise ValueError("runs and sweeps are both missing; give runs=DIR of a finished run")


def main(argv: list[str]) -> int:
    """Exit code."""
    return run_tool(argv, EvidenceArguments, _run)


def _run(arguments: EvidenceArguments) -> int:
    output = Path(arguments.output)
    runs = _copies("runs", [file for given in arguments.runs for file in _run_files(given)])
    sweeps = _copies("sweeps", [_sweep_file(given) for given in arguments.sweeps])
    if twice := runs.keys() & sweeps.keys():
        raise UserError(f"runs and sweeps both have a {min(twice)}: their copies would be one file; give one of them another name (name=...)")
    files = pages(runs, sweeps) | {f"data/{name}.json": evidence_copy.text_of(copy) for name, copy in (runs | sweeps).items()}
    for name, text in files.items():
        make_parent("output", output / name)
        try:
            write_text(output / name, text)
        except OSError as error:
            raise UserError(f"output={output}: cannot write {name} ({error.strerror}); choose another folder") from error
    print((output / "claims.md").read_text(encoding="utf-8").partition("\n## ")[0], flush=True)
    print(f"\nclaims: {output / 'claims.md'}\ntables: {output / 'index.md'}", flush=True)
    return 0


def pages(runs: dict[str, dict[str, Any]], sweeps: dict[str, dict[str, Any]]) -> dict[str, str]:
    """File name -> its text."""
    from dashboards.claims import ten_claims
    from dashboards.claims_page import claims_markdown
    from dashboards.evidence_rows import run_rows
    from dashboards.figures import tpf_by_block_size, tpf_by_tokens
    from dashboards.ladder_page import drawn_rows, ladder_markdown, probe_points
    from dashboards.static import svg

    rows = run_rows(runs)
    drawn = {group: svg(tpf_by_block_size(found)) for group, found in drawn_rows(rows).items()}
    pictures = {group: f"tpf-{_slug(group)}.svg" for group in drawn}
    bought = {name: svg(tpf_by_tokens(points)) for name, points in probe_points(runs).items()}
    drawn, pictures = drawn | bought, pictures | {name: f"tokens-{name}.svg" for name in bought}
    measured = f"From {_count(runs, 'run')} and {_count(sweeps, 'sweep')}: [tables, versions, commands](index.md)."
    found = {pictures[group]: text for group, text in drawn.items()}
    found["claims.md"] = claims_markdown(ten_claims(rows, sweeps), measured=measured)
    return found | {"index.md": ladder_markdown(rows, runs, sweeps, pictures)}


def _count(found: dict[str, Any], what: str) -> str:
    return f"{len(found)} {what}{'' if len(found) == 1 else 's'}"


def _run_files(given: str) -> list[Path]:
    place = Path(given)
    if place.is_file():
        return [place]
    found = [place / "results.json"] if (place / "results.json").is_file() else sorted(place.glob("*/results.json"))
    if not found:
        raise UserError(f"runs={given}: holds no results.json; give the folder of a run that has finished")
    return found


def _sweep_file(given: str) -> Path:
    place = Path(given)
    file = place if place.is_file() else place / "sweep.json"
    if not file.is_file():
        raise UserError(f"sweeps={given}: holds no sweep.json; give the folder of a sweep that has finished")
    return file


def _copies(setting: str, files: list[Path]) -> dict[str, dict[str, Any]]:
    """By name: experiment and seed."""
    found: dict[str, dict[str, Any]] = {}
    places: dict[str, Path] = {}
    for file in files:
        copy = evidence_copy.run_copy(file) if setting == "runs" else evidence_copy.sweep_copy(file)
        name = _run_name(copy) if setting == "runs" else _sweep_name(copy)
        if name in found:
            raise UserError(f"{setting}: {places[name]} and {file} are both {name}; give one of them, or let them differ in name=... or seed=...")
        found[name], places[name] = copy, file
    return found


def _run_name(copy: dict[str, Any]) -> str:
    seed = copy["made"]["seed"]
    return _slug(copy["experiment"] if seed is None else f"{copy['experiment']}-{seed}")


def _sweep_name(copy: dict[str, Any]) -> str:
    settings = dict(text.split("=", 1) for text in copy["shared"] if "=" in text)
    parts = [settings.get("name") or settings.get("experiment") or copy["paper"], settings.get("seed")]
    return _slug("-".join(part for part in parts if part))


def _slug(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name).strip("-")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
