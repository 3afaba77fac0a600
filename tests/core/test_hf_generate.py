"""`model.generate(custom_generate=jacobi_generate)` is `model.generate()` in fewer forwards; what it cannot honour is refused by name."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, TextStreamer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from jacobi_core.decoding.hf_generate import jacobi_generate
from tests.core.tiny import FAMILIES, random_prompts, tiny_model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["ar", "jacobi", "mr"])
def test_same_text_as_transformers(family, method):
    model = tiny_model(family, seed=3)
    for prompt in random_prompts(5, seed=2):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, do_sample=False, max_new_tokens=30)
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=30, custom_generate=jacobi_generate, method=method, block_size=8
        )
        assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "settings", [{"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 12}, {"suppress_tokens": [9, 10, 11, 12]}]
)
@pytest.mark.parametrize("method", ["jacobi", "mr"])
def test_processors_run_on_each_positions_own_prefix(settings, method):
    model = tiny_model(seed=3)
    for prompt in random_prompts(5, seed=2):
        ids = torch.tensor([prompt])
        expected = model.generate(ids, do_sample=False, max_new_tokens=24, **settings)
        found = model.generate(ids, do_sample=False, max_new_tokens=24, custom_generate=jacobi_generate, method=method, block_size=8, **settings)
        assert found.tolist() == expected.tolist()


def test_samples_follow_torchs_seed_and_not_the_method():
    model = tiny_model(seed=3, initializer_range=0.1)
    texts = []
    for seed, method in ((1, "ar"), (1, "mr"), (1, "jacobi"), (2, "mr")):
        torch.manual_seed(seed)
        texts.append(
            model.generate(
                torch.tensor([[5, 6]]), do_sample=True, temperature=0.8, top_p=0.9, max_new_tokens=24, custom_generate=jacobi_generate, method=method
            ).tolist()
        )
    assert texts[0] == texts[1] == texts[2] != texts[3]


REFUSED = {
    "num_beams": {"num_beams": 2},
    "zigzag": {"method": "zigzag"},
    "block_size": {"block_size": 0},
    "prompt_lookup_num_tokens=3: pass ngram=True": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "use_mtp": {"use_mtp": True},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "constraints": {"constraints": [object()]},
    "force_words_ids": {"force_words_ids": [[5]]},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
    "output_scores": {"return_dict_in_generate": True, "output_scores": True},
    "output_logits": {"return_dict_in_generate": True, "output_logits": True},
    "output_attentions": {"return_dict_in_generate": True, "output_attentions": True},
    "output_hidden_states": {"return_dict_in_generate": True, "output_hidden_states": True},
    "use_cache=False": {"use_cache": False},
    "cache_implementation='static'": {"cache_implementation": "static"},
    "cache_implementation='offloaded'": {"cache_implementation": "offloaded"},
    "cache .past_key_values.": {"cache": DynamicCache()},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 2, 32, dtype=torch.float64)},
    "labels": {"labels": torch.tensor([[5, 6]])},
    "position_ids": {"position_ids": torch.tensor([[3, 4]])},
    "ClassifierFreeGuidance": {"guidance_scale": 2.0},
    "WatermarkLogitsProcessor": {"watermarking_config": {"bias": 2.0}},
}


@pytest.mark.parametrize("match", REFUSED)
def test_what_cannot_be_honoured_is_refused(match):
    model = tiny_model(seed=3)
    with pytest.raises(ValueError, match=match):
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=8, custom_generate=jacobi_generate, **{"do_sample": False, **REFUSED[match]})


def both(model, ids, **settings) -> tuple[list, list]:
    """What transformers makes of it, and what we do."""
    more = {"do_sample": False, "max_new_tokens": 24, **settings}
    return model.generate(ids, **more).tolist(), model.generate(ids, custom_generate=jacobi_generate, block_size=8, **more).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"output_scores": True, "output_attentions": True, "output_hidden_states": True},  # not returned: no output class was asked for
        {"cache_implementation": "dynamic", "use_cache": True},
        {"position_ids": torch.tensor([[0, 1, 2]])},
        {"prefix_allowed_tokens_fn": lambda row, tokens: [9 + len(tokens) % 5, 20]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_what_changes_nothing_or_is_honoured_is_taken(settings):
    expected, found = both(tiny_model(seed=3), torch.tensor([[5, 6, 7]]), **settings)
    assert found == expected


def test_the_output_class():
    model, ids = tiny_model(seed=3), torch.tensor([[5, 6]])
    expected, found = (
        model.generate(ids, do_sample=False, max_new_tokens=12, return_dict_in_generate=True, **more)
        for more in ({}, {"custom_generate": jacobi_generate})
    )
    assert type(found) is type(expected) is GenerateDecoderOnlyOutput
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.keys() == {"sequences"}


def test_many_samples_of_one_prompt():
    model, ids = tiny_model(seed=3, initializer_range=0.1), torch.tensor([[5, 6, 7], [8, 9, 10]])
    torch.manual_seed(0)
    found = model.generate(ids, do_sample=True, max_new_tokens=16, num_return_sequences=3, custom_generate=jacobi_generate)
    assert found.shape[0] == 6
    assert found[:, :3].tolist() == ids.repeat_interleave(3, 0).tolist()
    assert len({tuple(row) for row in found[:3].tolist()}) == 3


@pytest.mark.parametrize("eos", [7, [7, 9], None])
def test_the_calls_own_end_of_text(eos):
    """transformers ends a text where the call says, even where model config and generation config name other ids."""
    for seed in range(6):
        model = tiny_model(seed=seed, initializer_range=0.3)
        model.generation_config.eos_token_id = eos if eos is None else model.generation_config.eos_token_id
        expected, found = both(model, torch.tensor([[5, 6, 8]]), eos_token_id=eos, pad_token_id=3, max_new_tokens=60)
        assert found == expected


class Odd(StoppingCriteria):
    """Ends a text whose ids add up to a multiple of 7, the padding included."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(1) % 7 == 0


