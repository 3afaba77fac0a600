"""A noise schedule that is a user's own function: tried before anything runs, and known by its source, so that an edit packs again."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path

from jacobi_core.distillation.noise_schedule import NoiseSchedule, ScheduleError, is_own, load_own, target_ratios
from tasks.stage import UserError

TRIED_BLOCKS = (1, 2, 7, 64)  # answers of as many blocks


def schedule_identity(schedule: NoiseSchedule, block_size: int) -> dict[str, str]:
    """External input of a stage that uses the schedule; nothing for a built-in one, which its settings name in full.

    Raises UserError where the function cannot be imported, has no source file or does not give what it must.
    """
    if not is_own(schedule.kind):
        return {}
    try:
        function = load_own(schedule.kind)
        for num_blocks in TRIED_BLOCKS:
            target_ratios(schedule, num_blocks=num_blocks, block_size=block_size, sample_id=0)
    except ScheduleError as error:
        raise UserError(str(error)) from error
    try:
        return {"noise_schedule_sha256": _source_sha256(function)}
    except (TypeError, OSError) as error:
        raise UserError(f"noise_schedule={schedule.kind}: no source file, so a change of it would go unnoticed; write it as a function") from error


@functools.cache  # an edit while a sweep runs must not change the name of what the code imported before it computes
def _source_sha256(function: Callable) -> str:
    """Of the whole file: what the function calls mostly stands beside it."""
    return hashlib.sha256(Path(inspect.getfile(inspect.unwrap(function))).read_bytes()).hexdigest()
