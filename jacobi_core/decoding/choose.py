"""From logits to a token: argmax, or a sample whose randomness belongs to the position and not to the forward.

Sampling is Gumbel-max with noise keyed by (seed, prompt id, answer position): draft and verification see the same noise, so parallel
decoding returns, token for token, what the AR sampler with that noise returns, and its distribution is the AR sampler's
(users' reports U13, L6). Logits processors run on each position's own prefix.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList, MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.drafts import keyed_hash

log = logging.getLogger(__name__)
_PREFIX_FREE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # work on all positions at once
_STATEFUL = {  # remember what they saw call by call: a position refreshed twice would be seen twice
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "WatermarkLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "WhisperNoSpeechDetection",
    "DiaClassifierFreeGuidanceLogitsProcessor",
}


def warpers(config: DecodingConfig) -> LogitsProcessorList:
    """transformers' own warpers for temperature, top-k, top-p and min-p, in transformers' order."""
    found = LogitsProcessorList()
    if config.temperature not in (0.0, 1.0):
        found.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        found.append(TopKLogitsWarper(config.top_k))
    if config.top_p < 1.0:
        found.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        found.append(MinPLogitsWarper(config.min_p))
    return found


class Chooser:
    """Scores the tokens at every position of a forward: the highest is chosen. Raises ValueError, by name, for a processor that keeps state."""

    def __init__(self, processors: LogitsProcessorList, *, sample: bool, seed: int, prompt_id: int) -> None:
        names = [type(p).__name__ for p in processors]
        stateful = [name for name in names if name in _STATEFUL]
        if stateful:
            raise ValueError(f"{', '.join(stateful)}: keeps state from call to call and cannot be used with parallel decoding")
        self.processors, self.sample = processors, sample
        self.needs_prefix = not all(isinstance(p, _PREFIX_FREE) for p in processors)
        if self.needs_prefix:
            log.info("slow path: %s run position by position, each on its own prefix", ", ".join(names))
        self._seed, self._prompt_id = seed, prompt_id
        self._noise: dict[int, torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, positions: Sequence[int], prefixes: Sequence[Sequence[int]] | None = None) -> torch.Tensor:
        """[k, V] of logits [k, V]; positions: answer index of each row; prefixes: the text before each row where `needs_prefix`."""
        if self.needs_prefix:
            rows = [self.processors(torch.tensor([p], device=logits.device), row[None]) for p, row in zip(prefixes, logits.float(), strict=True)]
            logits = torch.cat(rows)
        elif self.processors:
            logits = self.processors(None, logits.float() if logits.dtype is not torch.float64 else logits)
        if self.sample:
            logits = logits + self._gumbel(positions, logits.shape[-1]).to(logits.device)
        return logits

    def forget_before(self, position: int) -> None:
        """Positions before it are committed and will not be asked for again."""
        for old in [p for p in self._noise if p < position]:
            del self._noise[old]

    def _gumbel(self, positions: Sequence[int], vocabulary: int) -> torch.Tensor:
        """Standard Gumbel noise of each position, float64 [k, V]; drawn on the CPU, so that a device cannot change it."""
        new = [p for p in positions if p not in self._noise]
        if new:
            keys = keyed_hash(self._seed, torch.tensor(self._prompt_id), torch.tensor(new)).tolist()
            for position, key in zip(new, keys, strict=True):
                uniform = torch.rand(vocabulary, generator=torch.Generator().manual_seed(key), dtype=torch.float64)
                self._noise[position] = -torch.log(-torch.log(uniform.clamp(min=1e-300)))
        return torch.stack([self._noise[p] for p in positions])
