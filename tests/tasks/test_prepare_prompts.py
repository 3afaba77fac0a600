"""From a file to templated prompts: not a byte of the text lost, nothing in two splits, every bad row named."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from jacobi_core.hub import load_tokenizer
from tasks import artifacts
from tasks.prepare_prompts import SPLITS, PreparePromptsConfig, run, template
from tasks.problem_sets import minicode
from tasks.stage import StageContext, UserError
from tests.tasks.tiny_stage import write_jsonl

AWKWARD = [
    "\tdef f(x):\n\t\treturn  x  \n\n",
    "ends in spaces   ",
    "   starts with them",
    "line\r\nline\r\n\rlone return",
    "naïve — 日本語 🙂👩‍👩‍👧 ok",
    "a  b , don 't . do n't ! ?",
    'quotes " and \\ backslashes \\n \\u0041',
    "separators \u2028 \u2029 \x0b \x0c \x85 \u200b \ufeff end",
    "\x00 nul and \x7f",
]


def settings(path, **changes) -> PreparePromptsConfig:
    return PreparePromptsConfig(**{"source": "file", "path": str(path), "test": 0, **changes})


def prepare(folder, config):
    """(metrics, prompts by split)."""
    folder.mkdir(parents=True)
    metrics = run(config, {}, folder, StageContext())
    return metrics, {split: artifacts.read_prompts(folder, split) for split in SPLITS}


def numbered(count):
    return [{"prompt": f"Task {i}: add {i} and {i * i}."} for i in range(count)]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_text_reaches_the_tokenizer_byte_for_byte(tmp_path, ascii_only):
    rows = [{"prompt": text} for text in AWKWARD[:5]] + [{"messages": [{"role": "user", "content": text}]} for text in AWKWARD[5:]]
    file = tmp_path / "my set.jsonl"
    file.write_bytes(b"\n".join(json.dumps(row, ensure_ascii=ascii_only).encode() for row in rows))
    metrics, splits = prepare(tmp_path / "out", settings(file))
    assert metrics["train"] == len(AWKWARD)
    assert {p.messages[0]["content"] for p in splits["train"]} == set(AWKWARD)
    tokenizer = load_tokenizer(tmp_path / "out" / "tokenizer")
    for prompt in splits["train"]:
        text = prompt.messages[0]["content"]
        assert tokenizer.decode(prompt.input_ids) == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert prompt.meta == {"problem_set": "my set"}


def test_lines_may_end_in_windows_style_and_blank_ones_are_skipped(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "one"}\r\n\r\n   \r\n{"prompt": "two\\r\\n"}\r\n')
    _, splits = prepare(tmp_path / "out", settings(file))
    assert sorted(p.messages[0]["content"] for p in splits["train"]) == ["one", "two\r\n"]


def test_conversations_keep_their_turns_and_a_system_message_comes_first(tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": " Add. "}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"messages": turns}])
    _, splits = prepare(tmp_path / "out", settings(file, system="Be brief."))
    (prompt,) = splits["train"]
    assert prompt.messages == [{"role": "system", "content": "Be brief."}, *turns]
    text = load_tokenizer(tmp_path / "out" / "tokenizer").decode(prompt.input_ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>") and "\n Add. <|im_end|>" in text and text.endswith("assistant\n")
    assert prompt.id == artifacts.prompt_id(prompt.messages)


def test_duplicates_are_dropped_and_counted(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [*numbered(4), *numbered(2), {"messages": [{"role": "user", "content": numbered(1)[0]["prompt"]}]}])
    metrics, splits = prepare(tmp_path / "out", settings(file))
    assert metrics["dropped_duplicate"] == 3 and metrics["train"] == 4 and metrics["dropped_too_long"] == 0
    assert len({p.id for p in splits["train"]}) == 4


def test_a_duplicate_never_stands_in_two_splits_nor_takes_a_place(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", numbered(12) * 3)
    for seed in range(3):
        metrics, splits = prepare(tmp_path / f"out{seed}", settings(file, test=4, validation=3, seed=seed))
        assert [len(splits[s]) for s in SPLITS] == [5, 3, 4]
        assert len({p.id for prompts in splits.values() for p in prompts}) == 12
        assert metrics["dropped_duplicate"] == 24


def test_prompts_that_are_too_long_are_dropped_and_counted(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x y z " * n} for n in (1, 2, 50, 60)])
    _, everything = prepare(tmp_path / "all", settings(file))
    lengths = sorted(len(p.input_ids) for p in everything["train"])
    metrics, splits = prepare(tmp_path / "out", settings(file, max_prompt_tokens=lengths[2]))
    assert metrics["dropped_too_long"] == 1 and metrics["train"] == 3
    assert sorted(len(p.input_ids) for p in splits["train"]) == lengths[:3]
    assert metrics["prompt_tokens_max"] == lengths[2] and metrics["prompt_tokens_mean"] == pytest.approx(sum(lengths[:3]) / 3)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"prompt": "x"', "not JSON with Unicode text"),
        ('{"text": "x"}', 'needs "prompt"'),
        ('{"prompt": ""}', 'needs "prompt"'),
        ('{"prompt": 3}', 'needs "prompt"'),
        ('{"prompt": null}', 'needs "prompt"'),
        ('"x"', 'needs "prompt"'),
        ("[]", 'needs "prompt"'),
        ('{"messages": []}', 'needs "prompt"'),
        ('{"messages": ["x"]}', 'needs "prompt"'),
        ('{"messages": [{"role": "user"}]}', 'needs "prompt"'),
        ('{"messages": [{"content": "x"}]}', 'needs "prompt"'),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', 'needs "prompt"'),
        ('{"prompt": "half an emoji: \\ud83d"}', "surrogate"),
        ('{"messages": [{"role": "user", "content": "\\udc00"}]}', "surrogate"),
    ],
)
def test_a_bad_row_is_named_by_its_number(tmp_path, line, says):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n\n{line}\n{{"prompt": "fine too"}}\n')
    with pytest.raises(UserError, match=rf"a\.jsonl, row 3: .*{says}") as error:
        prepare(tmp_path / "out", settings(file))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [(None, "cannot be read"), (b"", "holds no prompts"), (b"\n \r\n", "holds no prompts"), (b'{"prompt": "\xff"}', "cannot be read")],
)
def test_a_file_without_usable_rows_is_named(tmp_path, raw, says):
    file = tmp_path / "a.jsonl"
    if raw is not None:
        file.write_bytes(raw)
    with pytest.raises(UserError, match=rf"^data\.path=.*a\.jsonl: {says}"):
        prepare(tmp_path / "out", settings(file))


def test_empty_splits_are_refused(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", numbered(4))
    with pytest.raises(UserError, match="training split is empty"):
        prepare(tmp_path / "a", settings(file, test=4))
    with pytest.raises(UserError, match="training split is empty.*too_long"):
        prepare(tmp_path / "b", settings(file, max_prompt_tokens=2))
    long_ones = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "a"}, {"prompt": "b " * 400}])
    test_is_long = next(seed for seed in range(20) if long_test(tmp_path, long_ones, seed))
    with pytest.raises(UserError, match=r"^data\.test=1: no prompt is left"):
        prepare(tmp_path / "c", settings(long_ones, test=1, max_prompt_tokens=100, seed=test_is_long))


def long_test(tmp_path, file, seed):
    _, splits = prepare(tmp_path / f"seed{seed}", settings(file, test=1, max_prompt_tokens=10**6, seed=seed))
    return len(splits["test"][0].input_ids) > 100


def test_splits_are_disjoint_exact_and_say_nothing_of_the_files_order(tmp_path):
    rows = numbered(40)
    shuffled = rows[:]
    random.Random(1).shuffle(shuffled)
    config = {"test": 7, "validation": 5, "train": 20}
    metrics, splits = prepare(tmp_path / "out1", settings(write_jsonl(tmp_path / "1" / "a.jsonl", rows), **config))
    prepare(tmp_path / "out2", settings(write_jsonl(tmp_path / "2" / "a.jsonl", shuffled), **config))
    prepare(tmp_path / "out3", settings(write_jsonl(tmp_path / "3" / "a.jsonl", rows), **config))
    assert {s: len(p) for s, p in splits.items()} == {"train": 20, "validation": 5, "test": 7} == {s: metrics[s] for s in SPLITS}
    assert len({p.id for prompts in splits.values() for p in prompts}) == 32
    first = (tmp_path / "out1" / "prompts.parquet").read_bytes()
    assert (tmp_path / "out2" / "prompts.parquet").read_bytes() == first
    assert (tmp_path / "out3" / "prompts.parquet").read_bytes() == first
    _, other = prepare(tmp_path / "out4", settings(tmp_path / "1" / "a.jsonl", **config, seed=1))
    assert {p.id for p in other["test"]} != {p.id for p in splits["test"]}


def test_a_prompt_has_one_id_in_every_split_order_and_file(tmp_path):
    rows = numbered(12)
    ids = {}
    for number, chosen in enumerate((rows, rows[::-1], rows[3:8])):
        file = write_jsonl(tmp_path / f"{number}.jsonl", chosen)
        _, splits = prepare(tmp_path / f"out{number}", settings(file, test=2, seed=number))
        for prompts in splits.values():
            for p in prompts:
                assert ids.setdefault(p.messages[0]["content"], p.id) == p.id == artifacts.prompt_id(p.messages)
    assert len(set(ids.values())) == len(ids) == 12


def test_minicode_splits_share_no_problem_and_bring_their_tests(tmp_path):
    _, splits = prepare(tmp_path / "out", PreparePromptsConfig(source="minicode", train=11, validation=2, test=5))
    assert {s: len(p) for s, p in splits.items()} == {"train": 11, "validation": 2, "test": 5}
    assert len({p.meta["problem_id"] for prompts in splits.values() for p in prompts}) == 18
    for split, prompts in splits.items():
        for prompt, problem in zip(prompts, minicode.generate(split=split, count=len(prompts), seed=0), strict=True):
            assert prompt.messages == [{"role": "user", "content": problem.prompt}]
            assert (prompt.meta["tests"], prompt.meta["solution"]) == (problem.tests, problem.solution)


def test_more_generated_problems_than_there_are_name_the_setting(tmp_path):
    with pytest.raises(UserError, match=r"data\.test=99999: 99999 minicode problems asked for, but the test split has \d+"):
        prepare(tmp_path / "out", PreparePromptsConfig(source="minicode", train=4, test=99999))


def test_a_models_own_tokenizer_is_used(tmp_path, base_folder):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in AWKWARD])
    _, splits = prepare(tmp_path / "out", settings(file, tokenizer=str(base_folder)))
    own, saved = load_tokenizer(base_folder), load_tokenizer(tmp_path / "out" / "tokenizer")
    for prompt in splits["train"]:
        text = own.apply_chat_template(prompt.messages, add_generation_prompt=True, tokenize=False)
        assert prompt.input_ids == own(text, add_special_tokens=False)["input_ids"] == saved(text, add_special_tokens=False)["input_ids"]


def test_a_tokenizer_without_a_chat_template_is_refused(tmp_path, base_folder):
    bare = tmp_path / "bare"
    shutil.copytree(base_folder, bare, ignore=shutil.ignore_patterns("chat_template*"))
    file = write_jsonl(tmp_path / "a.jsonl", numbered(2))
    with pytest.raises(UserError, match=r"^data\.tokenizer: it has no chat template"):
        prepare(tmp_path / "out", settings(file, tokenizer=str(bare)))


@pytest.mark.parametrize("returns_dict", [True, False])
def test_what_a_chat_template_returns_by_default_does_not_matter(returns_dict):
    class Tokenizer:
        chat_template = "x"

        def apply_chat_template(self, messages, *, add_generation_prompt=False, tokenize=not returns_dict, return_dict=returns_dict):
            assert add_generation_prompt and tokenize
            return {"input_ids": [5, 6], "attention_mask": [1, 1]} if return_dict else [5, 6]

    assert template(Tokenizer(), [{"role": "user", "content": "x"}]) == [5, 6]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "file"}, "data.path is missing"),
        ({"source": "minicode"}, "data.train is missing"),
        ({"source": "minicode", "train": 0}, "data.train is missing"),
        ({"source": "nonsense"}, "nonsense"),
        ({"source": "minicode", "train": -1}, "^train must not be negative"),
        ({"source": "minicode", "train": 3, "test": -1}, "^test must not be negative"),
    ],
)
def test_bad_settings_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        PreparePromptsConfig(**changes)
