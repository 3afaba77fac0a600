"""Greedy AR and Jacobi decoding of one prompt, in one loop. Lossless: the tokens are those of greedy AR decoding.

Batches, sampling and streaming are not here.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.drafts import ContextDrafts
from jacobi_core.decoding.stats import DecodingStats, Generation
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.decoding.verify import accepted_length


@torch.inference_mode()
def generate(
    model: PreTrainedModel, input_ids: torch.Tensor, config: DecodingConfig, *, rules: TokenRules | None = None, prompt_id: int = 0
) -> Generation:
    """Decode greedily after input_ids, long [1, L] or [L] with L >= 1 (paper section 2.1, algorithm section 1).

    rules: EOS and draftable ids; by default read off the model alone (pass TokenRules.of(model, tokenizer) for a padded
    vocabulary). prompt_id: keys the random first guess, with config.seed. Sampling settings and penalties of the model's
    generation config do not apply. Raises ValueError for an empty prompt, a batch, or a text longer than the model's context.
    """
    prompt = input_ids.reshape(-1) if input_ids.dim() == 2 and input_ids.shape[0] == 1 else input_ids
    if prompt.dim() != 1 or len(prompt) == 0:
        raise ValueError(f"input_ids must hold one prompt of at least one token, got shape {tuple(input_ids.shape)}")
    check_context(model, len(prompt), config.max_new_tokens)
    rules = rules or TokenRules.of(model)
    n, device = config.block_size, model.device
    forward, stats = CachedForward(model), DecodingStats()
    drafts = ContextDrafts(prompt, prompt_id=prompt_id, seed=config.seed, rules=rules, capacity=config.max_new_tokens)
    answer = torch.empty(config.max_new_tokens, dtype=torch.long)
    done = 0
    uncached = prompt.to(device)  # committed tokens the cache has not read: the whole prompt, afterwards one
    draft = torch.empty(0, dtype=torch.long)
    while True:
        # 1. how many tokens this forward may commit: a block (or what is left of it), never past the cap
        width = min(n - done % n if config.method is Method.jacobi else n, config.max_new_tokens - done)
        # 2. draft all but the last: refreshed tokens of the forward before, topped up at random
        draft = draft[: width - 1]
        draft = torch.cat([draft, drafts.draw(done + len(draft), width - 1 - len(draft))])
        # 3. one forward refreshes them all; one transfer to the host
        logits = forward(torch.cat([uncached, draft.to(device)]).unsqueeze(0), keep=width)
        predictions = logits[0].argmax(-1).cpu()
        # 4. verify, stop at EOS, commit, roll the rejected tail back
        accepted = accepted_length(draft, predictions)
        commit = predictions[: accepted + 1]
        eos = rules.first_eos(commit)
        commit = commit[: eos + 1]
        answer[done : done + len(commit)] = commit
        done += len(commit)
        stats.committed_per_forward.append(len(commit))
        if eos < len(commit) or done == config.max_new_tokens:
            stats.stop_reason = "eos" if eos < len(commit) else "length"
            return Generation(answer[:done].clone(), stats)
        forward.rollback(forward.length - (width - 1 - accepted))
        drafts.append(commit)
        uncached, draft = commit[-1:].to(device), predictions[accepted + 1 :]


def check_context(model: PreTrainedModel, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises ValueError where prompt and answer do not fit the model's context length."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and prompt_tokens + max_new_tokens > limit:
        raise ValueError(f"prompt ({prompt_tokens} tokens) + max_new_tokens ({max_new_tokens}) exceed the model's context of {limit} tokens")
