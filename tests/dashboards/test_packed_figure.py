"""A packed row drawn: its segments, their noise and losses, and the mask that training uses."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from dashboards.figures import attention_mask, caption, packed_sequence
from dashboards.figures.packed import segments
from dashboards.stored import Packed
from dashboards.views.packed import _visible
from jacobi_core import dense_mask
from jacobi_core.distillation.attention_variant import MaskVariant
from tasks.packed_files import PackedRows
from tests.dashboards.made_store import Made

TOKENS = pd.DataFrame(
    [(0, 0, -1, -1, p, 9, "p", -100, -1) for p in (0, 1)]
    + [(0, 1, 0, 0, 2 + i, token, "n", -100, 6 + i if i else -1) for i, token in enumerate((5, 1, 1))]
    + [(0, 2, 0, 0, 2 + i, token, "c", label, -1) for i, (token, label) in enumerate(((5, 6), (6, 7), (7, -100)))]
    + [(1, 0, -1, -1, 0, 9, "p", -100, -1)],
    columns=["sample", "kind", "block", "window", "position", "id", "text", "label", "teacher"],
)


def test_segments_know_their_noise_and_losses():
    found = segments(TOKENS)
    assert found[["sample", "kind", "block", "start", "length"]].values.tolist() == [
        [0, 0, -1, 0, 2],
        [0, 1, 0, 2, 3],
        [0, 2, 0, 5, 3],
        [1, 0, -1, 8, 1],
    ]
    assert found["noise"].fillna(-1).round(3).tolist() == [-1, 0.667, -1, -1]
    assert found["consistency"].tolist() == [0, 2, 0, 0] and found["ar"].tolist() == [0, 0, 2, 0]
    assert found["positions"].tolist() == ["0-1", "2-4", "2-4", "0-0"]


def test_the_row_is_drawn_in_its_order_and_kinds_are_told_apart_without_colour():
    figure = packed_sequence(TOKENS)
    assert [(trace.name, list(trace.base), list(trace.x)) for trace in figure.data] == [
        ("prompt", [0, 8], [2, 1]),
        ("noisy block", [2], [3]),
        ("clean block", [5], [3]),
    ]
    assert list(figure.data[0].y) == ["sample 0", "sample 1"] and figure.data[1].marker.pattern.shape == "/"
    assert "noise ratio 0.67" in figure.data[1].customdata[0] and "consistency on 2" in figure.data[1].customdata[0]
    assert "9 tokens: 2 samples, 2 tokens under the consistency loss, 2 under the AR loss" in caption(figure)


def test_the_mask_drawn_is_the_mask_of_training(made: Made):
    folder = made.stage("round1/pack")
    tokens = Packed.read(folder).tokens(0, None)
    batch = next(iter(PackedRows(folder / "packed.parquet").read([0])))
    batch = type(batch)(**{name: value[None] for name, value in vars(batch).items()})
    drawn = {}
    for variant in MaskVariant:
        seen = _visible(tokens, variant.value)
        np.testing.assert_array_equal(seen, dense_mask(batch, variant)[0, 0].numpy())
        drawn[variant] = attention_mask(tokens, seen).data[0].z
    assert torch.tensor(drawn[MaskVariant.nc] != drawn[MaskVariant.nc_ic]).any()  # windows of two blocks: the masks differ


def test_the_masks_axes_name_segments_that_are_wide_enough():
    figure = attention_mask(TOKENS, np.eye(len(TOKENS), dtype=bool))
    assert list(figure.layout.xaxis.ticktext) == ["P", "N0", "C0", "P"] and list(figure.layout.xaxis.tickvals) == [0.5, 3.0, 6.0, 8.0]
    long = pd.concat([TOKENS.iloc[:1].assign(position=p) for p in range(100)] + [TOKENS.iloc[2:]])
    assert list(attention_mask(long, np.eye(len(long), dtype=bool)).layout.xaxis.ticktext) == ["P", "", "", ""]
