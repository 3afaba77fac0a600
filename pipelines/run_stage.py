"""`python -m pipelines.run_stage STAGE [experiment=NAME] [overrides]`: one stage of a pipeline alone, with the same config as `full_run`.

What it reads must be finished in the store (paths.store), by an earlier run of the same settings or by this command; where it is not, the
error names it and the commands that make it. A stage that is finished is shown as cached; force=[STAGE] recomputes it. The stages' names:
`python -m pipelines.full_run [overrides] dry_run=true`. Exit codes as there.
"""

from __future__ import annotations

import sys

from pipelines import full_run


def main() -> int:
    stage, *overrides = sys.argv[1:] or ["--help"]
    if stage in ("-h", "--help"):
        print(__doc__)
        return 0
    if "=" in stage or stage.startswith("-"):
        print(f"error: the first argument is the stage to run, got {stage!r}; as in: python -m pipelines.run_stage base {stage}", file=sys.stderr)
        return 2
    sys.argv[1:] = overrides
    return full_run.main(only=stage)


if __name__ == "__main__":
    sys.exit(main())
