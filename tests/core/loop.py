"""The decoding loop with a forward of the test's choice."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.config import DecodingConfig
from jacobi_core.decoding.forwards import Forward
from jacobi_core.decoding.generate import _decode, _Row
from jacobi_core.decoding.stats import Generation
from tests.core.tiny import tiny_rules


def decode(model: PreTrainedModel, forward: Forward, prompt: list[int], config: DecodingConfig, *, eos_ids: tuple[int, ...] = (10, 20)) -> Generation:
    row = _Row.make(model, torch.tensor(prompt), config, tiny_rules(model, eos_ids=eos_ids))
    return _decode(forward, [row])[0]
