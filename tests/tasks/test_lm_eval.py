"""Our decoder and our benchmarks inside lm-eval, on a tiny model that knows two of three answers of each. Nothing is downloaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from tasks.problem_sets import lm_eval_cli
from tasks.problem_sets.harness import evaluate, register
from tasks.problem_sets.published import VERSIONS
from tasks.stage import UserError
from tests.tasks.tiny_benchmarks import ANSWER_TOKENS, KNOWN, SHOWN, build_model, jsonl, lessons, write_benchmarks

pytest.importorskip("lm_eval")
METRICS = {
    "jacobi_humaneval": "pass@1",
    "jacobi_mbpp": "pass@1",
    "jacobi_gsm8k": "exact_match",
    "jacobi_gsm8k_qwen": "exact_match",
    "jacobi_math500": "math_verify",
    "jacobi_math500_qwen": "math_verify",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    return write_benchmarks(tmp_path_factory.mktemp("benchmarks"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, files) -> str:
    folder = tmp_path_factory.mktemp("knows")
    build_model(folder, lessons(files))
    return str(folder)


def run(model: str, checkpoint: str, tasks, files=None, *, batch_size=1, code=True, **more) -> dict:
    arguments = {"pretrained": checkpoint, "dtype": "float32", "device": "cpu", "batch_size": batch_size, **more.pop("model_args", {})}
    more.setdefault("gen_kwargs", {"max_gen_toks": ANSWER_TOKENS})
    more.setdefault("apply_chat_template", True)
    return evaluate(model, tasks, model_args=arguments, data_files=files, allow_code_execution=code, bootstrap_iters=0, **more)


def scores(results: dict) -> dict[str, float]:
    return {task: results["results"][task][f"{METRICS[task]},none"] for task in METRICS if task in results["results"]}


def texts(results: dict) -> dict[str, list[str]]:
    return {task: [sample["resps"][0][0] for sample in found] for task, found in results["samples"].items()}


@pytest.fixture(scope="module")
def of_hf(checkpoint, files) -> dict:
    return run("hf", checkpoint, METRICS, files)


def test_every_benchmark_from_prompt_to_score(checkpoint, files, of_hf):
    found = run("jacobi", checkpoint, METRICS, files, model_args={"block_size": 8})
    assert scores(found) == dict.fromkeys(METRICS, pytest.approx(KNOWN / SHOWN))
    assert (scores(found), texts(found)) == (scores(of_hf), texts(of_hf))
    assert found["config"]["decoding"] | {"method": "mr", "block_size": 8} == found["config"]["decoding"]
    verdicts = [sample["filtered_resps"][0] for sample in found["samples"]["jacobi_humaneval"]]
    assert [v["reason"] for v in verdicts] == ["passed"] * KNOWN + ["failed"] and "isqrt" in verdicts[0]["code"]
    names = {"jacobi_humaneval": "human_eval"}
    asked = {task: names.get(task, task.removeprefix("jacobi_").removesuffix("_qwen")) for task in METRICS}
    assert found["versions"] == {task: VERSIONS[name] for task, name in asked.items()}


@pytest.mark.parametrize(
    "settings", [{"method": "ar"}, {"method": "jacobi", "block_size": 5}, {"method": "multi_block", "block_size": 4, "ngram": True}]
)
def test_batches_and_methods_give_the_same_texts(checkpoint, files, of_hf, settings):
    found = run("jacobi", checkpoint, METRICS, files, batch_size=4, code=True, predict_only=True, model_args=settings)
    assert texts(found) == texts(of_hf)


@pytest.mark.parametrize("size", [1, 3])
def test_unmodified_hf_model_uses_the_decoder_of_the_export(checkpoint, files, of_hf, monkeypatch, size):
    import jacobi_core

    calls = []
    decode = jacobi_core.checkpoint_generate
    monkeypatch.setattr(jacobi_core, "checkpoint_generate", lambda *args, **kwargs: calls.append(kwargs["defaults"]) or decode(*args, **kwargs))
    found = run("hf", checkpoint, METRICS, files, batch_size=size, model_args={"trust_remote_code": True})
    assert (scores(found), texts(found)) == (scores(of_hf), texts(of_hf))
    assert calls and all(settings == {"block_size": 8} for settings in calls)


def test_texts_end_at_stop_strings_and_prompts_are_cut_as_hf_does(checkpoint, files):
    tasks = ["jacobi_humaneval", "jacobi_gsm8k", "jacobi_mbpp"]
    # stops inside a word, across tokens, in the echo of the prompt only; and a context that the long prompts do not fit
    common = {"gen_kwargs": {"max_gen_toks": 40, "until": ["tur", "``", "So i", "Question"]}, "predict_only": True}
    base = run("hf", checkpoint, tasks, files, model_args={"max_length": 120}, **common)
    for size in (1, 3):
        found = run("jacobi", checkpoint, tasks, files, batch_size=size, model_args={"max_length": 120, "block_size": 8}, **common)
        assert texts(found) == texts(base)
    assert all("tur" not in text and "``" not in text for found in texts(base).values() for text in found)
    assert "Sure!\n" in texts(base)["jacobi_humaneval"]


def test_rows_stop_generating_at_their_stop_string(checkpoint, files):
    """lm-eval cuts texts itself, so only their length shows whether the decoder went on."""
    from lm_eval.api.registry import get_model

    from tasks.problem_sets import human_eval

    register()
    lm = get_model("jacobi")(checkpoint, dtype="float32", device="cpu", block_size=4)
    prompts = [lm.apply_chat_template([{"role": "user", "content": p.prompt}]) for p in human_eval.load(files["human_eval"])]
    context, mask = lm.tok_batch_encode(prompts)
    arguments = {"max_length": context.shape[1] + ANSWER_TOKENS, "attention_mask": mask, "do_sample": False}
    lengths = {}
    for stop in ("isqrt", "never"):
        rows = lm._model_generate(context, stop=[stop], **arguments)[:, context.shape[1] :]
        lengths[stop] = [int((row != lm.tokenizer.pad_token_id).sum()) for row in rows]
    solved, stub = lengths["isqrt"][:KNOWN], lengths["isqrt"][KNOWN:]
    assert all(stopped < whole for stopped, whole in zip(solved, lengths["never"][:KNOWN], strict=True))
    assert stub == lengths["never"][KNOWN:]  # its answer has no `isqrt`


def test_looking_for_stop_strings_costs_the_same_however_long_the_text():
    import torch

    from tasks.problem_sets.harness.model import StopTexts

    class Bytes:
        """A tokenizer that counts."""

        decoded = calls = 0

        def decode(self, ids):
            self.decoded, self.calls = self.decoded + len(ids), self.calls + 1
            return bytes(ids).decode()

    text, tokenizer = "prompt END" + "x" * 400 + "END", Bytes()
    ids = torch.tensor([list(text.encode())]).expand(3, -1)  # how a row of a batch stands in for all of them
    stops = StopTexts(tokenizer, ["END"], start=10)
    found = [stops(ids[:, :length], None).tolist() for length in range(11, len(text) + 1)]
    assert found == [[False] * 3] * 402 + [[True] * 3]  # and not for the prompt's
    assert tokenizer.calls == 403 and tokenizer.decoded <= 403 * stops.window
    other = torch.tensor([list(b"prompt    xEND"), list(b"prompt ENDxxxx")])
    assert stops(other, None).tolist() == [True, False]


def test_the_end_of_text_costs_no_criterion(checkpoint, monkeypatch):
    """lm-eval names it among the stop strings of every request; only strings that the decoder cannot tell by an id are looked for."""
    from lm_eval.api.registry import get_model

    from tasks.problem_sets.harness import model as harness_model

    register()
    lm = get_model("jacobi")(checkpoint, dtype="float32", device="cpu", block_size=4)
    asked = []
    decode = harness_model.jacobi_generate
    monkeypatch.setattr(
        harness_model, "jacobi_generate", lambda m, ids, p, criteria, *a, **k: asked.append(criteria) or decode(m, ids, p, criteria, *a, **k)
    )
    context, mask = lm.tok_batch_encode(["def f"])
    for stop in ([lm.tokenizer.eos_token, ""], [lm.tokenizer.eos_token, "\n", "<|im"]):
        lm._model_generate(context, stop=stop, max_length=context.shape[1] + 4, attention_mask=mask, do_sample=False)
    texts = [[c.texts for c in criteria if isinstance(c, harness_model.StopTexts)] for criteria in asked]
    assert texts == [[], [["\n", "<|im"]]]


@pytest.mark.parametrize("size", [1, 3])
def test_settings_of_the_checkpoint_apply_as_they_do_for_hf(checkpoint, files, tmp_path, size):
    """Qwen's way of shipping: sampling and a repetition penalty in the generation config. lm-eval switches sampling off, the penalty stays."""
    folder = shutil.copytree(checkpoint, tmp_path / "penal")
    shipped = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps({**shipped, "do_sample": True, "top_k": 20, "repetition_penalty": 1.5}))
    arguments = {"files": files, "predict_only": True, "batch_size": size}
    base, found = (texts(run(model, str(folder), ["jacobi_humaneval", "jacobi_gsm8k"], **arguments)) for model in ("hf", "jacobi"))
    assert found == base
    assert base["jacobi_humaneval"] != texts(run("hf", checkpoint, ["jacobi_humaneval"], **arguments))["jacobi_humaneval"]


