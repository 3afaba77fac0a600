"""Stage `roundN/pack`: trajectories -> packed training rows under a noise schedule. CPU only; never touches trajectories."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jacobi_core.distillation.noise_schedule import NoiseSchedule
from tasks import artifacts
from tasks.stage import StageContext, UserError
from tasks.trajectory_files import read_metadata, read_trajectories, trajectory_parts

if TYPE_CHECKING:
    from jacobi_core.distillation.packing import PackedRow
    from jacobi_core.trajectories.record import Trajectory

log = logging.getLogger(__name__)


@dataclass
class PackSettings:
    """Raises ValueError naming the field for a value that cannot be used."""

    max_length: int = 512  # tokens of a packed row; longer samples are dropped and counted

    def __post_init__(self) -> None:
        if self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}")


@dataclass
class PackConfig(PackSettings):
    schedule: NoiseSchedule = field(default_factory=NoiseSchedule)


def run(config: PackConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: trajectories. Writes packed.parquet and noise.json (the histogram of noise ratios really produced)."""
    packer = Packer(config)
    check_schedule(config, inputs["trajectories"])
    artifacts.write_packed(output / "packed.parquet", packer.rows(read_trajectories(inputs["trajectories"])))
    if not packer.samples:
        raise UserError(f"pack.max_length={config.max_length}: all {packer.dropped} samples are longer; raise it")
    if not any(packer.ratios):
        raise UserError("noise_schedule: the packed set holds not one noisy token; raise t_max or shorten the window")
    top = max(packer.ratios)
    if config.schedule.t_max - top > 0.1:
        log.warning(
            "the noisiest packed block has a noise ratio of %.2f, below t_max=%.2f: is the window longer than the answers?",
            top,
            config.schedule.t_max,
        )
    artifacts.write_json(output / "noise.json", packer.histogram())
    rows = artifacts.PackedRows(output / "packed.parquet")
    return {
        "rows": len(rows),
        "samples": packer.samples,
        "dropped_too_long": packer.dropped,
        "tokens": int(rows.lengths.sum()),
        "fill_ratio": float(rows.lengths.sum() / (len(rows) * config.max_length)),
        "consistency_tokens": int(rows.consistency_tokens.sum()),
        "ar_tokens": int(rows.ar_tokens.sum()),
        "noise_ratio_mean": sum(packer.ratios) / len(packer.ratios),
        "noise_ratio_max": top,
    }


def check_schedule(config: PackConfig, trajectories: Path) -> None:
    """Raises UserError where the trajectories hold only the states of another schedule (trajectories.collect=schedule)."""
    for part in trajectory_parts(trajectories)[:1]:  # all parts are of one run
        kept_for = read_metadata(part).get("schedule")
        if kept_for is not None and NoiseSchedule(**json.loads(kept_for)) != config.schedule:
            raise UserError(f"{part}: holds only the states that another noise schedule asks for ({kept_for}); use trajectories.collect=all")


class Packer:
    """Samples into rows in the order they come: a row is closed when the next sample does not fit."""

    def __init__(self, config: PackConfig) -> None:
        self.config = config
        self.samples = self.dropped = 0
        self.ratios: list[float] = []

    def rows(self, trajectories: Iterator[Trajectory]) -> Iterator[PackedRow]:
        from jacobi_core.distillation.packing import join_samples, pack_trajectory

        bin_: list[PackedRow] = []
        for trajectory in trajectories:
            sample, ratios = pack_trajectory(trajectory, self.config.schedule)
            if len(sample) > self.config.max_length:
                self.dropped += 1
                continue
            self.samples += 1
            self.ratios += ratios
            if sum(map(len, bin_)) + len(sample) > self.config.max_length:
                yield join_samples(bin_)
                bin_ = []
            bin_.append(sample)
        if bin_:
            yield join_samples(bin_)

    def histogram(self) -> dict[str, list[float]]:
        """Blocks per noise ratio, in tenths: counts[i] holds ratios in (edges[i-1], edges[i]]; the first is exactly 0."""
        counts = [0] * 11
        for ratio in self.ratios:
            counts[-int(-ratio * 10 // 1)] += 1
        return {"edges": [i / 10 for i in range(11)], "counts": counts}
