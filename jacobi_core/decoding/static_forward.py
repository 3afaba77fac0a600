"""One text against a static cache, in steps of a few fixed shapes that a CUDA graph can replay. Knows nothing about drafts.

The cache is transformers' StaticCache, allocated once; where a step reads up to and writes from is data on the device (the position of
the step's first token), so rollback is moving that position back and no address or shape changes from step to step. Captured on
CUDA; elsewhere the same steps run eagerly, which is the twin that the CPU tests hold against CachedForward.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer

from jacobi_core.decoding.cache import Request, model_mask, move_columns, refuse_unsuitable
from jacobi_core.decoding.config import DecodingConfig, Method
from jacobi_core.decoding.latency import powers_of_two

log = logging.getLogger(__name__)
SHORT_PROMPT = 512  # tokens: up to here one forward with a dense mask beats two


def widths_for(config: DecodingConfig) -> tuple[int, ...]:
    """At most three widths for a step's tokens: one block, half of the most that can be fed (a committed token and every chain), the most.
    With config.auto, which chooses among them, every power of two."""
    blocks = config.max_blocks if config.method in (Method.multi_block, Method.mr) else 1
    reach = min(config.block_size * blocks, config.max_new_tokens)
    most = 1 + config.chains * (reach - 1)
    if config.auto:
        return tuple(powers_of_two(most))
    return tuple(sorted({min(config.block_size, most), (most + 1) // 2, most}))


class StaticForward:
    """What CachedForward is to the loop, for one text at a time; usable for the next text once one has ended (its graphs stay).

    Shape legend: M tokens of a step, K columns of the cache. Not for training: call under torch.inference_mode().
    """

    def __init__(self, model: PreTrainedModel, *, capacity: int, widths: Sequence[int], capture: bool = True, compiled: bool = False) -> None:
        """capacity: most tokens the text may reach, prompt included. widths: the tokens of a step are padded to the smallest that fits.

        capture: False runs every step without a CUDA graph on CUDA too. compiled: steps go through torch.compile, once per width (ten
        seconds or more each, so keep the forward for many texts); where that fails they run eagerly, which is logged.
        Raises ValueError for a model whose cache cannot be rolled back token by token, or whose attention takes no dense mask.
        """
        self.model, self._widths = model, sorted(widths)
        self._step_model = torch.compile(model, dynamic=False) if compiled else model
        columns = -(-(capacity + self._widths[-1]) // 64) * 64  # padding may overhang; a multiple of 64 suits the kernels' alignment
        self.cache = StaticCache(config=model.config, max_cache_len=columns)
        refuse_unsuitable(model, self.cache, StaticLayer)
        self.capacity, self.length = capacity, 0  # tokens the cache may and does hold
        self._columns = torch.arange(columns, device=model.device)
        model_mask(model, torch.ones(1, 1, 1, 1, dtype=torch.bool))  # refuses here rather than at the first step
        self._steps: dict[int, _Step] = {}
        self._branches: list[int] = []  # cache index where each chain of the last logits_of begins
        self._captures = capture and model.device.type == "cuda"

    def logits_of(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        """As CachedForward.logits_of. The logits are overwritten by the next call.

        A prompt is read eagerly, in its exact shape: a short one together with the first chains; of a long one first every token but the
        last, without a mask, so that SDPA runs its flash kernel on CUDA. Everything else is a step of fixed shape.
        """
        ((committed, chains),) = requests
        if len(committed) > SHORT_PROMPT:
            self._seek(torch.tensor(self.length))
            self.model(input_ids=torch.tensor([committed[:-1]], device=self.model.device), cache=self.cache, use_cache=True, logits_to_keep=1)
            self.length += len(committed) - 1
            committed = committed[-1:]
        start, fed = self.length, [*committed, *(token for chain in chains for token in chain)]
        width = len(fed) if len(committed) > 1 else next((w for w in self._widths if w >= len(fed)), None)
        if width is None or start + len(committed) > self.capacity:
            raise ValueError(f"{len(fed)} tokens to feed after {start}: this forward was made for capacity={self.capacity} and widths={self._widths}")
        positions, branch_of = [*range(start, start + len(committed))], [0] * len(committed)  # 0: committed tokens, which every chain sees
        self._branches = []
        for number, chain in enumerate(chains, start=1):
            self._branches.append(start + len(branch_of))
            positions += range(start + len(committed), start + len(committed) + len(chain))
            branch_of += [number] * len(chain)
        padding = width - len(fed)  # one more branch, which nobody reads
        rows = [fed + [0] * padding, positions + [start] * padding, branch_of + [len(chains) + 1] * padding]
        if len(committed) > 1:
            step = _Step(width, self._columns)
            step.fed.copy_(torch.tensor(rows))
            return [self._run(step, self.model)[len(committed) - 1 :]]
        if width not in self._steps:
            self._steps[width] = _Step(width, self._columns)
        step = self._steps[width]
        step.fed.copy_(torch.tensor(rows))
        return [self._logits(step)[: len(fed)]]

    def keep(self, verdicts: Sequence[tuple[int, int] | None]) -> None:
        """As CachedForward.keep; after None the cache is empty and ready for another text."""
        (verdict,) = verdicts
        if verdict is None:
            self.restart()
            return
        chain, accepted = verdict
        start, source = self._branches[0], self._branches[chain]
        move_columns(self.cache, source, start, accepted)
        self.length = start + accepted

    def restart(self) -> None:
        """Forget everything: after a text that was left before its end."""
        self.length = 0

    def capture(self) -> None:
        """Capture every width now, between two texts, rather than at its second use in one. Nothing without a graph to capture."""
        assert self.length == 0, "a text is being decoded"
        with torch.inference_mode():
            for width in self._widths:
                step = self._steps.get(width)
                while self._captures and (step is None or step.graph is None):
                    self.logits_of([([0], [[0]] * (width - 1))])  # alternatives for one place: within any table of positions
                    step = self._steps[width]

    def _seek(self, position: torch.Tensor) -> None:
        """Where the next forward writes, long []; a copy on the device where it lies there."""
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position)

    def _logits(self, step: _Step) -> torch.Tensor:
        """[M, V]. A width is captured at its second use: the first has loaded and tuned its kernels."""
        step.uses += 1
        if self._captures and step.graph is None and step.uses > 1:
            try:
                self._capture(step)
            except RuntimeError as error:
                self._captures = False
                _warn_once("captured in a CUDA graph", str(error).partition("\n")[0])
        if step.graph is not None:
            step.graph.replay()
            return step.logits
        if self._step_model is self.model:
            return self._run(step, self.model)
        try:
            return self._run(step, self._step_model)
        except RuntimeError as error:
            self._step_model = self.model
            _warn_once("compiled", str(error).partition("\n")[0])
            return self._run(step, self.model)

    def _capture(self, step: _Step) -> None:
        # a step that runs again with the same inputs changes nothing, so the warm-up needs no undoing
        side = torch.cuda.Stream(self.model.device)
        side.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(side):
            self._run(step, self._step_model)
        torch.cuda.current_stream(self.model.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.model.device), torch.cuda.graph(graph):
            logits = self._run(step, self._step_model)
        step.graph, step.logits = graph, logits

    def _run(self, step: _Step, model: PreTrainedModel) -> torch.Tensor:
        """Everything a graph replays: no value of `step.fed` reaches the host."""
        ids, positions, branch_of = step.fed
        start = positions[0]
        self._seek(start)
        step.mask.copy_(self._columns < start)
        among_fed = step.causal & ((branch_of == 0) | (branch_of[:, None] == branch_of))
        step.mask.index_copy_(3, start + step.slots, among_fed[None, None])
        mask = model_mask(self.model, step.mask)
        return model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, cache=self.cache, use_cache=True).logits[0]


class _Step:
    """The static buffers of one width, and its graph once captured."""

    def __init__(self, width: int, columns: torch.Tensor) -> None:
        device = columns.device
        self.fed = torch.zeros(3, width, dtype=torch.long, device=device)  # id, position and branch of every token
        self.mask = torch.zeros(1, 1, width, len(columns), dtype=torch.bool, device=device)  # True = attend
        self.causal = torch.ones(width, width, dtype=torch.bool, device=device).tril_()
        self.slots = torch.arange(width, device=device)
        self.uses = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None


@functools.cache
def _warn_once(how: str, reason: str) -> None:
    log.warning("decoding steps cannot be %s, they run eagerly and slower: %s", how, reason)