def test_minicode_needs_no_data(checkpoint):
    found = run("jacobi", checkpoint, ["jacobi_minicode"], limit=2, gen_kwargs={"max_gen_toks": 8})
    assert found["versions"]["jacobi_minicode"] == VERSIONS["minicode"] == VERSIONS["minicode_long"]
    assert found["n-samples"]["jacobi_minicode"] == {"original": 200, "effective": 2}
    assert all(sample["filtered_resps"][0]["reason"] != "passed" for sample in found["samples"]["jacobi_minicode"])


def test_code_is_not_run_without_consent(checkpoint, files):
    with pytest.raises(ValueError, match="confirm_run_unsafe_code"):
        run("jacobi", checkpoint, ["jacobi_humaneval"], files, code=False)


def test_mistakes_are_named(checkpoint, files, tmp_path):
    for settings, message in (({"block_size": 0}, "block_size must be at least 1"), ({"method": "fast"}, "'fast' is not a valid Method")):
        with pytest.raises(UserError, match=f"model_args: {message}"):
            run("jacobi", checkpoint, ["jacobi_gsm8k"], files, model_args=settings)
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read"):
        run("jacobi", checkpoint, ["jacobi_gsm8k"], {"gsm8k": str(tmp_path / "none.jsonl")})
    with pytest.raises(UserError, match="data_files=.*gsm8k"):
        run("jacobi", checkpoint, ["jacobi_gsm8k"], {"gsm": files["gsm8k"]})


