"""Stage `*/evaluate`: a model's answers, generated once, then scored and timed from their files. See `stage`."""

from tasks.evaluate.config import EvaluateConfig
from tasks.evaluate.stage import run

__all__ = ["EvaluateConfig", "run"]
