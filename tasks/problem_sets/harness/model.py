"""Our decoder as lm-eval's model `jacobi`. Imports lm-eval, torch and transformers: lm-eval loads it by name.

lm-eval's own `hf` model in everything but how tokens are found: the same prompts, truncation, batches, stop strings, chat templates, and
the same log-likelihoods, so every task of lm-eval runs, and a greedy score in float32 is `hf`'s score. Settings of the checkpoint's
generation config that change greedy decoding (a repetition penalty) apply as they do there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerationConfig
from transformers.generation.stopping_criteria import EosTokenCriteria

from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.hf_generate import jacobi_generate
from jacobi_core.hub import default_device
from tasks.stage import UserError

SETTINGS = ("method", "block_size", "max_blocks", "spawn_ratio", "verification_size", "pool_size", "ngram", "drafts", "auto")


class JacobiLM(HFLM):
    """`--model jacobi --model_args pretrained=DIR,method=mr,block_size=64,...`: SETTINGS are the decoder's, all others those of `hf`.

    Raises UserError for a setting the decoder cannot use, naming it, and for an encoder-decoder model.
    """

    def __init__(self, pretrained: str | PreTrainedModel, *, method: str = Method.mr.value, device: str | None = None, **others: Any) -> None:
        given = {name: others.pop(name) for name in SETTINGS if name in others}
        if method == Method.ar.value:
            given.setdefault("block_size", 1)
        try:
            checked = asdict(DecodingConfig(method=Method(method), **given))
        except ValueError as error:
            raise UserError(f"model_args: {error}") from None
        self.decoding = {**{name: checked[name] for name in SETTINGS}, "method": method}
        super().__init__(pretrained, device=device or str(default_device()), **others)
        if self.backend != "causal":
            raise UserError(f"model_args: pretrained={pretrained}: an encoder-decoder model cannot be decoded in parallel; use --model hf")

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any) -> torch.Tensor:
        def decode(
            model: PreTrainedModel,
            input_ids: torch.Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> torch.Tensor:
            criteria = StoppingCriteriaList(stopping_criteria)
            if texts := stop_texts(self.tokenizer, stop, stopping_criteria):
                criteria.append(StopTexts(self.tokenizer, texts, start=context.shape[1]))
            return jacobi_generate(model, input_ids, logits_processor, criteria, generation_config, **self.decoding, **model_kwargs)

        # lm-eval's own criterion for stop strings follows a whole batch; ours decides row by row
        return super()._model_generate(context, max_length, stop=[], custom_generate=decode, **generation_kwargs)

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval writes into its results about the model; the decoder's settings among it."""
        return {**super().get_model_info(), "decoding": self.decoding}


def stop_texts(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], criteria: StoppingCriteriaList) -> list[str]:
    """Those of `stop` that nothing else ends a text at: lm-eval always names the end-of-text token too, which the decoder knows by its id."""
    eos = {id for criterion in criteria if isinstance(criterion, EosTokenCriteria) for id in criterion.eos_token_id.tolist()}
    known = {token.content for id, token in tokenizer.added_tokens_decoder.items() if id in eos and token.special}
    return [text for text in stop if text and text not in known]


class StopTexts(StoppingCriteria):
    """Ends a text as soon as what follows its first `start` tokens holds one of `texts`; lm-eval cuts it off there."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, start: int) -> None:
        self.tokenizer, self.texts, self.start = tokenizer, texts, start
        self.window = 8 + max(len(text.encode()) for text in texts)  # tokens; nearly each is a byte or more

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """input_ids: long [B, L]; returns bool [B]. Called at every token, so a text that ends at the newest one is enough: however long the
        text, `window` tokens are moved and decoded, and once where all rows show the same (a batch's row stands in for all of them)."""
        tails = [tuple(tail) for tail in input_ids[:, self.start :][:, -self.window :].tolist()]
        ends = {tail: self._ends(self.tokenizer.decode(list(tail))) for tail in set(tails)}
        return torch.tensor([ends[tail] for tail in tails], device=input_ids.device)

    def _ends(self, tail: str) -> bool:
        return any(text in tail for text in self.texts)
