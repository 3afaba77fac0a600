"""What decoders the benchmark sets against each other, and the models and prompts they decode."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.measure import seconds
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.generate import generate
from jacobi_core.decoding.static_forward import StaticForward, widths_for
from jacobi_core.decoding.tokens import TokenRules
from jacobi_core.hub import load_model, load_tokenizer

Contestant = Callable[[torch.Tensor], tuple[int, int, float]]
RUNNER = Path(__file__).with_name("released_runner.py")


@dataclass(frozen=True)
class Subject:
    """A model under test. prompts: long [L] each. folder: where it lies, None for a random one."""

    label: str
    model: PreTrainedModel
    rules: TokenRules
    prompts: list[torch.Tensor]
    copying: list[torch.Tensor]
    new_tokens: int
    folder: Path | None = None

    def ours(self, method: Method, block_size: int, *, compiled: bool = False, **knobs) -> Contestant:
        config = DecodingConfig(method=method, block_size=block_size, max_new_tokens=self.new_tokens, **knobs)
        forward = None
        if compiled:
            capacity = max(map(len, self.prompts)) + self.new_tokens
            widths = sorted({*range(16, block_size, 16), widths_for(config)[-1]})
            forward = StaticForward(self.model, capacity=capacity, widths=widths, compiled=True)

        def run(prompt: torch.Tensor) -> tuple[int, int, float]:
            took, found = seconds(lambda: generate(self.model, prompt, config, rules=self.rules, forward=forward))
            return found.stats.tokens, found.stats.forwards, took

        return run

    def transformers(self, **settings) -> Contestant:
        """transformers' own generate(), greedy, every setting that would make it another task reset. Forwards are counted by a hook."""
        settings |= {
            "do_sample": False,
            "max_new_tokens": self.new_tokens,
            "repetition_penalty": 1.0,
            "eos_token_id": sorted(self.rules.eos_ids) or None,
        }
        settings["pad_token_id"] = max(self.rules.eos_ids, default=0)

        def run(prompt: torch.Tensor) -> tuple[int, int, float]:
            calls: list[int] = []
            hook = self.model.register_forward_pre_hook(lambda *_: calls.append(1))
            try:
                took, found = seconds(
                    lambda: type(self.model).generate(self.model, prompt[None], attention_mask=torch.ones_like(prompt)[None], **settings)
                )
            finally:
                hook.remove()
            return found.shape[1] - len(prompt), len(calls), took

        return run