@pytest.mark.parametrize(
    "criteria",
    [[EosTokenCriteria(torch.tensor([6, 11, 30]))], [MaxLengthCriteria(11)], [Odd()], [Odd(), MaxLengthCriteria(40)]],
    ids=["eos", "length", "odd", "odd and longer"],
)
def test_a_callers_criteria_go_before_the_configs(criteria):
    model = tiny_model(seed=3)
    for prompt in random_prompts(4, seed=6):
        expected, found = both(model, torch.tensor([prompt]), stopping_criteria=StoppingCriteriaList(criteria))
        assert found == expected


def test_the_time_limit_is_asked_after_every_token():
    model, ids = tiny_model(seed=3, eos_token_id=None, pad_token_id=3), torch.tensor([[5, 6]])
    model.generation_config.eos_token_id = None
    assert model.generate(ids, max_new_tokens=24, max_time=1e-9, custom_generate=jacobi_generate).shape[1] == 3
    assert model.generate(ids, max_new_tokens=24, max_time=600.0, custom_generate=jacobi_generate).shape[1] == 26
    past = [MaxTimeCriteria(max_time=1.0, initial_timestamp=0.0)]
    assert model.generate(ids, max_new_tokens=24, stopping_criteria=past, custom_generate=jacobi_generate).shape[1] == 3


@pytest.mark.parametrize("method", ["ar", "mr"])
def test_a_left_padded_batch_is_what_transformers_makes_of_it(method):
    model = tiny_model(seed=3)
    prompts = random_prompts(4, seed=9)
    width = max(map(len, prompts))
    ids = torch.tensor([[3] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    expected = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24)
    found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, custom_generate=jacobi_generate, method=method, block_size=8)
    assert found.tolist() == expected.tolist()
    with pytest.raises(ValueError, match="token_streamer"):
        model.generate(ids, attention_mask=mask, max_new_tokens=4, custom_generate=jacobi_generate, token_streamer=object())


