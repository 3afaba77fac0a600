"""Which run needs which stages: a record per pipeline run in the store, so that `prune` takes nothing that is needed.

A run needs all its stages while it runs. Once it has finished it needs its results: the stages that no other stage of it reads (the
report), and what these read directly (scores, the final model). Delete the run's folder, and its results are needed no longer.
A run that failed or was killed needs nothing: what it left is kept by age alone. Knows nothing of stages but their folders' names.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pipelines.process import identity, is_gone
from pipelines.store.claim import boot, me

if TYPE_CHECKING:
    from pipelines.store.disk import Store

BEAT = 60.0  # seconds between two signs of life of a running run
EXPIRY = 900.0  # seconds without one after which a run on another machine counts as dead

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Use:
    """One run's record."""

    run: str  # its name and the folder of its log and results
    folder: str
    owner: Mapping[str, str]  # `claim.me()`
    stages: Mapping[str, str]  # stage id -> name of its folder in the store
    results: list[str] = field(default_factory=list)  # names of those folders that a finished run still needs
    state: str = "running"  # then "finished" or "stopped"

    def is_running(self, age: float) -> bool:
        """age: seconds since the record was last written."""
        if self.state != "running":
            return False
        if self.is_of_this_machine:
            return not is_gone(self.owner)
        return age < EXPIRY

    @property
    def is_of_this_machine(self) -> bool:
        return self.owner.get("boot") == boot() and self.owner.get("process.host") == identity()["process.host"]

    def needed(self, age: float) -> set[str]:
        """Names of folders that must stay."""
        if self.is_running(age):
            return set(self.stages.values())
        kept = self.state == "finished" and not self.is_forgotten
        return set(self.results) if kept else set()

    @property
    def is_forgotten(self) -> bool:
        """Whether the run's folder is gone, seen from the host where it was: another may have no such path at all."""
        same_host = self.owner.get("process.host", "?").split()[0] == identity()["process.host"].split()[0]
        return same_host and not Path(self.folder).exists()


@contextmanager
def in_use(store: Store, *, run: str, folder: Path, stages: Mapping[str, str], results: list[str]) -> Iterator[None]:
    """Records what a run uses while the block lasts, and what it needs afterwards. A record that cannot be written costs a warning."""
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}.json"
    use = Use(run=run, folder=str(folder), owner=me(), stages=dict(stages), results=sorted(set(results)))
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(BEAT):
            _write(store, name, use)

    _write(store, name, use)
    thread = threading.Thread(target=beat, name="use of the store", daemon=True)
    thread.start()
    state = "stopped"
    try:
        yield
        state = "finished"
    finally:
        ended.set()
        thread.join()
        _write(store, name, Use(**{**asdict(use), "state": state}))


def results_of(inputs: Mapping[str, list[str]], folders: Mapping[str, str]) -> list[str]:
    """Folders of the stages that no other reads, and of what these read. inputs: stage id -> ids of the stages that it reads."""
    read = {source for sources in inputs.values() for source in sources}
    last = [stage for stage in inputs if stage not in read]
    return sorted({folders[stage] for stage in [*last, *(source for stage in last for source in inputs[stage])]})


def recorded(store: Store) -> dict[str, tuple[Use, float]]:
    """Record name -> what it says and its age in seconds. One that cannot be read is left out."""
    found = {}
    for name, (text, age) in store.notes().items():
        try:
            found[name] = (Use(**json.loads(text)), age)
        except (ValueError, TypeError):
            log.warning("the record %s of a run cannot be read", name)
    return found


def _write(store: Store, name: str, use: Use) -> None:
    try:
        store.write_note(name, json.dumps(asdict(use), indent=1))
    except OSError as error:
        log.warning("which stages this run uses is not recorded in the store (%s): a `prune` meanwhile could take them", error)
