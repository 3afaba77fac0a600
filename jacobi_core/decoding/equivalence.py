"""Is parallel decoding's output greedy AR's output? First difference and the top-2 margin there (algorithm section 1)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

TIE_MARGIN = 1e-3  # logits closer than this can change order with the shape of a forward; a wider gap is a defect


def tie_margin(dtype: torch.dtype, largest_logit: float) -> float:
    """Widest top-2 logit margin that rounding in `dtype` explains, where the largest logit has the absolute value `largest_logit`.

    float64: none, every difference is a defect. float32: TIE_MARGIN. bfloat16 and float16: 4 units in the last place of the largest
    logit (1/32 of it in bfloat16): logits are themselves rounded to one unit, and the hidden state behind them to a few more.
    """
    if dtype is torch.float64:
        return 0.0
    return TIE_MARGIN if dtype is torch.float32 else 4 * torch.finfo(dtype).eps * largest_logit


@dataclass(frozen=True)
class Difference:
    """Where an output leaves greedy AR's: index of the first differing answer token, top-2 logit margin of AR there."""

    first_index: int
    margin: float
    tolerance: float  # widest margin that rounding explains here, see tie_margin
    prefix: bool  # one answer begins with the other: a stop too early or too late, which no rounding explains

    @property
    def kind(self) -> str:
        """ "tie" or "defect"."""
        return "defect" if self.prefix or self.tolerance == 0 or self.margin > self.tolerance else "tie"


@torch.inference_mode()
def compare_with_ar(model: PreTrainedModel, prompt: torch.Tensor, ar_tokens: torch.Tensor, tokens: torch.Tensor) -> Difference | None:
    """None where `tokens` [t] equals `ar_tokens` [s], else the first difference. prompt: long [L]. One forward in the latter case."""
    if torch.equal(ar_tokens, tokens):
        return None
    shared = min(len(ar_tokens), len(tokens))
    wrong = (ar_tokens[:shared] != tokens[:shared]).nonzero()
    index = int(wrong[0]) if len(wrong) else shared
    context = torch.cat([prompt.cpu(), ar_tokens[:index].cpu()]).to(model.device)
    logits = model(input_ids=context.unsqueeze(0), use_cache=False, logits_to_keep=1).logits[0, -1].double()
    top2 = logits.topk(2).values
    tolerance = tie_margin(model.dtype, float(logits.abs().max()))
    return Difference(first_index=index, margin=float(top2[0] - top2[1]), tolerance=tolerance, prefix=not len(wrong))
