"""Hydra config groups (YAML only). A package, so that an installed copy carries them and any working directory finds them."""
