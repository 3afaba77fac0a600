"""`python -m pipelines.store COMMAND [key=value ...]`: what lies in a store, why a stage is not cached, making room, checking all of it.

    list                            every stage folder: state, size, age, which runs use it
    explain ID|FOLDER [OVERRIDES]   why a stage of this config is not cached: which field differs from the nearest one that is
    prune older_than=30d max_size=20GB dry_run=true
                                    make room, least recently used first, never what a run uses
    verify                          read every byte of every finished output; exit code 1 where one is damaged

`COMMAND help` lists its settings. All but `explain`, which reads the config, take store=URI (a folder by default).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipelines.arguments import HELP, run_tool
from pipelines.credentials import redacted
from pipelines.store import Store, open_store
from pipelines.store.inventory import age_of, age_text, aligned, size_of, size_text, table
from tasks.stage import UserError

STORE, WORK = "outputs/store", "outputs/work"  # as in paths


@dataclass
class ListArguments:
    """What lies in a store, one line per stage folder."""

    store: Annotated[str, "folder or URI, as in paths.store"] = STORE
    work: Annotated[str, "local folder of a store on object storage, as in paths.work"] = WORK


@dataclass
class VerifyArguments(ListArguments):
    """Reads every byte of every finished output. A damaged one is computed again by the next run that needs it."""


@dataclass
class PruneArguments(ListArguments):
    """Makes room. What a running pipeline uses stays, and so do a finished one's results until its run folder is deleted."""

    older_than: Annotated[str | None, "remove what no run has used for so long: 30d, 12h"] = None
    max_size: Annotated[str | None, "then the least recently used until so much is left: 20GB, 500MB"] = None
    left_over_after: Annotated[str, "remove what interrupted uploads and deletions left, after so long"] = "1d"
    dry_run: Annotated[bool, "only show what would go"] = False


def main(argv: Sequence[str]) -> int:
    """Exit code."""
    command, rest = (argv[0], argv[1:]) if argv else ("help", [])
    if command in HELP:
        print(__doc__)
        return 0
    if command == "list":
        return run_tool(rest, ListArguments, _list)
    if command == "verify":
        return run_tool(rest, VerifyArguments, _verify)
    if command == "prune":
        return run_tool(rest, PruneArguments, _prune)
    if command == "explain":
        return _explain(rest)
    print(f"error: {command}: no such command; there are list, explain, prune and verify", file=sys.stderr)
    return 2


def _open(arguments: ListArguments, *, read_only: bool) -> Store:
    if "://" not in arguments.store and not Path(arguments.store).is_dir():
        raise UserError(f"store={arguments.store}: no such folder; give store=..., as in paths.store")
    return open_store(arguments.store, work=Path(arguments.work), setting="store", read_only=read_only)


def _list(arguments: ListArguments) -> int:
    print("\n".join(table(_open(arguments, read_only=True))))
    return 0


def _verify(arguments: VerifyArguments) -> int:
    store = _open(arguments, read_only=True)
    finished = [entry for entry in store.entries() if entry.manifest is not None]
    damaged = 0
    for entry in finished:
        wrong = store.verify(store.root / entry.name)
        damaged += wrong is not None
        unhashed = "" if entry.manifest.hashes or not entry.manifest.files else " (sizes only: written before there were hashes)"
        print(f"{entry.name}: {wrong or 'whole' + unhashed}", flush=True)
    print(f"{len(finished) - damaged} whole, {damaged} damaged")
    return 1 if damaged else 0


def _prune(arguments: PruneArguments) -> int:
    from pipelines.store.prune import prune

    older_than = _measure("older_than", arguments.older_than, age_of)
    max_size = _measure("max_size", arguments.max_size, size_of)
    left_over_after = _measure("left_over_after", arguments.left_over_after, age_of)
    store = _open(arguments, read_only=arguments.dry_run)
    done = prune(store, older_than=older_than, max_size=max_size, left_over_after=left_over_after, dry_run=arguments.dry_run)
    rows = [("would go" if arguments.dry_run else "gone", entry.name, size_text(entry.size), age_text(entry.age), why) for entry, why in done.gone]
    rows += [("kept", entry.name, size_text(entry.size), age_text(entry.age), "a run needs it") for entry in done.needed]
    rows += [("kept", entry.name, size_text(entry.size), age_text(entry.age), "a run is at work in it") for entry in done.busy]
    if rows:
        print("\n".join(aligned(rows)))
    freed = sum(entry.size for entry, _ in done.gone)
    print(f"{size_text(freed)} {'would be freed' if arguments.dry_run else 'freed'}, {size_text(done.size)} left")
    if max_size is not None and done.size > max_size:
        print(f"max_size={arguments.max_size} is not reached: runs need the rest; deleting a run's folder lets go of its results")
    return 0


def _measure(name: str, text: str | None, read: type | object) -> float | None:
    if text is None:
        return None
    try:
        return read(text)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _explain(argv: Sequence[str]) -> int:
    """Its settings are a pipeline's: composed as `full_run` does it."""
    if not argv or HELP & set(argv):
        print("explain ID|FOLDER [experiment=NAME] [overrides of pipelines.full_run]: why this stage is not cached")
        return 0 if argv else 2
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from pipelines.config import schema
    from pipelines.config.composing import composing_mistakes
    from pipelines.stages import build_graph
    from pipelines.store.explain import explain

    schema.register()
    try:
        with initialize_config_module("conf", version_base="1.3"):
            config = schema.build(compose("config", list(argv[1:])))
        paths = config.paths
        store = open_store(paths.store, work=Path(paths.work or Path(paths.outputs, "work")), read_only=True)
        print("\n".join(explain(argv[0], build_graph(config, identity_cache=store.root), store)))
        return 0
    except (HydraException, OmegaConfBaseException) as error:
        mistakes = composing_mistakes(argv[1:], error)
    except UserError as error:
        mistakes = str(error).splitlines()
    print("\n".join(f"error: {redacted(mistake)}" for mistake in mistakes), file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
