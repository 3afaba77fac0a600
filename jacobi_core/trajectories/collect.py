"""Trajectories of many prompts at once: greedy answers in refilled slots, then the Jacobi states of all blocks of many answers together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.greedy_batch import GreedyAnswer, greedy_batch
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.distillation.noise_schedule import NoiseSchedule, nearest_state, target_count, target_ratios
from jacobi_core.trajectories.blocks import BlockIteration, CleanTexts
from jacobi_core.trajectories.disagreement import OnDisagreement
from jacobi_core.trajectories.quality import QualityRules, drop_reason
from jacobi_core.trajectories.record import Trajectory, converged_prefix

# answer tokens that iterate together: enough to keep forwards busy to the end, few enough that caches and logits stay small
CPU_TOKENS, GPU_TOKENS = 2048, 16384


@dataclass(frozen=True)
class Collected:
    """disagreements: answer tokens that the teacher-forced forward did not predict again (0 in fp64; near-ties else).

    dropped: prompt id -> why its answer has no trajectory, one of `quality.REASONS`.
    """

    trajectories: list[Trajectory]
    disagreements: int
    dropped: dict[int, str]


@torch.inference_mode()
def collect(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    prompt_ids: Sequence[int],
    *,
    block_size: int,
    max_new_tokens: int,
    seed: int,
    rules: TokenRules,
    batch_size: int = 64,
    on_disagreement: OnDisagreement = OnDisagreement.keep,
    schedule: NoiseSchedule | None = None,
    quality: QualityRules | None = None,
) -> Collected:
    """Greedy answers and their Jacobi states, in the order of the prompts. prompts: token ids; prompt_ids: the stable id of each, keys its first
    guesses; batch_size: answers decoded together; schedule: only the state it trains on and the fixed point of each block (default: all states);
    quality: answers that break a rule are dropped before their states are computed (default: none is).

    In fp64 equal to decoding each prompt alone, block by block. Raises ValueError for an empty prompt, one that does not fit
    the context, or block_size < 1.
    """
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    texts = [torch.as_tensor(p) for p in prompts]
    answers = greedy_batch(model, prompts, slots=batch_size, max_new_tokens=max_new_tokens, rules=rules)
    judged = [_judge(quality, answer, rules) for answer in answers]
    dropped = {prompt_ids[r]: reason for r, reason in enumerate(judged) if reason}
    found: dict[int, Trajectory] = {}
    disagreements = 0
    good = {r: (len(answers[r].tokens), len(prompts[r])) for r, reason in enumerate(judged) if not reason}
    for rows in _groups(good, CPU_TOKENS if model.device.type == "cpu" else GPU_TOKENS):
        clean = CleanTexts(model, [texts[r] for r in rows], [answers[r].tokens for r in rows])
        disagreements += clean.disagreements
        if clean.disagreements and on_disagreement is OnDisagreement.cut:
            for r, agreed in zip(rows, clean.agreed_B.tolist(), strict=True):
                if agreed < len(answers[r].tokens):
                    answers[r] = GreedyAnswer(answers[r].tokens[:agreed], "cut")
            dropped |= {prompt_ids[r]: "empty" for r in rows if not len(answers[r].tokens)}
            rows = [r for r in rows if len(answers[r].tokens)]
            if not rows:
                continue
            clean = CleanTexts(model, [texts[r] for r in rows], [answers[r].tokens for r in rows])
        ids = [prompt_ids[r] for r in rows]
        targets = _targets(schedule, ids, clean.answer_B.tolist(), block_size) if schedule else None
        iteration = BlockIteration(clean, ids, block_size=block_size, seed=seed, rules=rules, targets=targets)
        iteration.run()
        for i, r in enumerate(rows):
            states = iteration.states_of(i)
            if targets:
                states = [_scheduled(s, f, t) for s, f, t in zip(states, answers[r].tokens.split(block_size), targets[i], strict=True)]
            found[r] = Trajectory(prompt_ids[r], texts[r], answers[r].tokens, answers[r].stop_reason, block_size, states)
    return Collected([found[r] for r in sorted(found)], disagreements, dropped)


def _judge(quality: QualityRules | None, answer: GreedyAnswer, rules: TokenRules) -> str | None:
    if quality is None:
        return None
    return drop_reason(quality, answer.tokens.tolist(), ended=answer.stop_reason == "eos", eos_ids=rules.eos_ids)


def _targets(schedule: NoiseSchedule, ids: Sequence[int], lengths: Sequence[int], n: int) -> list[list[int]]:
    """Per answer and block, how many unconverged tokens the schedule asks for."""
    targets = []
    for sample, length in zip(ids, lengths, strict=True):
        ratios = target_ratios(schedule, num_blocks=-(-length // n), block_size=n, sample_id=sample)
        targets.append([target_count(ratio, min(n, length - i * n), schedule.rounding) for i, ratio in enumerate(ratios)])
    return targets


def _scheduled(states: torch.Tensor, fixed: torch.Tensor, target: int) -> torch.Tensor:
    """The state that packing would choose among all, and the fixed point. Later states than the given ones are further from the target."""
    unconverged = len(fixed) - converged_prefix(states, fixed)
    chosen = nearest_state(unconverged.tolist(), target)
    return torch.stack([states[chosen], fixed]) if unconverged[chosen] else fixed.unsqueeze(0)


def _groups(lengths: Mapping[int, tuple[int, int]], tokens: int) -> list[list[int]]:
    """Rows of alike answers, longest first; a group has about `tokens` answer tokens, and at least one row. lengths: row -> of answer, prompt."""
    order = sorted(lengths, key=lambda r: lengths[r], reverse=True)
    groups: list[list[int]] = []
    for r in order:
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]][0] > tokens:
            groups.append([])
        groups[-1].append(r)
    return groups
