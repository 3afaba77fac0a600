"""Random tiny models in fp64, whose greedy text is varied and ends at different places. torch and transformers only."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from jacobi_core.decoding.tokens import TokenRules

VOCABULARY = 60
EOS = (3, 4)
FAMILIES = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}


def tiny_model(family: str = "qwen2", *, tied: bool = True, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides) -> PreTrainedModel:
    """2 layers, hidden 32, GQA. The large initial range makes argmax far from ties and the text far from constant."""
    config_class, model_class = FAMILIES[family]
    settings = dict(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=list(EOS),
        pad_token_id=3,
    )
    if family == "qwen2":
        settings.pop("head_dim")
    torch.manual_seed(seed)
    return model_class(config_class(**(settings | overrides))).to(dtype).eval()


def tiny_rules(model: PreTrainedModel, *, eos_ids: tuple[int, ...] = ()) -> TokenRules:
    return TokenRules.of(model, eos_ids=eos_ids or None)


def random_prompts(count: int, *, seed: int, shortest: int = 1, longest: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator)
    return [torch.randint(5, VOCABULARY, (int(n),), generator=generator).tolist() for n in lengths]
