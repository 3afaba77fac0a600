"""Stage `search_decoding`: which decoding setting is the fastest for a model on this machine (the paper's Appendix E). See `stage`."""

from tasks.search_decoding.config import SearchDecodingConfig
from tasks.search_decoding.stage import run

__all__ = ["SearchDecodingConfig", "run"]
