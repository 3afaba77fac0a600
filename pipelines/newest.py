"""`outputs/models/NAME`: a link to the last model of the last run called so, whose folder's own name is a hash that nobody can write down."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

log = logging.getLogger(__name__)


def link_newest(model: Path, *, outputs: Path, name: str) -> Path | None:
    """The link, which points to `model` from now on; None where there can be none, which is said: no run fails for want of it."""
    link = outputs / "models" / (re.sub(r"[^\w.-]+", "-", name).strip(".-") or "unnamed")
    if link.exists() and not link.is_symlink():
        log.warning("%s is no link, so it is left alone; the model is in %s", link, model)
        return None
    new = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        new.symlink_to(os.path.relpath(model, link.parent))  # relative: `outputs` may be moved as a whole
        new.replace(link)
    except OSError as error:  # a file system without links
        log.warning("%s cannot be made (%s); the model is in %s", link, error.strerror, model)
        return None
    return link
