"""Stage `roundN/pack`: trajectories -> packed training rows under a noise schedule. CPU only; never touches trajectories.

Everything streams: a trajectory becomes a sample, a sample goes into one of a few open rows, a full row goes to the file.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from jacobi_core.distillation.noise_schedule import NoiseSchedule, ScheduleError
from tasks import artifacts
from tasks.packed_files import PackedRows, write_packed
from tasks.stage import StageContext, UserError
from tasks.trajectory_files import read_metadata, read_trajectories, trajectory_parts

if TYPE_CHECKING:
    from jacobi_core.distillation.packing import PackedRow
    from jacobi_core.trajectories.record import Trajectory

OPEN_ROWS = 64  # that samples may still go into: enough to fill rows, and all the memory that packing takes
TENTHS = 10  # bins of a noise histogram, besides the one of exactly 0

Sample = TypeVar("Sample", bound=Sized)

log = logging.getLogger(__name__)


class TooLong(str, Enum):
    """What becomes of a sample longer than a row."""

    drop = "drop"  # left out and counted
    split = "split"  # cut between windows; each further piece sees all clean text before it as its prompt


@dataclass
class PackSettings:
    """Raises ValueError naming the field for a value that cannot be used."""

    max_length: int = 512  # tokens of a packed row
    too_long: TooLong = TooLong.drop

    def __post_init__(self) -> None:
        self.too_long = TooLong(self.too_long)
        if self.max_length < 1:
            raise ValueError(f"max_length must be at least 1, got {self.max_length}")


@dataclass
class PackConfig(PackSettings):
    schedule: NoiseSchedule = field(default_factory=NoiseSchedule)


def run(config: PackConfig, inputs: Mapping[str, Path], output: Path, context: StageContext) -> dict[str, float]:
    """inputs: trajectories. Writes packed.parquet and noise.json (histograms of the noise ratios really produced)."""
    check_schedule(config, inputs["trajectories"])
    packer, path = Packer(config), output / "packed.parquet"
    try:
        rows = packer.rows(read_trajectories(inputs["trajectories"]))
        write_packed(path, rows, schedule=config.schedule, max_length=config.max_length)
    except ScheduleError as error:  # a user's own function; its first blocks were checked before anything ran
        raise UserError(str(error)) from error
    if not packer.samples and not packer.dropped_samples:
        raise UserError(f"{inputs['trajectories']}: holds not one trajectory to pack; its dropped-*.json and quarantine-*.json say why")
    if not packer.samples:
        raise UserError(f"pack.max_length={config.max_length}: all {packer.dropped_samples} samples are longer; raise it")
    if not packer.noise.top:
        raise UserError("noise_schedule: the packed set holds not one noisy token; raise t_max or shorten the window")
    if config.schedule.t_max - packer.noise.top > 0.1:
        log.warning(
            "the noisiest packed block has a noise ratio of %.2f, below t_max=%.2f: is the window longer than the answers?",
            packer.noise.top,
            config.schedule.t_max,
        )
    artifacts.write_json(output / "noise.json", packer.noise.histograms())
    return metrics(packer, PackedRows(path))


def check_schedule(config: PackConfig, trajectories: Path) -> None:
    """Raises UserError where the trajectories hold only the states of another schedule (trajectories.collect=schedule)."""
    for part in trajectory_parts(trajectories)[:1]:  # all parts are of one run
        kept_for = read_metadata(part).get("schedule")
        if kept_for is not None and NoiseSchedule(**json.loads(kept_for)) != config.schedule:
            raise UserError(f"{part}: holds only the states that another noise schedule asks for ({kept_for}); use trajectories.collect=all")


def metrics(packer: Packer, rows: PackedRows) -> dict[str, float]:
    """fill_ratio: of max_length; padding_share: of rows padded alone to the file's bucket; *_per_row: tokens that carry that loss."""
    tokens = int(rows.lengths.sum())
    padded = int((-(-rows.lengths // rows.bucket) * rows.bucket).sum())
    found = {
        "rows": len(rows),
        "samples": packer.samples,
        "fill_ratio": tokens / (len(rows) * rows.max_length),
        "noise_ratio_mean": packer.noise.mean,
        "noise_ratio_max": packer.noise.top,
        "tokens": tokens,
        "padding_share": 1 - tokens / padded,
        "split_samples": packer.split_samples,
        "dropped_samples": packer.dropped_samples,
        "dropped_answer_tokens": packer.dropped_tokens,
    }
    for name, counts in (("consistency", rows.consistency_tokens), ("ar", rows.ar_tokens)):
        found |= {f"{name}_tokens": int(counts.sum()), f"{name}_per_row_mean": float(counts.mean())}
        found |= {f"{name}_per_row_min": int(counts.min()), f"{name}_per_row_max": int(counts.max())}
    return found


class Packer:
    """Trajectories into rows, with counts of what became of them.

    samples: packed, in whole or in part; split_samples: of these, in pieces; dropped_samples: not packed at all; dropped_tokens: answer
    tokens that no row predicts (each answer token is the label of one place of its sample, so these and the rows' AR tokens are all there
    are). A last window of one token that would be a piece alone predicts nothing: it is not packed, its block is in no histogram, and its
    token is dropped only where the piece before it, which predicts it, is.
    """

    def __init__(self, config: PackConfig) -> None:
        self.config, self.noise = config, Noise(config.schedule.window)
        self.samples = self.split_samples = self.dropped_samples = self.dropped_tokens = 0

    def rows(self, trajectories: Iterable[Trajectory]) -> Iterator[PackedRow]:
        from jacobi_core.distillation.packing import join_samples

        for samples in best_fit(self._samples(trajectories), max_length=self.config.max_length):
            yield join_samples(samples)

    def _samples(self, trajectories: Iterable[Trajectory]) -> Iterator[PackedRow]:
        from jacobi_core.distillation.packing import IGNORE, pack_trajectory

        for trajectory in trajectories:
            sample, ratios = pack_trajectory(trajectory, self.config.schedule)
            pieces, blocks = [sample], range(len(ratios))
            if len(sample) > self.config.max_length:
                pieces, blocks = self._cut(sample)
                self.dropped_tokens += len(trajectory.answer_ids) - sum(int((piece.labels != IGNORE).sum()) for piece in pieces)
            self.samples += bool(pieces)
            self.dropped_samples += not pieces
            for block in blocks:
                self.noise.add(block, ratios[block])
            yield from pieces

    def _cut(self, sample: PackedRow) -> tuple[list[PackedRow], list[int]]:
        """Pieces of a sample that is too long, and the blocks they train on."""
        from jacobi_core.distillation.packing import split_sample

        if self.config.too_long is TooLong.drop:
            return [], []
        pieces = split_sample(sample, max_length=self.config.max_length)
        self.split_samples += bool(pieces)
        return pieces, [block for piece in pieces for block in piece.block[piece.block >= 0].unique_consecutive().tolist()]


class Noise:
    """The noise ratios of packed blocks, counted per position of a block in its window."""

    def __init__(self, window: int) -> None:
        self.counts = np.zeros((window, TENTHS + 1), np.int64)
        self.total = self.top = 0.0

    def add(self, block: int, ratio: float) -> None:
        self.counts[block % len(self.counts), -int(-ratio * TENTHS // 1)] += 1
        self.total += ratio
        self.top = max(self.top, ratio)

    @property
    def mean(self) -> float:
        return self.total / int(self.counts.sum())

    def histograms(self) -> dict[str, list]:
        """Blocks per noise ratio, in tenths: counts[i] holds ratios in (edges[i-1], edges[i]]; the first is exactly 0."""
        edges = [i / TENTHS for i in range(TENTHS + 1)]
        return {"edges": edges, "counts": self.counts.sum(0).tolist(), "by_window_position": self.counts.tolist()}


def best_fit(samples: Iterable[Sample], *, max_length: int, open_rows: int = OPEN_ROWS) -> Iterator[list[Sample]]:
    """Samples, none longer than max_length, into rows: each into the fullest open row that has room for it (the oldest of equals).

    A row is closed when it is full, or the fullest when one more would be open than open_rows; the others at the end, in their order.
    """
    rows: list[list[Sample]] = []
    lengths: list[int] = []
    for sample in samples:
        fitting = [i for i, length in enumerate(lengths) if length + len(sample) <= max_length]
        if fitting:
            at = max(fitting, key=lengths.__getitem__)
        else:
            if len(rows) == open_rows:
                fullest = lengths.index(max(lengths))
                del lengths[fullest]
                yield rows.pop(fullest)
            at = len(rows)
            rows.append([])
            lengths.append(0)
        rows[at].append(sample)
        lengths[at] += len(sample)
        if lengths[at] == max_length:
            del lengths[at]
            yield rows.pop(at)
    yield from rows
