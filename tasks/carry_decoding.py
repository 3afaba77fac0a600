"""Stage `final`: the last export once more, decoding by default with the setting that the search found fastest.

The weights are hard links where the file system has them: no second copy, and the search's own input stays as it was.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks import artifacts
from tasks.export_model import PROVENANCE, provenance
from tasks.stage import StageContext

OWN = ("manifest.json", "custom_generate", PROVENANCE, "README.md")  # not taken over as they are


@dataclass
class CarryDecodingConfig:
    """Nothing to set: what is carried is what was searched."""


def run(config: CarryDecodingConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: model (an export), search. Writes the same checkpoint, with decoding.json and the winner in custom_generate/generate.py."""
    from jacobi_core.decoding.checkpoint_generate import generate_file

    found, model = artifacts.read_json(inputs["search"] / "decoding.json"), inputs["model"]
    for file in sorted(p for p in model.rglob("*") if p.is_file() and p.relative_to(model).parts[0] not in OWN):
        target = output / file.relative_to(model)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file, target)
        except OSError:  # another file system, or one without links
            shutil.copy2(file, target)
    (output / "custom_generate").mkdir(exist_ok=True)
    artifacts.write_text(output / "custom_generate" / "generate.py", generate_file(decoding=found["decoding"]))
    artifacts.write_json(output / "decoding.json", found)
    artifacts.write_json(output / PROVENANCE, {**provenance(model), "decoding": found["decoding"]})
    measured = found["measured"]
    artifacts.write_text(
        output / "README.md",
        (model / "README.md").read_text(encoding="utf-8")
        + f"\nBy default it decodes with {found['name']}: the fastest setting found on {measured['hardware']['cpu']} ({measured['device']}, "
        f"{measured['dtype']}), {measured['heldout_speedup']:.2f} times greedy AR there on prompts the search had not seen. Pass other settings to "
        "`generate`, or search again on your machine.\n",
    )
    return {"speedup": measured["speedup"], "heldout_speedup": measured["heldout_speedup"]}
