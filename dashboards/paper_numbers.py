"""What the paper measured in its ablations (Tables 4 and 5), to stand beside a sweep's jobs. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PAPER_BLOCK = 16  # n of the paper's ablation
TABLE4 = {  # (schedule, window) -> (pass@1 in %, iterations per token) of HumanEval, decoding block 256
    ("random", 8): (82.9, 0.53),
    ("random", 16): (83.5, 0.51),
    ("random", 32): (83.5, 0.53),
    ("linear", 8): (84.7, 0.48),
    ("linear", 16): (81.7, 0.46),
    ("linear", 32): (84.1, 0.49),
    ("reverse", 16): (82.9, 0.62),
}
TABLE5 = {"nc": (3.6, 82.3), "nc_ic": (1.9, 82.3)}  # mask -> (speedup, pass@1 in %) of HumanEval on an A100

LEGENDS = {
    "table4": "Paper: its Table 4 (Qwen2.5-Coder-7B, HumanEval, n = 16, decoding block 256; TPF is one over its iterations per token). In brackets "
    "the window there whose blocks step up by as many noisy tokens, n/w, as here: 16 w/n. A dash: the paper has no such cell.",
    "table5": "Paper: its Table 5 (Qwen2.5-Coder-7B, HumanEval, A100), which does not say at which window.",
}


def check_table(table: str | None) -> None:
    """Raises ValueError for a table that is not here."""
    if table is not None and table not in LEGENDS:
        raise ValueError(f"paper={table}: no such table; known: {', '.join(LEGENDS)}")


def paper_cell(table: str | None, config: Mapping[str, Any]) -> dict[str, float | int] | None:
    """The paper's figures of the cell that a pipeline config stands for: `accuracy` (0 to 1), and `tpf` and `window`, or `speedup`.

    Args:
        table: "table4", "table5" or None.
        config: the whole config of the pipeline; its last round counts.

    Returns:
        None where the paper has no such cell. Raises ValueError for an unknown table.
    """
    check_table(table)
    if table == "table4":
        round_ = config["rounds"][-1]
        window = round_["window"] * PAPER_BLOCK / round_["block_size"]
        found = TABLE4.get((round_.get("noise_schedule") or config["noise_schedule"], window))
        return None if found is None else {"accuracy": round(found[0] / 100, 4), "tpf": 1 / found[1], "window": int(window)}
    if table == "table5":
        found = TABLE5.get(config["distill"]["mask"])
        return None if found is None else {"accuracy": round(found[1] / 100, 4), "speedup": found[0]}
    return None
