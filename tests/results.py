"""Hand-made results of a run, as the evaluate and distill stages write them."""

import json
from pathlib import Path

MACHINE = {"cpu": "a CPU", "cores": 2, "gpus": [], "torch": "2.13.0+cpu", "torch_threads": 2, "device": "cpu"}  # that speed was measured on


def row(**changes) -> dict:
    values = {
        "model": "base",
        "benchmark": "minicode",
        "method": "jacobi",
        "block_size": 16,
        "batch_size": 1,
        "dtype": "float32",
        "prompts": 32,
        "tokens": 2000,
        "forwards": 2000,
        "seconds": 10.0,
        "tpf": 1.0,
        "tps": 200.0,
        "speedup": 0.9,
        "accuracy": 0.95,
        "accuracy_prompts": 200,
        "train_tokens": 0,
        "stop_reasons": {"eos": 32},
        "equals_ar": 1.0,
    }
    assert changes.keys() <= values.keys()
    return values | changes


def ar_row(**changes) -> dict:
    return row(method="ar", block_size=1, speedup=1.0) | changes


def trained_row(model: str, block_size: int, tpf: float, **changes) -> dict:
    return row(model=model, block_size=block_size, tpf=tpf, forwards=round(2000 / tpf), speedup=0.6 * tpf, train_tokens=1_500_000, **changes)


def write_evaluation(folder: Path, model: str, rows: list[dict], **changes) -> Path:
    """A folder with `evaluation.json`."""
    sample = {"problem_id": "minicode/7", "prompt": "Write f.", "ar": "def f(): return 1", "jacobi": "def f(): return 1"}
    sample |= {"judged_by": "tests", "passed": True}
    evaluation = {
        "model": model,
        "benchmark": rows[0]["benchmark"],
        "model_path": "models/x",
        "machine": MACHINE,
        "rows": rows,
        "differences": [],
        "samples": [sample],
        "accepted_lengths": {"jacobi@16": {"1": 10, "4": 3}},
    } | changes
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    return folder


def write_training(folder: Path) -> Path:
    """A folder with `training.json`."""
    curves = [
        {"step": step, "loss": 3.0 / step, "consistency": 2.0 / step, "ar": 0.1, "learning_rate": 1e-4, "tokens": 1000 * step} for step in (1, 2, 3)
    ]
    folder.mkdir(parents=True)
    (folder / "training.json").write_text(json.dumps({"curves": curves, "train_tokens": 3000, "seconds": 4.0}))
    return folder
