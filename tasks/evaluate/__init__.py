"""A model's answers, generated once (`*/answers`), decoders timed side by side (`*/speed`), both judged and tabulated (`*/evaluate`). See `stage`."""

from tasks.evaluate.config import AnswersConfig, EvaluateConfig, SpeedConfig

__all__ = ["AnswersConfig", "EvaluateConfig", "SpeedConfig"]
