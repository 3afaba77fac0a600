"""OpenCodeInstruct and OpenThoughts2 in their exact schemas, and what holds for every source: rules counted, order by content, fit by tokens."""

from __future__ import annotations

import hashlib
import json
import random
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jacobi_core.hub import load_tokenizer
from tasks import artifacts
from tasks.prepare_prompts import SPLITS, PreparePromptsConfig, run
from tasks.prepare_prompts.config import OpenCodeInstructRule
from tasks.prepare_prompts.template import template_hash
from tasks.stage import StageContext, UserError
from tests.tasks.tiny_benchmarks import SHOWN, write_benchmarks
from tests.tasks.tiny_stage import write_jsonl

TASK = "\tWrite `f`.\r\n\r\n    keep  this   \n"
CODE_COLUMNS = ("id", "input", "output", "domain", "generation_algorithm", "llm_judgement", "unit_tests", "tests_execution_status")
DIMENSIONS = ("requirement_conformance", "logical_correctness", "edge_case_consideration")


def code_row(number, *, score="1", judge=(5, 5, 5), text=None):
    """All nine columns, all text, as the data set has them."""
    judgement = {name: {"score": value, "justification": "…"} for name, value in zip(DIMENSIONS, judge, strict=True)}
    values = [f"{number:032x}", text or f"{TASK}{number}", f"def f(): return {number}", "generic", "self-instruct", json.dumps(judgement, indent=1)]
    row = dict(zip(CODE_COLUMNS, [*values, '["assert f()"]', '["pass"]'], strict=True))
    return row | {"average_test_score": score}


def thought_row(number, source, *, turns=None):
    asked = f"What is {number} + {number}?  \n"
    answer = {"from": "assistant", "value": f"<think>\n…\n</think>\n\n{2 * number}"}
    return {"conversations": turns or [{"from": "user", "value": asked}, answer], "question": asked.strip(), "source": source, "id": number}


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def prepare(folder, base, **changes):
    """(metrics, train prompts) of a run with the base's tokenizer and no held-out split."""
    folder.mkdir(parents=True)
    config = PreparePromptsConfig(**{"tokenizer": str(base), "test": 0, **changes})
    metrics = run(config, {}, folder, StageContext())
    return metrics, artifacts.read_prompts(folder, "train")


def texts(prompts):
    return {p.messages[-1]["content"] for p in prompts}


# ---- OpenCodeInstruct

SCORED = [
    code_row(0, score="1"),
    code_row(1, score="1.0"),
    code_row(2, score="0.9"),
    code_row(3, judge=(4, 5, 5)),
    code_row(4, judge=(5, 3, 5)),
    code_row(5, judge=(5, 5, 2)),
    code_row(6, score="0.5", judge=(1, 1, 1)),
    code_row(7),
]


@pytest.mark.parametrize(
    ("rule", "kept", "counts"),
    [
        ({}, {0, 1, 7}, {"test_score": 2, "requirement_conformance": 1, "logical_correctness": 1, "edge_case_consideration": 1}),
        ({"min_judge_score": None}, {0, 1, 3, 4, 5, 7}, {"test_score": 2}),
        ({"min_judge_score": 3}, {0, 1, 3, 4, 7}, {"test_score": 2, "edge_case_consideration": 1}),
        ({"min_test_score": 0.9, "min_judge_score": None}, {0, 1, 2, 3, 4, 5, 7}, {"test_score": 1}),
        ({"min_test_score": None}, {0, 1, 2, 7}, dict.fromkeys(DIMENSIONS, 1) | {"requirement_conformance": 2}),
    ],
)
def test_code_rows_are_kept_by_rule_and_counted_under_the_first_that_they_break(tmp_path, base_folder, rule, kept, counts):
    file = write_parquet(tmp_path / "train-00000.parquet", SCORED)
    metrics, prompts = prepare(
        tmp_path / "out", base_folder, source="open_code_instruct", path=str(file), open_code_instruct=OpenCodeInstructRule(**rule)
    )
    assert texts(prompts) == {f"{TASK}{i}" for i in kept}
    dropped = {name.removeprefix("dropped_"): value for name, value in metrics.items() if name.startswith("dropped_") and value}
    assert dropped == counts and metrics["train"] == len(kept)


