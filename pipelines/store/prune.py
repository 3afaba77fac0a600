"""Making room in a store: by age, by size, never what a run uses (`uses` says what that is)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipelines.store.disk import Entry, Store
from pipelines.store.uses import recorded

DAY = 86400.0


@dataclass
class Pruned:
    """What went, or would go."""

    gone: list[tuple[Entry, str]] = field(default_factory=list)  # and why
    busy: list[Entry] = field(default_factory=list)  # would have gone, but a run had just taken it
    needed: list[Entry] = field(default_factory=list)  # would have gone, but a run needs it
    size: int = 0  # bytes that are left


def prune(store: Store, *, older_than: float | None, max_size: int | None, left_over_after: float = DAY, dry_run: bool = False) -> Pruned:
    """Removes what no run has written or used for `older_than` seconds, then the least recently used until `max_size` bytes are left.

    What interrupted uploads and deletions left goes `left_over_after` seconds after it was last written; until then it may be an upload
    that is still going on. What a run needs stays, even where the store then remains larger than `max_size`.
    """
    entries = store.entries()
    needed, used = _needed_and_used(store)
    idle = {entry.name: min(entry.age, used.get(entry.name, entry.age)) for entry in entries}
    found = Pruned(size=sum(entry.size for entry in entries))

    def go(entry: Entry, why: str) -> None:
        if entry.name in needed:
            found.needed.append(entry)
        elif dry_run or _remove(store, entry):
            found.gone.append((entry, why))
            found.size -= entry.size
        else:
            found.busy.append(entry)

    kept = []
    for entry in entries:
        if entry.state == "computing":
            continue
        if entry.state == "left over":
            if entry.age > left_over_after:
                go(entry, "left over")
        elif older_than is not None and idle[entry.name] > older_than:
            go(entry, "age")
        else:
            kept.append(entry)
    for entry in sorted(kept, key=lambda entry: -idle[entry.name]):
        if max_size is None or found.size <= max_size:
            break
        go(entry, "size")
    if not dry_run:
        _drop_records(store, {entry.name for entry in entries} - {entry.name for entry, _ in found.gone})
    return found


def _remove(store: Store, entry: Entry) -> bool:
    needed, _ = _needed_and_used(store)  # again: a run may have begun since
    return entry.name not in needed and store.remove(entry)


def _needed_and_used(store: Store) -> tuple[set[str], dict[str, float]]:
    """Names that must stay; name -> seconds since a run last used it."""
    needed: set[str] = set()
    used: dict[str, float] = {}
    for use, age in recorded(store).values():
        needed |= use.needed(age)
        for name in use.stages.values():
            used[name] = min(age, used.get(name, age))
    return needed, used


def _drop_records(store: Store, there: set[str]) -> None:
    """Of runs that have ended and of which nothing is left."""
    for name, (use, age) in recorded(store).items():
        if not use.is_running(age) and not there & set(use.stages.values()):
            store.drop_note(name)
