"""The two masks of the paper; free of torch, so that configs can name them."""

from enum import Enum


class MaskVariant(str, Enum):
    nc = "nc"  # noise-conditioned: inside its window a noisy block sees the earlier noisy blocks (default)
    nc_ic = "nc_ic"  # ablation (paper table 5): it sees the earlier clean blocks instead
