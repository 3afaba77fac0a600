"""What can be wrong with rows and model together, said before the first step. Reads every token id once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import context_length
from tasks import artifacts
from tasks.packed_files import PACKED, PackedRows, naming_broken_bytes
from tasks.stage import UserError


def check_rows(path: Path, rows: PackedRows, model: PreTrainedModel) -> None:
    """path: of the packed file that `rows` are of. Raises UserError naming the file and the fix."""
    empty = np.flatnonzero(rows.ar_tokens + rows.consistency_tokens == 0)
    if len(empty):
        raise UserError(f"{path}: row {empty[0]} of {len(rows)} holds no token with a loss; recompute the pack stage (force=[...])")
    largest = _largest(path, ("input_ids", "position_ids"))
    vocabulary = model.get_input_embeddings().weight.shape[0]
    if largest["input_ids"] >= vocabulary:
        raise UserError(
            f"{path}: holds token {largest['input_ids']}, the model's vocabulary has {vocabulary}: "
            "its trajectories were made with another tokenizer or model"
        )
    context = context_length(model)
    if context is not None and largest["position_ids"] >= context:
        raise UserError(
            f"{path}: holds a text of {largest['position_ids'] + 1} tokens, the model's context length is {context}: "
            "lower trajectories.max_new_tokens"
        )


def _largest(path: Path, columns: tuple[str, ...]) -> dict[str, int]:
    """Largest value of each list column; holds one piece of the file at a time."""
    file = artifacts.open_table(path, PACKED)
    largest = dict.fromkeys(columns, -1)
    with naming_broken_bytes(path):
        for batch in file.iter_batches(batch_size=256, columns=list(columns)):
            for name in columns:
                found = pc.max(batch[name].flatten()).as_py()
                largest[name] = max(largest[name], -1 if found is None else found)
    return largest
