"""Configs as the command line composes them."""

from __future__ import annotations

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

from pipelines.config import schema
from pipelines.config.schema import PipelineConfig


def composed(*overrides: str, hydra: bool = False) -> DictConfig:
    """As Hydra leaves it. hydra: with its own section."""
    schema.register()
    GlobalHydra.instance().clear()
    with initialize_config_module("conf", version_base="1.3"):
        return compose("config", list(overrides), return_hydra_config=hydra)


def built(*overrides: str) -> PipelineConfig:
    """Checked, as dataclasses."""
    return schema.build(composed(*overrides))
