"""Lossless parallel decoding: drafts, one cached forward, greedy verification, rollback."""
