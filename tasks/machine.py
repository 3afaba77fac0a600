"""What this machine and this source tree are. Only `hardware` imports torch."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def git_sha() -> str:
    """Commit of the source tree this file belongs to; "unknown" for an installed copy, outside git, or before the first commit."""
    here = Path(__file__).resolve()
    git = ["git", "-C", str(here.parent)]
    try:
        # An installed copy may lie inside somebody else's repository: only one that tracks this very file counts.
        subprocess.run([*git, "ls-files", "--error-unmatch", here.name], check=True, capture_output=True)
        return subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def hardware() -> dict[str, Any]:
    """The machine this process computes on, as torch sees it; `gpus` is None without CUDA, memory in GB of 10^9 bytes."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(index) for index in range(count)] or None
    return {**machine(), "gpus": gpus, "torch_threads": torch.get_num_threads()}


def machine() -> dict[str, Any]:
    """The same without torch, for who computes nothing: `gpus` as the driver names them, `torch_threads` None unless they are set."""
    threads = os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS") or ""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9, 1),
        "gpus": gpu_names() or None,
        "torch_threads": int(threads) if threads.isdecimal() else None,
        "platform": platform.platform(),
    }


def gpu_names() -> list[str]:
    """NVIDIA's, as its driver tells them."""
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    return [line.partition(":")[2].strip() for file in files for line in file.read_text().splitlines() if line.startswith("Model")]


def cpu_model() -> str:
    """The processor's name, as the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def threads_sleep() -> bool:
    """Whether OpenMP's threads were asked to sleep while they wait: right where processes share cores, and in decoding a wake-up per product.

    On 2 cores a forward over 2 to 16 tokens of a small model took up to twice as long so, one over a single token as long as ever.
    """
    return os.environ.get("OMP_WAIT_POLICY", "").strip().lower() == "passive"


def multiplies_bfloat16(info: Path = Path("/proc/cpuinfo")) -> bool | None:
    """Whether this machine's processor has instructions for products of bfloat16; None where the system does not tell (no Linux).

    Without them torch computes such products several times as slowly as float32's.
    """
    if not info.exists():
        return None
    named = [line.partition(":")[2].split() for line in info.read_text(encoding="utf-8").splitlines() if line.startswith(("flags", "Features"))]
    return not {"amx_bf16", "avx512_bf16", "bf16"}.isdisjoint(named[0]) if named else None