class Canned:
    """What a model of lm-eval's would say: given texts, in the order of the documents."""

    def __new__(cls, answers):
        from lm_eval.api.model import LM

        class Model(LM):
            def generate_until(self, requests, disable_tqdm=False):
                return [answers[request.doc_id] for request in requests]

            def loglikelihood(self, requests, disable_tqdm=False):
                raise NotImplementedError

            loglikelihood_rolling = loglikelihood

        return Model()


@pytest.mark.slow
def test_human_eval_scores_all_of_its_own_solutions_and_none_of_broken_ones():
    from tasks.problem_sets import human_eval

    problems = human_eval.load()
    sandbox = {"sandbox": {"timeout_s": 30, "cpu_s": 30}}
    right = [f"Here you are:\n```python\n{p.solution}```" for p in problems]
    wrong = [f"```python\ndef {p.entry_point}(*args):\n    return object()\n```" for p in problems]
    for answers, expected in ((right, 1.0), (wrong, 0.0)):
        found = evaluate(Canned(answers), ["jacobi_humaneval"], allow_code_execution=True, metadata=sandbox, bootstrap_iters=0)
        assert found["n-samples"]["jacobi_humaneval"]["effective"] == 164
        assert found["results"]["jacobi_humaneval"]["pass@1,none"] == expected


