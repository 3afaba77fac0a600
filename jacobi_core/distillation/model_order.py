"""Where a packed batch's tokens lie for `sliced`, `flash` and `flex`, and which keys a run of noisy queries needs.

Attention does not care about order, given positions and the rule. So the tokens are re-ordered once per batch, per sample the prompt and the clean
ones, then the noisy ones, each by position, and the padding last: what is computed together lies together, and no layer has to gather.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from jacobi_core.distillation.attention_variant import MaskVariant
from jacobi_core.distillation.packing import PADDING_SAMPLE, Kind, PackedRow
from jacobi_core.distillation.visibility import TokenFields, visible

Span = tuple[int, int]  # [start, end) of a batch's tokens, its rows one after another


def model_order(batch: PackedRow) -> PackedRow:
    """The batch, fields [B, L], re-ordered: per sample [prompt + clean][noisy], padding last; teachers renumbered."""
    sample = torch.where(batch.sample == PADDING_SAMPLE, batch.sample.max() + 1, batch.sample)
    order = ((sample * 2 + (batch.kind == Kind.NOISY)) * (batch.position_ids.max() + 1) + batch.position_ids).argsort(dim=1, stable=True)
    moved = {name: field.gather(1, order) for name, field in vars(batch).items()}
    new_index = order.argsort(dim=1)
    moved["teacher"] = torch.where(moved["teacher"] >= 0, new_index.gather(1, moved["teacher"].clamp(min=0)), moved["teacher"])
    return PackedRow(**moved)


@dataclass(frozen=True)
class Sample:
    """One sample of a re-ordered batch: tokens [start, noisy) are its prompt and clean ones, [noisy, end) its noisy ones.

    groups: the noisy tokens that condition on the same clean ones, in order (windows for NC, blocks for NC-IC).
    """

    start: int
    noisy: int
    end: int
    groups: list[Span]


class Layout:
    """The samples and the padding of a re-ordered batch, on the CPU: waits for the device, once, and asks it nothing more."""

    def __init__(self, batch: PackedRow, variant: MaskVariant) -> None:
        self.variant = variant
        self._fields = TokenFields(*torch.stack(TokenFields.of(batch)).flatten(1).cpu())
        self.samples: list[Sample] = []
        self.padding: list[Span] = []
        rows, length = batch.input_ids.shape
        group = self._fields.window if variant is MaskVariant.nc else self._fields.block
        row = torch.arange(rows).repeat_interleave(length)
        for start, end in _runs(row * (self._fields.sample.max() + 2) + self._fields.sample):
            if self._fields.sample[start] == PADDING_SAMPLE:
                self.padding.append((start, end))
            else:
                noisy = end - int((self._fields.kind[start:end] == Kind.NOISY).sum())
                self.samples.append(Sample(start, noisy, end, [(noisy + a, noisy + b) for a, b in _runs(group[noisy:end])]))

    def keys_of(self, sample: Sample, queries: Span) -> list[Span]:
        """The keys that these noisy queries need: a prefix of the sample's prompt + clean tokens, and a run of its noisy ones.

        Asked of the rule, for the last query of each group: it sees whatever the ones before it in its group do.
        """
        last = torch.tensor([min(end, queries[1]) - 1 for start, end in sample.groups if start < queries[1] and end > queries[0]])
        fields = self._fields
        seen = visible(
            queries=fields.map(lambda f: f[last, None]), keys=fields.map(lambda f: f[None, sample.start : sample.end]), variant=self.variant
        ).any(0)
        index = seen.nonzero().flatten() + sample.start
        prefix, noisy = index[index < sample.noisy], index[index >= sample.noisy]
        return [(sample.start, int(prefix[-1]) + 1), (int(noisy[0]), int(noisy[-1]) + 1)]


def _runs(labels: torch.Tensor) -> Iterator[Span]:
    """[start, end) of every run of equal labels, [T]."""
    at = 0
    for count in labels.unique_consecutive(return_counts=True)[1].tolist():
        yield at, at + count
        at += count
