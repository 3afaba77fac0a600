"""One forward against a KV cache, and its rollback: the only place that touches a cache. Knows nothing about drafts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from jacobi_core.decoding.context import context_of
from jacobi_core.decoding.flex_mask import block_mask

Request = tuple[Sequence[int], Sequence[Sequence[int]]]  # a text's uncached committed tokens, and its chains of drafts

LIKE_SDPA = ("sdpa", "jacobi_packed")  # the latter is sdpa for a model that once trained on packed rows


class CachedForward:
    """A model and the cache of what it has read so far. Not for training: call under torch.inference_mode()."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError for a model whose cache cannot be rolled back token by token (sliding window, linear attention)."""
        self.model = model
        self.cache = DynamicCache(config=model.config)
        self._branches: list[int] = []  # cache index where each chain of the last logits_of begins
        refuse_unsuitable(model, self.cache, DynamicLayer)

    @property
    def length(self) -> int:
        """Tokens in the cache, padding included."""
        return self.cache.get_seq_length()

    def __call__(
        self,
        input_ids: torch.Tensor,
        *,
        keep: int | torch.Tensor = 0,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Feed input_ids [B, q]; returns logits [B, k, V] of the last `keep` inputs, of the given indices, or of all (0).

        attention_mask is what transformers takes: [B, length+q] of 0/1, or a prepared 4D mask (see `model_mask`).
        """
        return self.model(
            input_ids=input_ids, position_ids=position_ids, attention_mask=attention_mask, cache=self.cache, use_cache=True, logits_to_keep=keep
        ).logits

    def rollback(self, length: int) -> None:
        """Forget everything read after the first `length` tokens. Raises ValueError outside 0..current length."""
        current = self.length
        if not 0 <= length <= current:
            raise ValueError(f"cannot roll a cache of {current} tokens back to {length}")
        if length < current:
            self.cache.crop(length - current)

    def logits_of(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """Feed one text's committed tokens and, side by side behind them, chains of drafts that do not see each other.

        Returns [1 + all chain tokens, V] per text: after the last committed token, then after each token of each chain. `keep` must
        follow. Here one text, without a mask where there is one chain; `batch.BatchForward` takes many.
        """
        ((committed, chains),) = requests
        before, device = self.length, self.model.device
        fed = [*committed]
        for chain in chains:
            fed += chain
        ids = torch.tensor([fed], device=device)
        drafted = len(fed) - len(committed)
        if len(chains) == 1:
            logits = self(ids, keep=drafted + 1)
        else:
            positions = torch.tensor([[*range(len(committed))] + [len(committed) + i for c in chains for i in range(len(c))]], device=device)
            visible = side_by_side(before, len(committed), tuple(len(c) for c in chains)).to(device)
            logits = self(ids, keep=drafted + 1, position_ids=positions + before, attention_mask=model_mask(self.model, visible))
        self._branches, at = [], before + len(committed)
        for chain in chains:
            self._branches.append(at)
            at += len(chain)
        return [logits[0]]

    def keep(self, verdicts: Sequence[tuple[int, int] | None]) -> None:
        """Per text of the last `logits_of`: keep its committed tokens and the first `accepted` of one chain, (chain, accepted), and forget
        the rest; None: the text has ended, forget all of it."""
        (verdict,) = verdicts
        if verdict is None:
            return
        chain, accepted = verdict
        start, source = self._branches[0], self._branches[chain]
        move_columns(self.cache, source, start, accepted)
        self.rollback(start + accepted)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep only these batch rows, long [b], in this order."""
        self.cache.batch_select_indices(rows)


def context_length(model: PreTrainedModel) -> int | None:
    """Most tokens of a text, as the checkpoint says; None where it does not."""
    return context_of(model.config)


def move_columns(cache: Cache, source: int, start: int, count: int) -> None:
    """Accepted tokens move up behind the committed ones: all that is ever copied."""
    if count and source != start:
        for layer in cache.layers:
            for tensor in (layer.keys, layer.values):
                tensor[:, :, start : start + count] = tensor[:, :, source : source + count].clone()


def refuse_unsuitable(model: PreTrainedModel, cache: Cache, plain_layer: type) -> None:
    """Raises ValueError for a model that cannot be decoded exactly: layers that forget or mix tokens, or places told by column."""
    config = model.config.get_text_config()
    odd = sorted({type(layer).__name__ for layer in cache.layers if type(layer) is not plain_layer})
    if odd:
        raise ValueError(
            f"{model.config.model_type}: its cache uses {', '.join(odd)}, which cannot be rolled back exactly; "
            "only full-attention layers are supported (set use_sliding_window=false if the checkpoint allows it)"
        )
    if getattr(model, "_is_stateful", False):
        raise ValueError(f"{model.config.model_type}: keeps a state that cannot be rolled back; only attention with a KV cache is supported")
    by_column = "position_ids" not in inspect.signature(model.forward).parameters or getattr(config, "alibi", False)
    if by_column or "local" in getattr(config, "attention_layers", ()):
        raise ValueError(
            f"{model.config.model_type}: tells where a token stands by its column in the cache (ALiBi, local windows), "
            "which is not its place in the text once candidates stand side by side; only models that take position_ids are supported"
        )


def side_by_side(cached: int, committed: int, chains: tuple[int, ...]) -> torch.Tensor:
    """bool [1, 1, q, cached + q]: causal, and no chain sees another."""
    width = committed + sum(chains)
    fed = torch.ones(width, width, dtype=torch.bool).tril_()
    at = committed
    for length in chains:
        fed[at + length :, at : at + length] = False
        at += length
    return torch.cat([torch.ones(width, cached, dtype=torch.bool), fed], 1)[None, None]


def model_mask(model: PreTrainedModel, visible: torch.Tensor) -> torch.Tensor | BlockMask:
    """The mask a model's attention takes for `visible`, bool [B, 1, q, k], True = attend.

    sdpa takes it as it is; eager adds it to the scores and is silently wrong with booleans. Raises ValueError for an attention
    implementation that takes no mask.
    """
    implementation = model.config._attn_implementation
    if implementation in LIKE_SDPA:
        return visible
    if implementation == "flex_attention":
        return block_mask(visible)
    if implementation == "eager":
        lowest = max(torch.finfo(model.dtype).min, torch.finfo(torch.float32).min)  # eager's softmax runs in fp32
        return torch.zeros(visible.shape, dtype=model.dtype, device=visible.device).masked_fill(~visible, lowest)
    raise ValueError(f"attn_implementation={implementation!r} takes no dense mask; load the model with attn_implementation='sdpa'")
