"""The collector that a worker uses: a model, loaded once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jacobi_core.trajectories.quality import failed_tests
from tasks.artifacts import Prompt
from tasks.generate_trajectories.config import GenerateTrajectoriesConfig
from tasks.generate_trajectories.worker import Collector

if TYPE_CHECKING:
    from jacobi_core.trajectories.collect import Collected


@dataclass(frozen=True)
class ModelCollector:
    """Picklable; calling it loads the model and returns the collector."""

    model: str  # folder of a checkpoint
    trust_remote_code: bool
    config: GenerateTrajectoriesConfig

    def __call__(self) -> Collector:
        import torch

        from jacobi_core.decoding.tokens import TokenRules
        from jacobi_core.hub import load_model, load_tokenizer
        from jacobi_core.trajectories.collect import Collected, collect

        c = self.config
        model = load_model(self.model, dtype=c.dtype, trust_remote_code=self.trust_remote_code)
        rules = TokenRules.of(model, load_tokenizer(self.model, trust_remote_code=self.trust_remote_code))
        torch.use_deterministic_algorithms(True, warn_only=True)

        def collected(prompts: Sequence[Prompt]) -> Collected:
            failed = {p.id: "failed_tests" for p in prompts if failed_tests(c.quality, p.meta.get("test_score"))}
            asked = [p for p in prompts if p.id not in failed]
            if not asked:
                return Collected([], 0, failed)
            found = collect(
                model,
                [p.input_ids for p in asked],
                [p.id for p in asked],
                block_size=c.block_size,
                max_new_tokens=c.max_new_tokens,
                seed=c.seed,
                rules=rules,
                batch_size=c.batch_size,
                on_disagreement=c.on_disagreement,
                schedule=c.schedule,
                quality=c.quality,
            )
            for trajectory in found.trajectories:
                trajectory.validate()
            return replace(found, dropped=failed | found.dropped)

        return collected