@pytest.mark.slow
def test_any_task_of_lm_evals_own_by_name(checkpoint, monkeypatch):
    """gsm8k generates (five shots), arc_easy compares likelihoods, wikitext sums them up over a document. Only their data is made up."""
    import datasets

    questions = [{"question": f"What is {i} + {i}?", "answer": f"{i}+{i}\n#### {2 * i}"} for i in range(12)]
    choices = [
        {"question": f"Is {i} even?", "choices": {"text": ["yes", "no", "add", "eggs"], "label": ["A", "B", "C", "D"]}, "answerKey": "AB"[i % 2]}
        for i in range(6)
    ]
    pages = [{"page": f" = Page {i} = \n \n A function adds {i} to a number . \n" * 3} for i in range(2)]
    rows = {"openai/gsm8k": questions, "allenai/ai2_arc": choices, "EleutherAI/wikitext_document_level": pages}

    def load(path, name=None, **_):
        data = datasets.Dataset.from_list(rows[path])
        return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), data))

    monkeypatch.setattr("lm_eval.api.task.datasets.load_dataset", load)
    tasks = ["gsm8k", "arc_easy", "wikitext"]
    arguments = {"limit": 4, "apply_chat_template": False, "gen_kwargs": {"max_gen_toks": 20}, "batch_size": 2}
    base, found = (run(model, checkpoint, tasks, **arguments) for model in ("hf", "jacobi"))
    assert found["results"] == base["results"] and found["results"]["wikitext"]["word_perplexity,none"] > 1
    assert [s["resps"] for s in found["samples"]["gsm8k"]] == [s["resps"] for s in base["samples"]["gsm8k"]]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["ours", "unmodified"])
def test_command_lines(checkpoint, files, tmp_path, command, of_hf):
    if command == "ours":
        start = ["-m", "tasks.problem_sets.lm_eval_cli", "--model", "jacobi", "--model_args", f"pretrained={checkpoint},dtype=float32,block_size=8"]
    else:
        from tasks.problem_sets.harness import YAML_FOLDER

        more = ["--include_path", str(YAML_FOLDER), "--device", "cpu"]
        start = ["-m", "lm_eval", "--model", "hf", "--model_args", f"pretrained={checkpoint},dtype=float32,trust_remote_code=True", *more]
    options = ["--tasks", "jacobi_humaneval,jacobi_gsm8k", "--apply_chat_template", "--gen_kwargs", f"max_gen_toks={ANSWER_TOKENS}"]
    options += ["--metadata", json.dumps({"data_files": files}), "--output_path", str(tmp_path), "--log_samples", "--confirm_run_unsafe_code"]
    subprocess.run([sys.executable, *start, *options], check=True, timeout=280)
    (written,) = tmp_path.rglob("results_*.json")
    found = json.loads(written.read_text())
    assert scores(found) == {task: score for task, score in scores(of_hf).items() if task in ("jacobi_humaneval", "jacobi_gsm8k")}
    (log,) = tmp_path.rglob("samples_jacobi_humaneval_*.jsonl")
    assert [line["resps"][0][0] for line in jsonl(log)] == texts(of_hf)["jacobi_humaneval"]


def test_our_command_line_adds_our_folder_to_the_users(monkeypatch, tmp_path):
    from lm_eval._cli import HarnessCLI

    seen = []
    monkeypatch.setattr(HarnessCLI, "execute", lambda self, arguments: seen.append(arguments))
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "jacobi", "--tasks", "x", "--include_path", str(tmp_path)])
    lm_eval_cli.main()
    monkeypatch.setattr(sys, "argv", ["lm_eval", "ls", "tasks"])
    lm_eval_cli.main()
    ours = seen[1].include_path[0]
    assert seen[0].include_path == [ours, str(tmp_path)] and (seen[0].model, seen[0].tasks) == ("jacobi", ["x"])


def test_registered_beside_lm_evals_own():
    from lm_eval.api.registry import get_model

    register()
    register()
    assert get_model("jacobi").__mro__[1] is get_model("hf")


def test_importing_problem_sets_imports_neither_lm_eval_nor_torch():
    names = "answers human_eval mbpp gsm8k math500 minicode sample_files scoring lm_eval_cli harness harness.docs"
    code = f"import importlib, sys; [importlib.import_module('tasks.problem_sets.' + n) for n in {names!r}.split()]; "
    code += "print(sorted({'lm_eval', 'torch', 'transformers', 'datasets', 'math_verify', 'sympy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
