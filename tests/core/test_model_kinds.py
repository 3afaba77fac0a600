"""Kinds of models: each is decoded exactly, or refused by a message that names it; never a wrong text, never a riddle.

Also embeddings with more rows than the tokenizer has tokens (users' report E6), and the context length to the token.
"""

from __future__ import annotations

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from jacobi_core.decoding.buffered_forward import BufferedForward
from jacobi_core.decoding.cache import CachedForward
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.drafts import ContextDrafts
from jacobi_core.decoding.generate import generate, generate_batch
from jacobi_core.decoding.tokens import TokenRules
from tests.core.tiny import EOS, VOCABULARY, random_prompts, tiny_model

SHARED = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    bos_token_id=1,
    eos_token_id=3,
    pad_token_id=3,
)
GPT = dict(n_embd=32, n_layer=2, n_head=4)
# full attention, positions by rotation or by a table: must be exact
EXACT = {
    "gpt2": GPT,
    "gpt_neox": {},
    "gptj": GPT | {"rotary_dim": 4},
    "phi": {},
    "phi3": {},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None, "num_local_experts": 2, "num_experts_per_tok": 1},
    "gemma": {"head_dim": 8},
    "cohere": {},
    "olmo2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "stablelm": {},
    "starcoder2": {"sliding_window": None},
}
# a cache that forgets, mixes or folds what it read: must be refused
REFUSED = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]},
    "mistral": {"sliding_window": 4},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "llama4_text": {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 4, "intermediate_size_mlp": 48},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "mamba": {"state_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1},
}
# a full cache, but positions read off the cache's order (ALiBi, a window over cache columns), or no cache of keys at all
EITHER = {
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "bloom": {"n_layer": 2, "n_head": 4},
    "falcon": {"alibi": True},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "xlstm": {},
}


def tiny(kind: str, settings: dict):
    """fp64, weights large enough for a varied text."""
    torch.manual_seed(0)
    more = {"experts_implementation": "eager"} if any("expert" in name for name in settings) else {}  # the fused one knows no fp64
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(SHARED | settings)), **more).double().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.4)
    return model


def naive_greedy(model, prompt, cap, eos_ids):
    """Greedy AR without any cache: the definition."""
    text = list(prompt)
    with torch.inference_mode():
        for _ in range(cap):
            text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
            if text[-1] in eos_ids:
                break
    return text[len(prompt) :]


def answers(model, rules, prompts, cap):
    """By every method, one by one and (the last) in a batch."""
    configs = [DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=cap)]
    configs += [DecodingConfig(method=m, block_size=5, max_new_tokens=cap, ngram=True) for m in Method if m is not Method.ar]
    for config in configs:
        yield config.method.value, [generate(model, torch.tensor(p), config, rules=rules).new_tokens.tolist() for p in prompts]
    yield "batch", [g.new_tokens.tolist() for g in generate_batch(model, prompts, configs[-1], rules=rules)]


def assert_exact(model, *, cap=18):
    rules, prompts = TokenRules.of(model), [*random_prompts(2, seed=1, longest=11), [7, 8, 9, 7, 8, 9, 7]]
    expected = [naive_greedy(model, prompt, cap, rules.eos_ids) for prompt in prompts]
    for how, found in answers(model, rules, prompts, cap):
        assert found == expected, how


@torch.inference_mode()
def assert_branches_are_texts(model):
    """What a forward says after chains that lie side by side is what a fresh forward over each text says."""
    prompt, chains = [5, 9, 11, 6, 8, 30, 31], [[12, 40, 7], [33, 21, 50, 8]]
    forward = CachedForward(model)
    forward.logits_of([(prompt[:4], [[]])])
    forward.keep([(0, 0)])
    found = forward.logits_of([(prompt[4:], chains)])[0]
    fresh = [model(input_ids=torch.tensor([prompt + chain]), use_cache=False).logits[0, len(prompt) :] for chain in chains]
    torch.testing.assert_close(found[1:], torch.cat(fresh))


@pytest.mark.parametrize("kind", EXACT)
def test_full_attention_is_exact(kind):
    model = tiny(kind, EXACT[kind])
    assert_branches_are_texts(model)
    assert_exact(model)


@pytest.mark.parametrize("kind", EXACT)
@torch.inference_mode()
def test_the_cache_rolls_back_to_any_length_and_no_other(kind):
    """0, 1, L-1 and L tokens, also after chains; L+1 and negative lengths are refused and change nothing (users' report C1)."""
    model, ids = tiny(kind, EXACT[kind]), torch.tensor([[5, 9, 11, 6, 8, 30, 31]])
    L = ids.shape[1]
    full = model(input_ids=ids, use_cache=False).logits
    for make, refill in (
        (CachedForward, lambda f: f.logits_of([(ids[0].tolist(), [[7, 8], [9]])])),
        (BufferedForward, lambda f: f(ids)),
    ):
        for length in (L, L - 1, 1, 0):
            forward = make(model)
            refill(forward)
            forward.rollback(L)
            for bad in (L + 1, -1, -L):
                with pytest.raises(ValueError, match=f"cannot roll a cache of {L} tokens back to {bad}"):
                    forward.rollback(bad)
            forward.rollback(length)
            assert forward.length == length
            torch.testing.assert_close(forward(torch.cat([ids, ids[:, :1]], 1)[:, length:])[:, : L - length], full[:, length:])


