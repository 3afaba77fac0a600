"""Work that one rank does for all of them, without leaving the others in a hang when it fails."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from tasks.stage import UserError

T = TypeVar("T")
PATIENCE = timedelta(hours=6)  # for what rank 0 does alone: a probe, or weights on slow storage; a rank that dies is noticed at once


def control_group() -> Any:
    """A gloo group of all ranks beside the training's own: no GPU waits in it, and no watchdog counts. Collective on the first call."""
    import torch.distributed as dist

    return _control_group_of(dist.group.WORLD)


@functools.cache
def _control_group_of(world: Any) -> Any:
    import torch.distributed as dist

    return dist.new_group(backend="gloo", timeout=PATIENCE)


def on_rank_zero(work: Callable[[], T], *, rank: int, workers: int) -> T:
    """Rank 0 runs `work`; what it returns, small and picklable, is returned on every rank, and an error there is raised on every rank.

    Collective: every rank calls it, whatever its own state (the peers wait inside a broadcast, so a rank-0 error that nobody hears would
    leave them there: pytorch #138467, SimpleTuner #2902). Raises UserError where rank 0's error was one, else RuntimeError with its text;
    with one worker the error itself.
    """
    if workers == 1:
        return work()
    import torch.distributed as dist

    outcome: list[Any] = [None, None]  # what `work` returned; how it failed, if it did
    failure: BaseException | None = None
    if rank == 0:
        try:
            outcome[0] = work()
        except BaseException as error:  # also a signal's: the peers must not wait for it
            failure = error
            outcome[1] = (isinstance(error, UserError), str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}")
    dist.broadcast_object_list(outcome, src=0, group=control_group())
    if failure is not None and not isinstance(failure, Exception):
        raise failure
    if outcome[1] is not None:
        of_the_user, text = outcome[1]
        raise (UserError(text) if of_the_user else RuntimeError(f"rank 0 failed: {text}")) from failure
    return outcome[0]
