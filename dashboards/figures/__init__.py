"""The figures: pure functions from a pandas data frame to a Plotly figure. No files, no layout of pages, no model.

One file per subject. Every function's docstring names the columns it reads; what is shown, and from which file, stands in the figure's caption
(`caption`, `described`). Made to be read in black and white: markers, dashes, patterns and shades differ, the colour only helps. The noise-schedule
ablation's are in `dashboards/sweep_figures.py`.
"""

from dashboards.figures.acceptance import acceptance_shares, accepted_along, accepted_by_position
from dashboards.figures.machine import latency
from dashboards.figures.packed import attention_mask, packed_sequence
from dashboards.figures.results import accuracy_under_parallelism, runs_pareto, speed_accuracy, tpf_by_block_size
from dashboards.figures.style import caption, described
from dashboards.figures.tokens import fits_in_words, probes_by_tokens, tpf_by_tokens
from dashboards.figures.training import probe_curves, training_curves
from dashboards.figures.trajectory import trajectory

__all__ = [
    "acceptance_shares",
    "accepted_along",
    "accepted_by_position",
    "accuracy_under_parallelism",
    "attention_mask",
    "caption",
    "described",
    "fits_in_words",
    "latency",
    "packed_sequence",
    "probe_curves",
    "probes_by_tokens",
    "runs_pareto",
    "speed_accuracy",
    "tpf_by_block_size",
    "tpf_by_tokens",
    "training_curves",
    "trajectory",
]
