"""lm-eval's command line with our model and our tasks added to its own:

    python -m tasks.problem_sets.lm_eval_cli --model jacobi --model_args pretrained=DIR,block_size=64 --tasks jacobi_gsm8k \\
        --metadata '{"data_files": {"gsm8k": "test.jsonl"}}' --apply_chat_template

Everything else is lm-eval's, `ls tasks` and `--include_path` of your own among it. Code tasks need --confirm_run_unsafe_code.
"""

from __future__ import annotations

import sys

from tasks.problem_sets.harness import YAML_FOLDER, register
from tasks.stage import UserError


def main() -> None:
    """Reads sys.argv, as lm-eval does."""
    register()
    from lm_eval._cli import HarnessCLI
    from lm_eval.utils import setup_logging

    setup_logging()
    command = HarnessCLI()
    arguments = command.parse_args()
    own = [arguments.include_path] if getattr(arguments, "include_path", None) else []
    arguments.include_path = [str(YAML_FOLDER), *own]
    command.execute(arguments)


if __name__ == "__main__":
    try:
        main()
    except UserError as mistake:
        sys.exit(str(mistake))
