"""What the paper measured, to stand beside what was measured here: Tables 1 and 2 beside a run, 4 and 5 beside a sweep. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

TABLES12 = {  # our benchmark's name -> (the paper's, the model, {method: (TPF, TPS, speedup, accuracy in %)}); one A100
    "human_eval": (
        "HumanEval",
        "Qwen2.5-Coder-7B-Instruct",
        {
            "AR": (1.00, 41.3, 1.00, 87.8),
            "Jacobi": (1.03, 39.9, 0.97, 87.8),
            "CLLM*": (2.68, 103.3, 2.50, 87.8),
            "Jacobi Forcing": (4.01, 159.5, 3.86, 83.5),
            "Jacobi Forcing (MR)": (4.09, 163.9, 3.97, 83.5),
        },
    ),
    "mbpp": (
        "MBPP",
        "Qwen2.5-Coder-7B-Instruct",
        {
            "AR": (1.00, 43.1, 1.00, 74.3),
            "Jacobi": (1.01, 42.4, 0.98, 74.3),
            "CLLM*": (2.10, 80.1, 1.94, 71.4),
            "Jacobi Forcing": (2.74, 110.7, 2.57, 70.4),
            "Jacobi Forcing (MR)": (2.84, 113.0, 2.62, 70.4),
        },
    ),
    "gsm8k": (
        "GSM8K",
        "Qwen2.5-Math-7B-Instruct",
        {
            "AR": (1.00, 41.8, 1.00, 92.4),
            "Jacobi": (1.05, 42.2, 1.02, 92.4),
            "CLLM*": (2.25, 86.8, 2.08, 92.2),
            "Jacobi Forcing": (3.72, 146.1, 3.50, 91.4),
            "Jacobi Forcing (MR)": (4.04, 154.9, 3.71, 91.4),
        },
    ),
    "math500": (
        "MATH",
        "Qwen2.5-Math-7B-Instruct",
        {
            "AR": (1.00, 41.3, 1.00, 77.0),
            "Jacobi": (1.02, 41.0, 0.99, 77.0),
            "CLLM*": (2.23, 84.4, 2.04, 77.2),
            "Jacobi Forcing": (3.82, 150.7, 3.65, 77.4),
            "Jacobi Forcing (MR)": (3.98, 152.0, 3.68, 77.4),
        },
    ),
}
LEGEND12 = "The paper's own, {models}, one A100; decoding block 128, with MR 64."
_ELSEWHERE = " It measured none of the benchmarks here: its HumanEval is shown for orientation, other models and problems than these."

LEGENDS = {
    "table4": "Paper: its Table 4 (Qwen2.5-Coder-7B, HumanEval, n = 16, decoding block 256; TPF is one over its iterations per token). In brackets "
    "the window there whose blocks step up by as many noisy tokens, n/w, as here: 16 w/n. A dash: the paper has no such cell.",
    "table5": "Paper: its Table 5 (Qwen2.5-Coder-7B, HumanEval, A100), which does not say at which window.",
}


def paper_lines(benchmarks: Sequence[str]) -> tuple[list[dict[str, Any]], str]:
    """Lines `{benchmark, method, tpf, tps, speedup, accuracy}` (accuracy of 0 to 1) of the benchmarks that the paper has too, else of its HumanEval;
    and the sentence that says what they are."""
    measured = [name for name in TABLES12 if name in benchmarks]
    shown = [TABLES12[name] for name in measured or ["human_eval"]]
    lines = [
        {"benchmark": benchmark, "method": method, "tpf": tpf, "tps": tps, "speedup": speedup, "accuracy": round(accuracy / 100, 4)}
        for benchmark, _, methods in shown
        for method, (tpf, tps, speedup, accuracy) in methods.items()
    ]
    models = " and ".join(dict.fromkeys(model for _, model, _ in shown))
    return lines, LEGEND12.format(models=models) + ("" if measured else _ELSEWHERE)


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