@pytest.mark.parametrize("kind", REFUSED)
def test_a_cache_that_cannot_be_rolled_back_is_refused_by_name(kind):
    model = tiny(kind, REFUSED[kind])
    for decode in (lambda c: generate(model, torch.tensor([5, 6]), c), lambda c: generate_batch(model, [[5], [6, 7]], c)):
        for method, n in (("ar", 1), ("jacobi", 4), ("mr", 4)):
            with pytest.raises(ValueError, match=rf"^{kind}: .*only full-attention layers"):
                decode(DecodingConfig(method=method, block_size=n, max_new_tokens=4))


@pytest.mark.parametrize("kind", EITHER)
def test_other_kinds_are_exact_or_refused_by_name(kind):
    model = tiny(kind, EITHER[kind])
    try:
        generate(model, torch.tensor([5, 6]), DecodingConfig(method=Method.mr, block_size=4, max_new_tokens=8, ngram=True))
    except ValueError as refusal:
        assert kind in str(refusal), f"not by name: {refusal}"
        return
    assert_branches_are_texts(model)
    assert_exact(model)


class Tokenizer44:
    """As much of a tokenizer as the rules ask for: 44 ids, of which id 5 is special."""

    eos_token_id, all_special_ids, added_tokens_decoder = 3, [3, 5], {}

    def __len__(self):
        return 44


@pytest.mark.parametrize("tied", [True, False])
def test_rows_beyond_the_tokenizer_are_never_drafted_at_random_and_decoded_like_ar(tied, monkeypatch):
    model = tiny_model("qwen2", tied=tied, seed=4)
    model.lm_head.weight.data[44:] *= 3  # untrained rows that win: AR would say them, so parallel decoding must
    rules = TokenRules.of(model, Tokenizer44())
    assert rules.vocabulary_size == 44
    drawn, draw = set(), ContextDrafts.draw

    def spy(self, start, count, stream):
        drawn.update(tokens := draw(self, start, count, stream=stream).tolist())
        return torch.tensor(tokens, dtype=torch.long)

    monkeypatch.setattr(ContextDrafts, "draw", spy)
    prompts = [[50, 51, 52], [3, 5, 1], *random_prompts(4, seed=3)]  # of the first two no token may be drafted
    expected = [naive_greedy(model, prompt, 24, rules.eos_ids) for prompt in prompts]
    assert any(token >= 44 for answer in expected for token in answer)
    for how, found in answers(model, rules, prompts, 24):
        assert found == expected, how
    assert drawn
    assert max(drawn) < 44
    assert not drawn & {1, 5, *EOS}
    assert model.get_input_embeddings().weight.shape[0] == VOCABULARY  # nothing was resized


@pytest.mark.parametrize("kind", ["gpt2", "qwen2"])
@pytest.mark.parametrize("method", list(Method))
def test_the_context_is_used_to_its_last_token_and_not_beyond(kind, method):
    """gpt2's positions come from a table of 24 rows: a draft beyond the context could not even be read."""
    model = tiny(kind, {"max_position_embeddings": 24} | EXACT.get(kind, {}))
    rules = TokenRules(eos_ids=frozenset(), vocabulary_size=VOCABULARY, special_ids=frozenset())
    prompt, n = [7, 8, 9, 7, 8], 1 if method is Method.ar else 17
    knobs = dict(method=method, block_size=n, max_blocks=3, spawn_ratio=0.1, ngram=n > 1)
    config = DecodingConfig(max_new_tokens=19, **knobs)
    expected = naive_greedy(model, prompt, 19, ())
    assert generate(model, torch.tensor(prompt), config, rules=rules).new_tokens.tolist() == expected
    assert generate_batch(model, [prompt, prompt], config, rules=rules)[1].new_tokens.tolist() == expected
    beyond = DecodingConfig(max_new_tokens=20, **knobs)
    for decode in (
        lambda: generate(model, torch.tensor(prompt), beyond, rules=rules),
        lambda: generate_batch(model, [[7], prompt], beyond, rules=rules),
    ):
        with pytest.raises(ValueError, match=r"prompt \(5 tokens\) \+ max_new_tokens \(20\) exceed the model's context of 24 tokens"):
            decode()
