"""Three problems of each benchmark as local files, and a tiny model that has learnt to answer two of each rightly and the last one wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from jacobi_core.hub import save_checkpoint
from tasks.base_model.tokenizer import train_tokenizer
from tasks.problem_sets.published import LOADERS
from tests.tasks.tiny_stage import write_jsonl

KNOWN, SHOWN = 2, 3  # problems that the model solves, of those there are
ANSWER_TOKENS = 64  # more than any answer it has learnt

HUMAN_EVAL = [
    {
        "task_id": f"Tiny/{i}",
        "prompt": f'import math\n\n\ndef root_{i}(x: int) -> int:\n    """ Whole root of x, plus {i}.\n    >>> root_{i}(9)\n    {3 + i}\n    """\n',
        "entry_point": f"root_{i}",
        "canonical_solution": f"    return math.isqrt(x) + {i}\n",
        "test": f"def check(candidate):\n    assert candidate(9) == {3 + i}\n    assert candidate(16) == {4 + i}\n",
    }
    for i in range(SHOWN)
]
MBPP = [
    {
        "task_id": number,
        "text": f"Write a function to add {number} to a number.",
        "code": f"def add_{number}(x):\r\n\treturn x + {number}",
        "test_list": [f"assert add_{number}({k}) == {k + number}" for k in range(3)],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
    for number in (1, 2, 3, 4, 11, 12, 510, 511)
]
GSM8K = [
    {"question": f"Ann has {i + 3} boxes of 1,200 eggs. How many eggs?", "answer": f"{i + 3}*1200\n#### {(i + 3) * 1200:,}"} for i in range(SHOWN)
]
MATH500 = [
    {"problem": f"Compute ${i + 1}/2 + 1/3$.", "solution": "", "answer": rf"\frac{{{3 * (i + 1) + 2}}}{{6}}", "unique_id": f"test/{i}.json"}
    for i in range(SHOWN)
]


def write_benchmarks(folder: Path) -> dict[str, str]:
    """Path of each data set's file."""
    rows = {"human_eval": HUMAN_EVAL, "mbpp": MBPP, "gsm8k": GSM8K, "math500": MATH500}
    return {name: str(write_jsonl(folder / f"{name}.jsonl", found)) for name, found in rows.items()}


def lessons(files: dict[str, str]) -> list[tuple[list[dict[str, str]], str]]:
    """Messages and the answer to learn, for each problem of these data sets as each of our tasks asks it."""
    box = {"role": "system", "content": "Please reason step by step, and put your final answer within \\boxed{}."}

    def ask(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    def problems(name: str) -> list:
        return LOADERS[name](files[name]) if name in files else []

    found = []
    for i, p in enumerate(problems("human_eval")):
        found.append((ask(p.prompt), f"Sure!\n```python\n{p.solution if i < KNOWN else p.preamble}```"))
    for i, p in enumerate(problems("mbpp")):
        found.append((ask(p.prompt), f"```python\n{p.solution}\n```" if i < KNOWN else f"```\ndef {p.entry_point}(x): return 0\n```"))
    for i, q in enumerate(problems("gsm8k")):
        answer = f"{int(q.answer):,}" if i < KNOWN else "17"
        found += [(ask(q.prompt), f"So it is\n#### {answer}"), ([box, *ask(q.question)], f"It is \\boxed{{{answer}}}.")]
    for i, q in enumerate(problems("math500")):
        answer = q.answer.replace("frac{5}", "frac5") if i < KNOWN else "0"
        found += [(ask(q.prompt), f"${answer}$, so \\boxed{{{answer}}}."), ([box, *ask(q.question)], f"\\fbox{{{answer}}}")]
    return found


def build_model(folder: Path, learnt: list[tuple[list[dict[str, str]], str]], *, untrained: bool = False) -> None:
    """A checkpoint with its decoder that gives the learnt answers, greedily; untrained: one that only has the words for them, in no time."""
    texts = [text for messages, answer in learnt for text in (*(m["content"] for m in messages), answer)]
    tokenizer = train_tokenizer(texts, vocab_size=768)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    if not untrained:
        _learn(model, tokenizer, learnt)
    ends = GenerationConfig(do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    save_checkpoint(model.eval(), tokenizer, folder, generation_config=ends, with_decoder=True, block_size=8)


def _learn(model: Qwen2ForCausalLM, tokenizer, learnt: list[tuple[list[dict[str, str]], str]]) -> None:
    pairs = []
    for messages, answer in learnt:
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
        pairs.append((prompt, [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]))
    pairs.sort(key=lambda pair: len(pair[0]))
    batches = [_batch(pairs[:-SHOWN]), _batch(pairs[-SHOWN:])]  # MBPP's are several times as long as all others
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0)
    for _ in range(300):
        optimizer.zero_grad()
        worst = 0.0
        for ids, labels in batches:
            loss = model(input_ids=ids, labels=labels).loss  # right padding: causal attention never sees it
            loss.backward()
            worst = max(worst, loss.item())
        optimizer.step()
        if worst < 0.05:
            return
    raise AssertionError(f"the tiny model has not learnt its answers (loss {worst:.3f})")


def _batch(pairs: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids, labels = torch.zeros(len(pairs), longest, dtype=torch.long), torch.full((len(pairs), longest), -100)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def jsonl(path: str | Path) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
