"""Where finished stages live, on a disk, NFS or object storage, and what is known about them. docs/store.md says it in words.

Rooms: `manifest` (what a stage is named by and says of itself), `claim` (one run computes, others wait), `disk` and `objects` (the two
kinds of store), `uri` (which of them a `paths.store` means), `uses` (which runs need what), `inventory`, `explain` and `prune` (the
tool, `python -m pipelines.store`). Knows neither the order of stages nor MLflow; imports pyarrow only for object storage.
"""

from pipelines.store.claim import ClaimLost
from pipelines.store.disk import Store
from pipelines.store.files import Damaged
from pipelines.store.manifest import MANIFEST, Manifest, fingerprint, git_sha, plain
from pipelines.store.uri import open_store

__all__ = ["MANIFEST", "ClaimLost", "Damaged", "Manifest", "Store", "fingerprint", "git_sha", "open_store", "plain"]
