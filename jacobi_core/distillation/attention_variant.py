"""Which mask of the paper, and what computes it; free of torch, so that configs can name them."""

from enum import Enum


class MaskVariant(str, Enum):
    nc = "nc"  # noise-conditioned: inside its window a noisy block sees the earlier noisy blocks (default)
    nc_ic = "nc_ic"  # ablation (paper table 5): it sees the earlier clean blocks instead


class Backend(str, Enum):
    """All give the dense mask's result; they differ in time and memory."""

    auto = "auto"  # flex where it can train, else sliced
    dense = "dense"  # one boolean mask [B, 1, L, L]: the oracle
    sliced = "sliced"  # causal attention over prompt + clean, and noisy queries in chunks against the keys they may need; no L x L mask
    flex = "flex"  # FlexAttention with a block mask; training needs CUDA
    flash = "flash"  # the slices as one variable-length call, their keys copied; CUDA; sliced for batches that need too many copies