class Released:
    """The authors' decoder in its own environment (benchmarks/released_runner.py), one prompt at a time. Use as a context manager."""

    def __init__(self, subject: Subject, directory: str, python: str) -> None:
        eos = sorted(subject.rules.eos_ids, key=lambda i: i != load_tokenizer(subject.folder).eos_token_id)
        self._job = {
            "model": str(subject.folder),
            "max_new_tokens": subject.new_tokens,
            "eos_ids": eos,
            "pad_id": subject.model.config.pad_token_id or eos[0],
            "threads": torch.get_num_threads(),
        }
        self._subject = subject
        self._process = subprocess.Popen([python, str(RUNNER), directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Released:
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        self._process.wait()

    def at(self, block_size: int) -> Contestant:
        """Raises RuntimeError where its answer is not greedy AR's: a figure would then compare two different texts."""

        def run(prompt: torch.Tensor) -> tuple[int, int, float]:
            self._process.stdin.write(json.dumps(self._job | {"prompts": [prompt.tolist()], "block_sizes": [block_size]}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"{RUNNER.name} ended with exit code {self._process.wait()}")
            found = json.loads(line)["blocks"][str(block_size)][0]
            config = DecodingConfig(method=Method.ar, block_size=1, max_new_tokens=self._subject.new_tokens)
            expected = generate(self._subject.model, prompt, config, rules=self._subject.rules).new_tokens.tolist()
            if found["tokens"] != expected:
                raise RuntimeError(f"the released decoder's answer at block {block_size} is not greedy AR's: its figures do not count")
            return len(found["tokens"]), found["forwards"], found["seconds"]

        return run


def random_llama(prompts: int) -> Subject:
    """35 M parameters, 8 layers, random."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8, eos_token_id=None
    )
    model = LlamaForCausalLM(config).eval()
    texts = list(torch.randint(0, 8192, (prompts, 48), generator=torch.Generator().manual_seed(0)))
    return Subject("llama-35M", model, TokenRules.of(model), texts, [], 64)


def minicode(results: str, prompts: int) -> list[Subject]:
    """The base and the last model of a finished quickstart. results: its results.json."""
    from tasks.problem_sets.minicode import generate as problems

    base, final = base_and_final(results)
    texts = [p.prompt for p in problems(split="test", count=prompts, seed=0)]
    return [trained("minicode-base", base, texts), trained("minicode-round2", final, texts)]


def base_and_final(results: str) -> tuple[Path, Path]:
    """The folders of a pipeline's first and last model. A store may hold several bases: it is the finished one of the last model's shape."""
    from tasks.base_model.stage import PROVENANCE

    def shape(folder: Path) -> list[int]:
        config = json.loads((folder / "config.json").read_text())
        return [config[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")]

    final = Path(json.loads(Path(results).read_text())["final_model"])
    bases = [path.parent for path in final.parent.glob(f"base-*/{PROVENANCE}") if (path.parent / "manifest.json").exists()]
    return next(folder for folder in bases if shape(folder) == shape(final)), final


def smollm2(folder: str, prompts: int) -> Subject:
    texts = [f"Write a Python function that returns the {i + 2}th power of a number." for i in range(prompts)]
    return trained("SmolLM2-135M", Path(folder), texts, [*_code_edits(), *_json_reformats()], new_tokens=64)


def trained(label: str, folder: Path, texts: Sequence[str], copying: Sequence[str] = (), *, new_tokens: int = 96) -> Subject:
    """A checkpoint, and these texts as a user would say them to it."""
    model, tokenizer = load_model(folder), load_tokenizer(folder)

    def ids(text: str) -> torch.Tensor:
        return torch.tensor(tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False))

    return Subject(label, model, TokenRules.of(model, tokenizer), [ids(t) for t in texts], [ids(t) for t in copying], new_tokens, folder)


def _code_edits() -> list[str]:
    """10 prompts: give a function back with one thing changed."""
    found = []
    for i, (name, items, action) in enumerate(
        [
            ("total_price", "orders", "price * quantity"),
            ("word_lengths", "words", "len(word)"),
            ("even_squares", "numbers", "number ** 2"),
            ("clean_lines", "lines", "line.strip()"),
            ("file_sizes", "paths", "path.stat().st_size"),
            ("upper_names", "names", "name.upper()"),
            ("daily_means", "days", "sum(day) / len(day)"),
            ("user_emails", "users", "user['email']"),
            ("row_sums", "rows", "sum(row)"),
            ("first_letters", "titles", "title[0]"),
        ]
    ):
        item = items[:-1]
        body = f"        value = {action}\n        if value is not None:\n            result.append(value)\n"
        code = f"def {name}({items}):\n    result = []\n    for {item} in {items}:\n{body}    return result"
        change = ["Rename the variable result to output", "Add a docstring", "Rename the function to compute", "Add type hints", "Return a tuple"][
            i % 5
        ]
        found.append(f"{change} in this Python function and show the whole function again, unchanged otherwise:\n\n```python\n{code}\n```")
    return found


def _json_reformats() -> list[str]:
    """10 prompts: write a JSON record over several lines."""
    people = ["Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Tony", "Leslie", "John", "Margaret"]
    towns = ["London", "New York", "Manchester", "Rotterdam", "Los Angeles", "Milwaukee", "Colombo", "Brooklyn", "Chicago", "Paoli"]
    found = []
    for i, (person, town) in enumerate(zip(people, towns, strict=True)):
        record = json.dumps(
            {"name": person, "age": 30 + 3 * i, "city": town, "languages": ["Python", "C", "Lisp"][: 1 + i % 3], "active": i % 2 == 0}
        )
        found.append(f"Rewrite this JSON with one key per line and two spaces of indentation. Answer with the JSON only.\n\n{record}")
    return found
