"""Stage `prompts`: generated problems or a user's data -> templated prompts with stable ids, in disjoint splits, and the tokenizer.

Knows nothing about models beyond their tokenizer and chat template. One file per concern: `config` the settings, `generated`, `plain`,
`open_code_instruct` and `open_thoughts` what a row of each source means, `arrange` duplicates, order and splits, `template` the one way
to token ids, `stage` the run.
"""

from tasks.prepare_prompts.config import SPLITS, PreparePromptsConfig, PromptSettings, Source
from tasks.prepare_prompts.plain import read_messages
from tasks.prepare_prompts.stage import run
from tasks.prepare_prompts.template import template

__all__ = ["SPLITS", "PreparePromptsConfig", "PromptSettings", "Source", "read_messages", "run", "template"]
