"""The base model's tokenizer and pretraining, on a model of a few thousand parameters."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoTokenizer

from tasks.base_model import stage
from tasks.base_model.pretrain import IGNORED, PretrainConfig, batches, build_model, pretrain
from tasks.base_model.tokenizer import train_tokenizer
from tasks.problem_sets.minicode import generate
from tasks.stage import StageContext, UserError, silent_reporter
from tests.tasks.tiny_stage import build_prompts


@pytest.fixture(scope="module")
def problems():
    return generate(split="train", count=60, seed=0)


@pytest.fixture(scope="module")
def tokenizer(problems):
    return train_tokenizer(text for p in problems for text in (p.prompt, p.solution))


@pytest.fixture(scope="module")
def examples(problems, tokenizer):
    rows = []
    for p in problems:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": p.prompt}], add_generation_prompt=True)["input_ids"]
        rows.append((prompt, tokenizer(p.solution)["input_ids"] + [tokenizer.eos_token_id]))
    return rows


def tiny(**changes) -> PretrainConfig:
    settings = {"hidden_size": 32, "intermediate_size": 64, "layers": 2, "heads": 2, "kv_heads": 1, "steps": 12, "batch_size": 4, "warmup": 2}
    return PretrainConfig(**{**settings, "learning_rate": 5e-3, "threads": 1, **changes})


@pytest.mark.parametrize(
    "text",
    ["", " ", "\tif x:\r\n\t\treturn 1\r\n", "naïve — 日本語 🙂👩‍👩‍👧 ok", "a  b , don 't .\n\n\n  ", "\x00\x7f\u200b", 'return " ".join(x)\n'],
)
def test_text_survives_the_tokenizer(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert not set(ids) & {tokenizer.eos_token_id, tokenizer.pad_token_id}


def test_the_same_texts_give_the_same_tokenizer(tokenizer, problems, tmp_path):
    again = train_tokenizer([text for p in problems for text in (p.prompt, p.solution)])
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    again.save_pretrained(tmp_path)
    reloaded = type(again).from_pretrained(tmp_path)
    assert reloaded.chat_template == tokenizer.chat_template
    assert reloaded.eos_token == "<|im_end|>" and reloaded.pad_token == "<|endoftext|>"
    assert reloaded("<|im_start|>x y\t🙂")["input_ids"] == tokenizer("<|im_start|>x y\t🙂")["input_ids"]


def test_chat_template(tokenizer):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": " U\n"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\n U\n<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(chat[1:], add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    answered = tokenizer.apply_chat_template([*chat, {"role": "assistant", "content": "A"}], tokenize=False)
    assert answered == text + "A<|im_end|>\n"


def test_vocabulary_size(tokenizer):
    assert len(tokenizer) == 512
    with pytest.raises(ValueError, match="^vocab_size: "):
        train_tokenizer(["x"], vocab_size=100)


def test_the_loss_falls_and_is_reported(tokenizer, examples):
    reports = []
    model = pretrain(
        examples, tokenizer=tokenizer, config=tiny(steps=100, learning_rate=1e-2), report=lambda metrics, step: reports.append((step, metrics))
    )
    steps, losses = [step for step, _ in reports], [metrics["loss"] for _, metrics in reports]
    assert steps[-1] == 100
    assert losses[0] < math.log(512) + 0.5
    assert losses[-1] < 0.7 * losses[0]
    assert not model.training
    assert model.dtype == torch.float32


def test_the_same_config_gives_the_same_weights(tokenizer, examples):
    first, second, other = (
        pretrain(examples, tokenizer=tokenizer, config=tiny(seed=seed), report=silent_reporter).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.norm.weight"], other["model.norm.weight"])


def test_the_checkpoint_ends_at_either_end_token(tokenizer, examples, tmp_path):
    model = pretrain(examples, tokenizer=tokenizer, config=tiny(steps=1), report=silent_reporter)
    model.save_pretrained(tmp_path)
    reloaded = type(model).from_pretrained(tmp_path)
    settings = reloaded.generation_config
    assert settings.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert settings.pad_token_id == tokenizer.pad_token_id
    assert settings.do_sample is False
    assert reloaded.config.vocab_size >= len(tokenizer) and reloaded.config.vocab_size % 64 == 0
    assert reloaded.get_input_embeddings().weight is reloaded.lm_head.weight


def test_batches_hold_every_example_once_an_epoch_with_little_padding():
    examples = [([1] * (3 + index % 40), [2 + index, 1]) for index in range(64)]
    stream = batches(examples, batch_size=4, padding=0, prompt_loss=False, seed=0)
    epoch = [next(stream) for _ in range(16)]
    seen = sorted(int(label) for _, labels in epoch for label in labels.flatten() if label not in (IGNORED, 1))
    assert seen == [2 + index for index in range(64)]
    padding = sum(int((input_ids == 0).sum()) for input_ids, _ in epoch)
    assert padding < 0.1 * sum(input_ids.numel() for input_ids, _ in epoch)
    for input_ids, labels in epoch:
        assert bool(((labels == IGNORED) | (labels == input_ids)).all())


def test_what_comes_first_is_learnt_from_and_seen_once(tokenizer, examples):
    """With steps for nothing else the examples do not matter; with more, both do."""

    def weights(examples, first, **changes):
        return pretrain(examples, first=first, tokenizer=tokenizer, config=tiny(**changes), report=silent_reporter).state_dict()["model.norm.weight"]

    first, some, others = examples[:16], examples[16:32], examples[32:48]
    alone = weights(some, first, steps=4)
    assert torch.equal(alone, weights(others, first, steps=4))
    assert not torch.equal(alone, weights(some, others, steps=4))
    assert not torch.equal(weights(some, first, steps=5), weights(others, first, steps=5))


def test_the_stage_shows_short_problems_first_as_prompts_are_written(tmp_path, monkeypatch):
    build_prompts(tmp_path / "prompts")
    seen = {}

    def spy(examples, *, first, tokenizer, config, report):
        seen.update(examples=examples, first=first, tokenizer=tokenizer)
        return pretrain(examples, first=first, tokenizer=tokenizer, config=config, report=report)

    monkeypatch.setattr("tasks.base_model.pretrain.pretrain", spy)
    config = stage.BaseModelConfig(pretrain=tiny(steps=3, short_first=8))
    assert stage.run(config, {"prompts": tmp_path / "prompts"}, tmp_path / "base", StageContext())["examples"] == 11
    texts = [[seen["tokenizer"].decode(part) for part in pair] for pair in (*seen["first"], *seen["examples"])]
    problems = generate(split="train", count=8, seed=0)
    assert [pair[0].count(p.prompt) for pair, p in zip(texts, problems, strict=False)] == [1] * 8
    assert [pair[1] for pair in texts[:8]] == [p.solution + "<|im_end|>" for p in problems]
    assert len({(pair[0].split("\n")[0], pair[0][-20:]) for pair in texts}) == 1


def test_more_short_problems_than_there_are_is_an_error_that_names_the_setting(tmp_path):
    build_prompts(tmp_path / "prompts")
    config = stage.BaseModelConfig(pretrain=tiny(steps=100_000, short_first=9000))
    with pytest.raises(UserError, match=r"^model\.pretrain\.short_first: 9000 .*has 7652"):
        stage.run(config, {"prompts": tmp_path / "prompts"}, tmp_path / "base", StageContext())


@pytest.mark.parametrize("changes", [{"heads": 3}, {"steps": 0}, {"max_positions": 10}, {"short_first": -1}, {"short_first": 48}])
def test_bad_settings_are_named(tokenizer, examples, changes):
    with pytest.raises(ValueError, match=f"^{next(iter(changes))}: "):
        pretrain(examples, tokenizer=tokenizer, config=tiny(**changes), report=silent_reporter)


def test_a_tokenizer_reloaded_beside_its_model_splits_text_the_same_way(tmp_path):
    """transformers picks the tokenizer class by the checkpoint's model type; ours must be that class already."""
    text = "def f(xs: list[int]) -> int:\n    kept = [x for x in xs if x > 12]\n\treturn 345\n"
    tokenizer = train_tokenizer([text] * 50, vocab_size=400)
    tokenizer.save_pretrained(tmp_path)
    build_model(tokenizer, PretrainConfig(hidden_size=32, intermediate_size=32, layers=1, heads=2, kv_heads=1)).save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert reloaded.decode(tokenizer(text)["input_ids"]) == text
    assert reloaded.eos_token_id == tokenizer.eos_token_id
