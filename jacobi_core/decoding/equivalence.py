"""Is parallel decoding's output greedy AR's output? First difference and the top-2 margin there (algorithm section 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

TIE_MARGIN = 1e-3  # logits closer than this can change order with the shape of a forward; a wider gap is a defect


@dataclass(frozen=True)
class Difference:
    """Where an output leaves greedy AR's: index of the first differing answer token, top-2 logit margin of AR there."""

    first_index: int
    margin: float

    @property
    def kind(self) -> str:
        return "tie" if self.margin <= TIE_MARGIN else "defect"


@torch.inference_mode()
def compare_with_ar(model: PreTrainedModel, prompt: torch.Tensor, ar_tokens: torch.Tensor, tokens: torch.Tensor) -> Difference | None:
    """None where `tokens` [t] equals `ar_tokens` [s], else the first difference. prompt: long [L]. One forward in the latter case."""
    if torch.equal(ar_tokens, tokens):
        return None
    shared = min(len(ar_tokens), len(tokens))
    wrong = (ar_tokens[:shared] != tokens[:shared]).nonzero()
    index = int(wrong[0]) if len(wrong) else shared
    context = torch.cat([prompt.cpu(), ar_tokens[:index].cpu()]).to(model.device)
    top2 = model(input_ids=context.unsqueeze(0), use_cache=False, logits_to_keep=1).logits[0, -1].double().topk(2).values
    return Difference(first_index=index, margin=float(top2[0] - top2[1]))
