"""The greedy answers that accuracy rests on, part by part: in this process, or on Ray actors that each hold the model.

A part that exists is whole (written under another name, synced, renamed), so any worker may repeat any part at any time.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts import PromptRows
from tasks.completion_files import Completion, part_file, write_completions
from tasks.evaluate.config import AnswersConfig
from tasks.evaluate.loops import is_degenerate
from tasks.stage import StageContext, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from jacobi_core.decoding.tokens import TokenRules

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AnswerJob:
    """All that a worker needs; picklable."""

    config: AnswersConfig
    prompts: Path
    model: Path
    output: Path
    trust_remote_code: bool
    count: int  # prompts in all

    def missing(self) -> list[int]:
        size = self.config.part_size
        return [part for part in range(-(-self.count // size)) if not part_file(self.output, "answers", part).exists()]


def load(folder: Path, dtype: str, *, trust_remote_code: bool) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, TokenRules]:
    """What decodes: a checkpoint's model, its tokenizer and its rules."""
    from jacobi_core.decoding.tokens import TokenRules
    from jacobi_core.hub import load_model, load_tokenizer

    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    model = load_model(folder, dtype=dtype, trust_remote_code=trust_remote_code)
    return model, tokenizer, TokenRules.of(model, tokenizer)


class AnswerWorker:
    """Turns part numbers into files."""

    def __init__(self, job: AnswerJob) -> None:
        self.job, self._rows = job, PromptRows(job.prompts, job.config.split)
        self._model, self._tokenizer, self._rules = load(job.model, job.config.dtype, trust_remote_code=job.trust_remote_code)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        """batch: {"part": [number]}. Returns it with the number of its answers."""
        part = int(batch["part"][0])
        return {"part": [part], "answers": [self.write(part)]}

    def write(self, part: int) -> int:
        from jacobi_core.decoding.greedy_batch import greedy_batch

        config = self.job.config
        prompts = self._rows.read(range(part * config.part_size, min((part + 1) * config.part_size, self.job.count)))
        ids = [p.input_ids for p in prompts]
        found = greedy_batch(self._model, ids, max_new_tokens=config.max_new_tokens, rules=self._rules, slots=config.batch_size)
        completions = [
            Completion(
                id=prompt.id,
                method="ar",
                block_size=1,
                batch_size=config.batch_size,
                batch=part,
                prompt_tokens=len(prompt.input_ids),
                tokens=answer.tokens.tolist(),
                text=self._tokenizer.decode(answer.tokens, skip_special_tokens=True),
                stop_reason=answer.stop_reason,
                forwards=len(answer.tokens),
                accepted_lengths=[1] * len(answer.tokens),
                degenerate=is_degenerate(answer.tokens.tolist(), config.loop_tokens),
            )
            for prompt, answer in zip(prompts, found, strict=True)
        ]
        write_completions(part_file(self.job.output, "answers", part), completions, metadata={"device": str(self._model.device)})
        return len(completions)


def answer_here(job: AnswerJob, parts: Sequence[int]) -> None:
    """These parts, in this process."""
    worker = AnswerWorker(job)
    for part in parts:
        worker.write(part)
        log.info("evaluate: %d/%d greedy answers", min((part + 1) * job.config.part_size, job.count), job.count)


def answer_on_ray(job: AnswerJob, parts: Sequence[int], context: StageContext) -> None:
    """These parts, by cluster.workers actors. Raises a worker's UserError as it is."""
    from tasks.cluster import start_ray

    start_ray(context.cluster)
    import ray

    cluster = context.cluster
    workers = min(cluster.workers, len(parts))
    rows = ray.data.from_items([{"part": i} for i in parts], override_num_blocks=len(parts)).map_batches(
        AnswerWorker,
        fn_constructor_kwargs={"job": job},
        compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=2),
        batch_size=1,
        num_cpus=cluster.cpus_per_worker,
        num_gpus=cluster.gpus_per_worker,
    )
    done = 0
    try:
        for row in rows.iter_rows():
            done += row["answers"]
            log.info("evaluate: %d more greedy answers, %d prompts in all", done, job.count)
    except Exception as error:  # Ray passes on no more of a worker's error than its text, in a traceback
        told = re.findall(r"\bUserError: (.+)", str(error))
        raise (UserError(told[-1]) if told else error) from error