class WholeBatch(StoppingCriteria):
    """Like lm-eval's for stop strings: wants every row at every call, remembers which have ended, and answers once for all."""

    def __init__(self, rows):
        self.done = [False] * rows

    def __call__(self, input_ids, scores, **kwargs):
        self.done = [done or input_ids[i, -1].item() % 7 == 0 for i, done in enumerate(self.done)]
        return all(self.done)


@pytest.mark.parametrize("count", [1, 5])
def test_a_criterion_that_follows_a_whole_batch_ends_each_row_at_its_own_place(count):
    model = tiny_model(seed=3)
    prompts = random_prompts(count, seed=9)
    width = max(map(len, prompts)) + 1
    ids = torch.tensor([[3] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    call = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 24, "pad_token_id": 3}
    plain = model.generate(ids, **call)[:, width:].tolist()
    found = model.generate(ids, stopping_criteria=[WholeBatch(count)], custom_generate=jacobi_generate, block_size=8, **call)[:, width:].tolist()
    for expected, row in zip(plain, found, strict=True):
        end = next((i for i, token in enumerate(expected) if token % 7 == 0 or token in (3, 4)), len(expected) - 1) + 1
        assert row == expected[:end] + [3] * (len(row) - end)


@pytest.mark.parametrize(
    "settings",
    [
        {"min_new_tokens": 12},
        {"repetition_penalty": 1.5, "pad_token_id": 9},
        {"no_repeat_ngram_size": 2, "pad_token_id": 9},
        {"begin_suppress_tokens": list(range(5, 40))},
        {"stopping_criteria": StoppingCriteriaList([Odd()])},
    ],
    ids=lambda settings: next(iter(settings)),
)
@pytest.mark.parametrize("count", [1, 4])
def test_processors_and_criteria_see_the_padding_that_transformers_shows_them(settings, count):
    model = tiny_model(seed=3)
    prompts = random_prompts(count, seed=9)
    width = max(map(len, prompts)) + 2
    padding = settings.get("pad_token_id", 3)
    ids = torch.tensor([[padding] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    expected, found = both(model, ids, attention_mask=mask, **settings)
    assert found == expected


@pytest.mark.parametrize(
    "settings",
    [{"prefix_allowed_tokens_fn": lambda row, tokens: [9 + row]}, {"encoder_repetition_penalty": 1.3}, {"encoder_no_repeat_ngram_size": 2}],
    ids=lambda settings: next(iter(settings)),
)
def test_a_processor_that_tells_rows_apart_takes_one_prompt(settings):
    model = tiny_model(seed=3)
    expected, found = both(model, torch.tensor([[5, 6, 7]]), **settings)
    assert found == expected
    with pytest.raises(ValueError, match="LogitsProcessor: tells the rows of a batch apart; pass one prompt per call"):
        model.generate(torch.tensor([[5, 6], [7, 8]]), do_sample=False, max_new_tokens=4, custom_generate=jacobi_generate, **settings)


def test_transformers_still_keeps_assistants_and_tokenizers_from_us():
    """Why they cannot be refused at this door. When this fails, refuse `assistant_model` and take `tokenizer` with `stop_strings`."""
    seen = {}

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, assistant_model=None, tokenizer=None, **kwargs):
        seen.update(assistant_model=assistant_model, tokenizer=tokenizer, streamer=kwargs.get("streamer"))
        return input_ids

    model = tiny_model()
    model.generate(
        torch.tensor([[5, 6]]), do_sample=False, max_new_tokens=4, custom_generate=loop, assistant_model=model, tokenizer=1, streamer=Silent(None)
    )
    assert seen == {"assistant_model": None, "tokenizer": None, "streamer": None}


class Silent(TextStreamer):
    def put(self, value):
        """Nothing is printed."""