def test_a_code_prompt_brings_its_origin_and_score_not_its_answer(tmp_path, base_folder):
    file = write_parquet(tmp_path / "a.parquet", [code_row(9, score="1")])
    _, (prompt,) = prepare(tmp_path / "out", base_folder, source="open_code_instruct", path=str(file))
    assert prompt.messages == [{"role": "user", "content": f"{TASK}9"}]
    assert prompt.meta == {"problem_set": "open_code_instruct", "source_id": f"{9:032x}", "domain": "generic", "test_score": 1.0}


@pytest.mark.parametrize("field", ["input", "llm_judgement", "average_test_score"])
def test_a_code_file_without_a_field_is_refused_naming_it(tmp_path, base_folder, field):
    rows = [{k: v for k, v in code_row(i).items() if k != field} for i in range(3)]
    for file in (write_parquet(tmp_path / "a.parquet", rows), write_jsonl(tmp_path / "a.jsonl", rows)):
        with pytest.raises(UserError, match=rf"^data\.path=.*: field '{field}' is missing; it has: id, .*tests_execution_status"):
            prepare(tmp_path / f"out{file.suffix}", base_folder, source="open_code_instruct", path=str(file))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"average_test_score": "high"}, "'average_test_score' holds 'high', no number"),
        ({"average_test_score": "nan"}, "'average_test_score' holds 'nan'"),
        ({"llm_judgement": "good"}, "'llm_judgement' is no JSON"),
        ({"llm_judgement": '{"score": 5}'}, "'llm_judgement.requirement_conformance' holds None"),
        ({"input": ""}, "'input' holds no text"),
    ],
)
def test_a_code_row_of_another_schema_ends_the_run_early_and_is_counted_late(tmp_path, base_folder, change, says):
    early = write_jsonl(tmp_path / "early.jsonl", [code_row(0), code_row(1) | change])
    with pytest.raises(UserError, match=rf"early\.jsonl, row 2: field {says}"):
        prepare(tmp_path / "early", base_folder, source="open_code_instruct", path=str(early))
    late = write_jsonl(tmp_path / "late.jsonl", [*map(code_row, range(100)), code_row(100) | change])
    metrics, prompts = prepare(tmp_path / "late", base_folder, source="open_code_instruct", path=str(late))
    assert len(prompts) == 100 and metrics["dropped_unreadable"] == 1


# ---- OpenThoughts2

THOUGHTS = [thought_row(i, source) for i, source in enumerate(["automath", "dolphin", "nvidia_math", "automath", "glaive"])]


def test_thoughts_of_the_allowed_sources_are_asked_as_they_were(tmp_path, base_folder):
    file = write_parquet(tmp_path / "train-00000.parquet", THOUGHTS)
    settings = {"source": "open_thoughts", "path": str(file), "open_thoughts_sources": ["automath", "nvidia_math"]}
    metrics, prompts = prepare(tmp_path / "out", base_folder, **settings)
    assert texts(prompts) == {f"What is {i} + {i}?  \n" for i in (0, 2, 3)}
    assert metrics["dropped_source"] == 2
    assert {p.meta["source"] for p in prompts} == {"automath", "nvidia_math"} and prompts[0].meta["problem_set"] == "open_thoughts"


@pytest.mark.parametrize(("sources", "says"), [([], "is empty: name the sources to keep"), (["automath", "maths"], "maths is nowhere in the data")])
def test_the_sources_that_there_are_are_listed_with_their_rows(tmp_path, base_folder, sources, says):
    file = write_parquet(tmp_path / "a.parquet", THOUGHTS)
    with pytest.raises(UserError, match=rf"^data\.open_thoughts_sources: {says}; .* automath \(2\), dolphin \(1\), nvidia_math \(1\), glaive \(1\)$"):
        prepare(tmp_path / "out", base_folder, source="open_thoughts", path=str(file), open_thoughts_sources=sources)


@pytest.mark.parametrize(
    "turns",
    [[{"from": "user", "value": "x"}], [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}], [{"role": "user"}, {"role": "assistant"}]],
)
def test_conversations_of_another_form_are_refused_early_and_counted_late(tmp_path, base_folder, turns):
    early = write_jsonl(tmp_path / "early.jsonl", [thought_row(1, "automath", turns=turns)])
    settings = {"source": "open_thoughts", "open_thoughts_sources": ["automath"]}
    with pytest.raises(UserError, match=r"early\.jsonl, row 1: field 'conversations' needs exactly one user and one assistant turn"):
        prepare(tmp_path / "early", base_folder, path=str(early), **settings)
    rows = [*(thought_row(i, "automath") for i in range(100)), thought_row(100, "automath", turns=turns)]
    metrics, prompts = prepare(tmp_path / "late", base_folder, path=str(write_jsonl(tmp_path / "late.jsonl", rows)), **settings)
    assert len(prompts) == 100 and metrics["dropped_unreadable"] == 1


