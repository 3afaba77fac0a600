"""`python -m pipelines.tracking replay=outputs/store/.tracking`: send the records that runs could not."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pipelines.arguments import run_tool
from pipelines.tracking.backlog import SUFFIX
from pipelines.tracking.channel import left_behind
from tasks.stage import UserError


@dataclass
class Arguments:
    replay: Annotated[Path, "folder with the records that runs could not send: .tracking in the store"]
    tracking_uri: Annotated[str | None, "the whole address, where it holds credentials: those are not kept with the records"] = None


def replay(arguments: Arguments) -> int:
    folder = arguments.replay.expanduser()
    if not folder.is_dir():
        raise UserError(f"replay={folder}: no such folder")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    files = len(list(folder.glob(f"*{SUFFIX}")))
    channels = list(left_behind(folder, arguments.tracking_uri))
    waiting = sum(channel.backlog.waiting() for channel in channels)
    delivered = [channel.deliver(now=True) for channel in channels]  # all are tried
    arrived = all(delivered)
    print(f"{waiting} waiting records" + (": all are sent" if arrived else ": not all could be sent, see above"))
    if len(channels) < files:
        print(f"{files - len(channels)} of {files} files could not be read, see above; they are left where they are")
    return 0 if arrived and len(channels) == files else 1


if __name__ == "__main__":
    sys.exit(run_tool(sys.argv[1:], Arguments, replay))
