"""What becomes of answers that the model does not agree with; free of torch, so that configs can name it."""

from enum import Enum


class OnDisagreement(str, Enum):
    """An answer, from the token on that the teacher-forced forward does not predict again (a near-tie, or an answer from elsewhere)."""

    keep = "keep"  # stays as it is; the tokens are counted
    cut = "cut"  # ends before that token