def test_a_thoughts_file_without_a_field_is_refused_naming_it(tmp_path, base_folder):
    file = write_parquet(tmp_path / "a.parquet", [{"question": "q", "source": "automath", "id": 1}])
    with pytest.raises(UserError, match=r"field 'conversations' is missing; it has: question, source, id"):
        prepare(tmp_path / "out", base_folder, source="open_thoughts", path=str(file), open_thoughts_sources=["automath"])


# ---- every source


def test_neither_order_nor_sharding_nor_a_differing_duplicate_changes_a_byte(tmp_path, base_folder):
    rows = [code_row(i % 40, score="1" if i < 40 else "1.0") | {"id": f"{i:032x}"} for i in range(60)]  # 20 tasks twice, under two ids
    outputs = []
    for number in range(3):
        shuffled = rows[:]
        random.Random(number).shuffle(shuffled)
        for shard in range(number + 1):
            write_parquet(tmp_path / f"in{number}" / f"train-{shard:05d}.parquet", shuffled[shard :: number + 1])
        folder = tmp_path / f"out{number}"
        metrics, _ = prepare(folder, base_folder, source="open_code_instruct", path=str(tmp_path / f"in{number}"), test=10, validation=5)
        assert [metrics[split] for split in SPLITS] == [25, 5, 10] and metrics["dropped_duplicate"] == 20
        outputs.append((folder / "prompts.parquet").read_bytes())
        assert sorted(path.name for path in folder.iterdir()) == ["prompts.parquet", "tokenizer"]  # nothing of the sorting is left
    assert outputs[0] == outputs[1] == outputs[2]


def test_the_field_of_plain_data_is_chosen_and_a_wrong_one_explained(tmp_path, base_folder):
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": "Why?", "id": 1}])
    _, prompts = prepare(tmp_path / "out", base_folder, source="file", path=str(file), prompt_field="question")
    assert texts(prompts) == {"Why?"}
    with pytest.raises(UserError, match=r'row 1: needs "prompt" .*; it has: question, id; set data\.prompt_field to the field that holds the text$'):
        prepare(tmp_path / "out2", base_folder, source="file", path=str(file))


def test_messages_in_csv_are_json(tmp_path, base_folder):
    messages = [{"role": "user", "content": "a,\r\n\t"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    quoted = json.dumps(messages).replace('"', '""')
    (tmp_path / "a.csv").write_bytes(f'messages\r\n"{quoted}"\r\n'.encode())
    _, (prompt,) = prepare(tmp_path / "out", base_folder, source="file", path=str(tmp_path / "a.csv"))
    assert prompt.messages == messages
    (tmp_path / "b.csv").write_text("messages\nhello\n")
    with pytest.raises(UserError, match=r'b\.csv, row 1: "messages" is text, but not JSON'):
        prepare(tmp_path / "out2", base_folder, source="file", path=str(tmp_path / "b.csv"))


def test_human_eval_rows_are_read_from_parquet(tmp_path, base_folder):
    row = {
        "task_id": "T/0",
        "prompt": "def one():\n\t'''1'''\n",
        "entry_point": "one",
        "canonical_solution": "\treturn 1\n",
        "test": "def check(f): pass\n",
    }
    file = write_parquet(tmp_path / "a.parquet", [row, row | {"task_id": "T/1", "prompt": "def two():\n"}])
    _, prompts = prepare(tmp_path / "out", base_folder, source="human_eval", path=str(file))
    assert {p.meta["problem_id"] for p in prompts} == {"T/0", "T/1"} and any(row["prompt"].strip("\n") in text for text in texts(prompts))


@pytest.mark.parametrize("name, holds", [("mbpp", "tests"), ("gsm8k", "answer"), ("math500", "answer"), ("human_eval", "tests")])
def test_published_benchmarks_bring_what_judges_an_answer(tmp_path, base_folder, name, holds):
    path = write_benchmarks(tmp_path)[name]
    _, prompts = prepare(tmp_path / "out", base_folder, source=name, path=path, max_prompt_tokens=4000)
    assert len(prompts) == SHOWN and all(p.meta[holds] and p.meta["problem_set"] == name for p in prompts)


LONG = "Sum the numbers 🙂 of a list, then " * 40


def test_a_long_prompt_is_truncated_to_the_limit_exactly_and_counted(tmp_path, base_folder):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": LONG}, {"prompt": LONG + "!"}, {"prompt": "short"}])
    settings = {"source": "file", "path": str(file), "system": "Be brief.", "max_prompt_tokens": 60}
    metrics, prompts = prepare(tmp_path / "out", base_folder, too_long="truncate", **settings)
    cut = next(p for p in prompts if p.messages[-1]["content"] != "short")
    content = cut.messages[-1]["content"]
    assert LONG.startswith(content) and content and len(cut.input_ids) <= 60
    tokenizer = load_tokenizer(base_folder)
    longer = [*cut.messages[:-1], {"role": "user", "content": LONG[: len(content) + 1]}]
    assert len(tokenizer.apply_chat_template(longer, add_generation_prompt=True, return_dict=False)) > 60
    assert cut.id == artifacts.prompt_id(cut.messages)
    assert (metrics["truncated"], metrics["dropped_duplicate"], metrics["dropped_too_long"], metrics["train"]) == (2, 1, 0, 2)
    metrics, prompts = prepare(tmp_path / "dropped", base_folder, **settings)
    assert texts(prompts) == {"short"} and (metrics["truncated"], metrics["dropped_too_long"]) == (0, 2)


def test_a_prompt_of_which_nothing_fits_is_dropped(tmp_path, base_folder):
    file = write_jsonl(
        tmp_path / "a.jsonl", [{"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": "x"}]}, {"prompt": "ok"}]
    )
    metrics, prompts = prepare(tmp_path / "out", base_folder, source="file", path=str(file), max_prompt_tokens=60, too_long="truncate")
    assert texts(prompts) == {"ok"} and (metrics["truncated"], metrics["dropped_too_long"]) == (0, 1)


