"""`python -m pipelines.doctor model=DIR [prompts=FILE.jsonl] [report=FILE.json]`: is parallel decoding lossless on this machine?

Exit codes: 0 lossless, 1 a defect (never a numerical tie), 2 the input is wrong. `help` lists the settings.
"""

from __future__ import annotations

import gc
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pipelines.arguments import make_parent, run_tool
from pipelines.checkpoints import encode, encode_raw, load_model, load_tokenizer
from tasks import artifacts
from tasks.prepare_prompts import read_messages
from tasks.stage import DTYPES, UserError, check_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from jacobi_core.decoding.doctor import Certificate

# Without a file of the user's: plain prose, code, and a text whose answer is likely to copy from it.
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Write this list again, sorted by price: apples 3, pears 7, plums 5, cherries 12, quinces 1.",
)


@dataclass
class DoctorArguments:
    """python -m pipelines.doctor model=DIR: every decoding method against greedy decoding, token for token, on this machine.

    float64: any difference is a defect. float32: one with AR's two best logits more than 1e-3 apart. bfloat16: more than 1/32 of the
    largest logit apart (4 units in the last place). Exit code 0: lossless, 1: a defect, 2: wrong input.
    """

    model: Annotated[str, "checkpoint folder or hub id"]
    prompts: Annotated[str | None, 'jsonl file, one {"prompt": text} or {"messages": [...]} per line; none: a few built-in ones'] = None
    max_new_tokens: Annotated[int, "cap on every answer"] = 64
    block_sizes: Annotated[list[int], "tokens refreshed by one forward"] = field(default_factory=lambda: [4, 16, 64])
    dtypes: Annotated[list[str], "precisions to load the model in"] = field(default_factory=lambda: ["float64", "float32", "bfloat16"])
    report: Annotated[str | None, "JSON file to write"] = None
    trust_remote_code: Annotated[bool, "may the checkpoint bring its own Python code?"] = False

    def __post_init__(self) -> None:
        for dtype in self.dtypes:
            check_dtype("dtypes", dtype)
        self.dtypes = sorted(set(self.dtypes), key=("float64", *DTYPES).index)  # the proof first
        for size in (*self.block_sizes, self.max_new_tokens):
            if size < 1:
                raise ValueError(f"block_sizes and max_new_tokens must be at least 1, got {size}")


def main(argv: list[str]) -> int:
    """Exit code."""
    return run_tool(argv, DoctorArguments, _run)


def _run(arguments: DoctorArguments) -> int:
    if arguments.report:
        make_parent("report", Path(arguments.report))
    messages = read_messages(Path(arguments.prompts), setting="prompts") if arguments.prompts else None
    tokenizer = load_tokenizer(arguments.model, trust_remote_code=arguments.trust_remote_code)
    prompts = _encode(tokenizer, messages)
    facts: dict[str, Any] = {}
    certificates = []
    for dtype in arguments.dtypes:
        model = load_model(arguments.model, dtype=dtype, trust_remote_code=arguments.trust_remote_code)
        if not facts:
            facts = _facts(model, tokenizer)
            _print_facts(facts, tokenizer)
        certificates.append(_certify(model, tokenizer, prompts, arguments))
        del model
        gc.collect()  # two precisions of a model need not fit side by side
    defects = sum(len(c.defects) for c in certificates)
    print(_verdict(certificates, defects))
    if arguments.report:
        rows = [{**asdict(c), "equal_share": c.equal_share, "defects": len(c.defects)} for c in certificates]
        settings = {"max_new_tokens": arguments.max_new_tokens, "block_sizes": arguments.block_sizes, "prompts": len(prompts)}
        report = {"model": arguments.model, "lossless": defects == 0, **settings, **facts, "precisions": rows}
        artifacts.write_json(Path(arguments.report), report)
        print(f"report: {arguments.report}")
    return 1 if defects else 0


def _encode(tokenizer: PreTrainedTokenizerBase, messages: list[list[dict[str, str]]] | None) -> list[list[int]]:
    """Through the chat template; without one, one message per prompt is fed as it is, which is said."""
    chats = messages or [[{"role": "user", "content": text}] for text in PROMPTS]
    if tokenizer.chat_template:
        return [encode(tokenizer, chat) for chat in chats]
    if any(len(chat) > 1 for chat in chats):
        raise UserError("prompts: the tokenizer has no chat template, so each row must be one text")
    print("note: the tokenizer has no chat template; prompts are fed as they are")
    return [encode_raw(tokenizer, chat[0]["content"]) for chat in chats]


def _certify(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: list[list[int]], arguments: DoctorArguments) -> Certificate:
    from jacobi_core.decoding.doctor import certify, method_configs
    from jacobi_core.decoding.tokens import TokenRules

    configs = method_configs(arguments.block_sizes, arguments.max_new_tokens)
    try:
        rules = TokenRules.of(model, tokenizer)
        return certify(model, prompts, configs, rules=rules, progress=lambda line: print(line, flush=True))
    except ValueError as error:  # a prompt or model the decoder refuses
        raise UserError(str(error)) from error


def _facts(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    import torch
    import transformers

    from jacobi_core.decoding.doctor import eos_sources, unfair_settings

    rows = model.get_input_embeddings().weight.shape[0]
    eos, warnings = eos_sources(model, tokenizer), unfair_settings(model.generation_config)
    if not eos:
        warnings.append("no end-of-text id: neither tokenizer, generation_config nor config names one, so every answer runs to its cap")
    if len(tokenizer) > rows:
        warnings.append(f"the tokenizer has {len(tokenizer)} tokens and the model only {rows} embedding rows; prompts with the others cannot be read")
    return {
        "device": str(model.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "eos_ids": {str(i): sources for i, sources in eos.items()},
        "tokenizer_size": len(tokenizer),
        "embedding_rows": rows,
        "warnings": warnings,
    }


def _print_facts(facts: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    print(f"device: {facts['device']}, torch {facts['torch']}, transformers {facts['transformers']}")
    for i, sources in facts["eos_ids"].items():
        print(f"end of text: {i} {tokenizer.convert_ids_to_tokens(int(i))!r} from {', '.join(sources)}")
    padded = facts["embedding_rows"] - facts["tokenizer_size"]
    unused = f" ({padded} of them without a token, never drafted)" if padded > 0 else ""
    print(f"vocabulary: {facts['tokenizer_size']} tokens, {facts['embedding_rows']} embedding rows{unused}")
    for warning in facts["warnings"]:
        print(f"warning: {warning}", flush=True)


def _verdict(certificates: list[Certificate], defects: int) -> str:
    lines = [""]
    for certificate in certificates:
        ties = len(certificate.findings) - len(certificate.defects)
        total = sum(certificate.runs.values())
        lines.append(f"{certificate.dtype}: {certificate.equal_share:.1%} of {total} answers equal, {ties} ties, {len(certificate.defects)} defects")
        for f in certificate.findings:
            where = f"prompt {f.prompt}, {f.method}, block size {f.block_size}"
            lines.append(f"  {f.kind}: {where}: first differing token {f.first_index}, margin {f.margin:.3g} (tie up to {f.tolerance:.3g})")
    lines.append(f"NOT LOSSLESS: {defects} defects" if defects else "lossless: no defect found")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