def test_the_templates_hash_is_recorded(tmp_path, base_folder):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "x"}])
    prepare(tmp_path / "out", base_folder, source="file", path=str(file))
    tokenizer = load_tokenizer(base_folder)
    expected = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    assert pq.read_schema(tmp_path / "out" / "prompts.parquet").metadata[b"chat_template_sha256"].decode() == expected == template_hash(tokenizer)
    tokenizer.chat_template += " "
    assert template_hash(tokenizer) != expected


@pytest.fixture
def picky_base(tmp_path, base_folder):
    """Its template refuses a system message, as some models' do, and a text that holds BAD."""
    folder = tmp_path / "picky"
    shutil.copytree(base_folder, folder)
    template = (folder / "chat_template.jinja").read_text()
    refusal = (
        "{%- for m in messages %}{%- if m.role == 'system' or 'BAD' in m.content %}{{ raise_exception('not in my house') }}{%- endif %}{%- endfor %}"
    )
    (folder / "chat_template.jinja").write_text(refusal + template)
    return folder


def test_prompts_that_the_template_refuses_are_dropped_counted_and_told_once(tmp_path, picky_base, caplog):
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in ("good", "BAD 1", "BAD 2", "fine")])
    metrics, prompts = prepare(tmp_path / "out", picky_base, source="file", path=str(file))
    assert texts(prompts) == {"good", "fine"} and metrics["dropped_template"] == 2
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert "the chat template refuses one that begins 'BAD" in warning and "not in my house" in warning
    with pytest.raises(UserError, match=r"training split is empty .*dropped: template 4"):
        prepare(tmp_path / "all", picky_base, source="file", path=str(file), system="Be brief.")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source": "open_code_instruct"}, "data.path is missing: data.source=open_code_instruct needs a file, a folder or a hub id"),
        ({"source": "file", "path": "x", "max_prompt_tokens": 0}, "^max_prompt_tokens must be at least 1"),
        ({"source": "file", "path": "x", "too_long": "cut"}, "cut"),
    ],
)
def test_bad_settings_are_named(changes, says):
    with pytest.raises(ValueError, match=says):
        PreparePromptsConfig(**changes)


@pytest.mark.parametrize(("field", "value"), [("min_test_score", 1.5), ("min_judge_score", 6), ("min_judge_score", -1)])
def test_a_rule_that_nothing_could_meet_is_refused(field, value):
    with pytest.raises(ValueError, match=f"^{field} must lie between"):
        OpenCodeInstructRule(**{field: value})
