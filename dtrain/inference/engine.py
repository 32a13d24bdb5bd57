"""The native engine of one rank: continuous batching over a KV cache, from requests to completions.

Requests wait in a queue. Each step lets in as many as rows and memory allow, reads the prompts that are not in the
cache yet, once each whatever the number of their samples, and decodes one token of every row; rows that have ended
leave. What a completion is does not depend on what else is in the batch, but for rounding.

`score_prompts` and `classify_rows` need one forward and sample nothing: they return log-probabilities of the tokens of
prompts, and a classifier's outputs for texts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtrain.base.errors import Interrupted, UserError
from dtrain.inference.cached_attention import Decode, Prefill
from dtrain.inference.images import batch_images, check_images, empty_images, rotary_shift
from dtrain.inference.kv_cache import (
    SMALLEST_SLOT,
    CachedPrompt,
    KeyValues,
    PromptKey,
    SlotFlashAttention,
    choose_budget,
    slot_size,
)
from dtrain.inference.request import Completion, Request
from dtrain.inference.sampling import RunningSequence, Sampler, check_request
from dtrain.inference.varlen_decode import VarlenDecode
from dtrain.models.common.decoder import CausalLM
from dtrain.models.common.micro_batch import NO_ADAPTERS, AdapterContext, Images, MicroBatchContext
from dtrain.models.common.routing import RoutingRecord

if TYPE_CHECKING:
    from dtrain.inference.graphs import GraphedStep, GraphedSteps


Ticket = int

# How many tokens are decoded between looks at which rows have ended: on CUDA each look waits for the device.
_LOOK_EVERY = {"cpu": 1}
_LOOK_EVERY_ELSEWHERE = 16

MAX_LOGITS_PER_CHUNK = 1 << 26  # elements, in float32


@dataclass
class DecodingRows:
    """Rows that are being decoded. step: the captured one, None without graphs."""

    decode: Decode
    sampler: Sampler
    step: "GraphedStep | None" = None


@contextmanager
def evaluation_mode(model: CausalLM) -> Iterator[None]:
    """Context in which the model is in evaluation mode."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class NonFiniteLogits(UserError):
    """The model's logits for the rows of `tickets` are not finite. These have ended; the others go on unharmed."""

    def __init__(self, tickets: Sequence[Ticket]):
        self.tickets = tickets
        super().__init__(
            "the model's logits are not finite, nothing can be drawn from them; "
            "are its weights sound, and is its dtype wide enough?"
        )


class Peers:
    """Actions of an engine together with other ranks: none, where it is alone. `native` derives those that act.

    run_tower: whether the forward that comes runs the vision tower on every rank, for one of them has images.
    """

    run_tower = False

    def before_forward(self, has_images: bool) -> None:
        """Prepare a forward; called before every one of the model. has_images: whether this rank's has some."""

    def agree(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens [R] int64 and logprobs [R], as drawn: the same on all ranks that compute the same rows."""
        return tokens, logprobs

    def give_up(self) -> bool:
        """Return whether to stop between two steps; the same answer on all ranks that compute the same rows."""
        return False


class Engine:
    """Engine of one rank, on a model that is whole on its device, gathered, or split over tp ranks that run in step.

    decode: token ids → text; needed for stop texts only. max_rows: sequences decoded together. max_tokens: positions
    of keys and values held at a time, in slots of powers of two. Both are chosen by default, see `choose_budget`.
    A request is let in only when its whole length fits, so that none is ever thrown out.
    steps: decodes by captured graphs, for a model that is whole on its device and whose weights are gathered; rows then
    have slots for all their tokens from the beginning. records_routing: keeps where the tokens of prompts went, so that
    requests may ask for it; of a mixture of experts, without graphs. flash: attends in place of products, for many rows
    (`NativeEngine` chooses it): FlashAttention-2 never splits keys, so that few rows of many keys are slow.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        decode: Callable[[list[int]], str] | None = None,
        max_rows: int | None = None,
        max_tokens: int | None = None,
        device: torch.device | None = None,
        peers: Peers | None = None,
        steps: "GraphedSteps | None" = None,
        records_routing: bool = False,
        flash: SlotFlashAttention | None = None,
    ):
        if records_routing and (model.routing is None or steps is not None):
            raise ValueError("records_routing is for a mixture of experts, without graphs")
        self.model = model
        self.device = device or next(model.parameters()).device
        chosen = choose_budget(model, self.device, with_graphs=steps is not None)
        self.budget = replace(chosen, rows=max_rows or chosen.rows, tokens=max_tokens or chosen.tokens)
        self._decode_text = decode
        self._peers = peers or Peers()
        self._steps = steps
        self._notes_experts = records_routing
        self._flash = flash
        self.adapters: AdapterContext | None = None  # of every forward, see `use_adapters`
        self._look_every = _LOOK_EVERY.get(self.device.type, _LOOK_EVERY_ELSEWHERE)
        self._tickets = 0
        self._sequences: dict[Ticket, RunningSequence] = {}  # unfinished ones
        self._finished: list[tuple[Ticket, Completion]] = []  # to be handed out
        self._failed: list[Ticket] = []
        self._clear()

    def _clear(self) -> None:
        """Drop cache and rows: an engine without work holds no memory but what its steps keep, for weights and batch
        change between calls."""
        steps, config = self._steps, self.model.config
        self._store = KeyValues.of(config, self._flash) if steps is None else steps.rest(self._flash)
        self._waiting: dict[PromptKey, deque[RunningSequence]] = {}  # by prompt, the first that came first
        self._prompts: dict[PromptKey, CachedPrompt] = {}  # in the cache
        self._held = 0  # positions that prompts and rows may come to fill
        self._rows: list[RunningSequence] = []  # decoding, in the cache's order
        # Drawn since the last look: rows, their tokens [R] int64 and logprobs [R]; and the experts that the tokens read
        # for them went to, [R, 1, layers, k], where these were noted.
        self._fresh: list[tuple[list[RunningSequence], Tensor, Tensor, Tensor | None]] = []
        self._tokens = self._index([])  # the last ones drawn, [R]
        self._decoding: DecodingRows | None = None  # None: rows came, went or grew

    def use_adapters(self, enabled: bool) -> None:
        """Compute further requests with the model's adapters, as an engine does at first, or without them.

        The model is not changed: other engines on it, and callers of it, decide for themselves.

        Raises:
            ValueError: If the engine has work, whose keys and values would be of both kinds, or decodes by graphs.
        """
        if enabled == (self.adapters is None):
            return
        if self.has_work or self._steps is not None:
            raise ValueError("use_adapters needs an engine without work and without graphs")
        self.adapters = None if enabled else NO_ADAPTERS

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions of `requests`, in order. The engine must hold no other work. Raises UserError, and
        Interrupted where its peers give up."""
        if self.has_work:
            raise ValueError("generate needs an engine without work; use add and step beside others")
        for index, request in enumerate(requests):
            self.check(request, f"request {index}")
        tickets = [self._enqueue(request) for request in requests]
        completions: dict[Ticket, Completion] = {}
        try:
            while self.has_work:
                if not self._fresh and self._peers.give_up():  # just looked: the answer waits for no device
                    raise Interrupted
                completions.update(self.step())
        finally:
            self.drop_all_work()
        return [completions[ticket] for ticket in tickets]

    def add(self, request: Request) -> Ticket:
        """Put a request in the queue and return its ticket, its name from here on. Raises UserError for a bad one."""
        self.check(request, "the request")
        return self._enqueue(request)

    @property
    def has_work(self) -> bool:
        """Return whether a request waits or is being decoded, or `step` has a completion still to hand out."""
        return bool(self._sequences or self._finished)

    def progress(self, ticket: Ticket, start: int = 0) -> tuple[list[int], list[float]]:
        """Return token ids and logprobs of an unfinished ticket so far, from the `start`-th on. For streaming: `step`
        adds to them. Raises KeyError where the ticket has ended."""
        sequence = self._sequences[ticket]
        return sequence.ids[start:], sequence.logprobs[start:]

    def cancel(self, ticket: Ticket) -> None:
        """Drop a ticket, waiting or decoding; nothing where it has ended already."""
        self._finished = [(other, completion) for other, completion in self._finished if other != ticket]
        sequence = self._sequences.pop(ticket, None)
        if sequence is None:
            return
        sequence.is_done = True
        queue = self._waiting.get(sequence.prompt)
        if queue is not None and sequence in queue:
            queue.remove(sequence)
            if not queue:
                del self._waiting[sequence.prompt]
                self._drop_unused([sequence.prompt])
        if not self._sequences:
            self._clear()

    @torch.no_grad()
    def step(self) -> list[tuple[Ticket, Completion]]:
        """Let waiting requests in, decode one token of every row, and return what has ended, in no fixed order.

        On CUDA completions come up to 16 steps late: looking at tokens waits for the device. Without work it returns
        nothing. Raises NonFiniteLogits for rows whose logits are not finite; other ended rows come with the next step.
        """
        with evaluation_mode(self.model):
            if self._sequences:
                self._drop_ended()
                decoding = self._lay_out(*self._read_prompts(self._admit()))
                if decoding is not None:
                    self._decode(decoding)
                if self._fresh and (len(self._fresh) >= self._look_every or all(row.has_all for row in self._rows)):
                    self._look()
        if not self._sequences:
            self._clear()
        if self._failed:
            failed, self._failed = self._failed, []
            raise NonFiniteLogits(failed)
        finished, self._finished = self._finished, []
        return finished

    def _enqueue(self, request: Request) -> Ticket:
        self._tickets += 1
        ticket = self._tickets
        if request.sampling.max_new_tokens == 0:
            self._finished.append((ticket, Completion()))
            return ticket
        sequence = RunningSequence(ticket, request, self._decode_text)
        self._sequences[ticket] = sequence
        self._waiting.setdefault(sequence.prompt, deque()).append(sequence)
        return ticket

    def drop_all_work(self) -> None:
        """Drop all work, also where a step has raised in its middle."""
        self._sequences.clear()
        self._finished.clear()
        self._failed.clear()
        self._clear()

    def _admit(self) -> list[RunningSequence]:
        """Return the waiting sequences that rows and memory suffice for; new prompts get their slots, not yet read.

        Those whose prompt is in the cache come first, then by arrival; none overtakes one that must wait for memory.
        """
        entering = self._admit_within(self.budget.rows - len(self._rows))
        if not entering and not self._rows:
            # Prompts kept for samples that wait may fill the memory that one of these needs.
            self._store.release([prompt.slot for prompt in self._prompts.values()])
            self._prompts.clear()
            self._held = 0
            entering = self._admit_within(self.budget.rows)
        return entering

    def _admit_within(self, rows: int) -> list[RunningSequence]:
        entering: list[RunningSequence] = []
        for prompt in sorted(self._waiting, key=lambda prompt: prompt not in self._prompts):
            queue = self._waiting[prompt]
            is_held = prompt in self._prompts
            while queue and len(entering) < rows:
                needed = queue[0].capacity + (0 if is_held else slot_size(len(prompt.ids)))
                if self._held + needed > self.budget.tokens:
                    break
                self._held += needed
                is_held = True
                entering.append(queue.popleft())
            if queue:
                break
            del self._waiting[prompt]
        return entering

    def _read_prompts(self, entering: list[RunningSequence]) -> tuple[list[RunningSequence], Tensor]:
        """Read the prompts that `entering` needs, draw first tokens; return the rows that go on, and theirs [rows]."""
        if not entering:
            return [], self._index([])
        # Prompts of one size together: little is padding, and their slots lie side by side. Those with images apart.
        by_size: dict[tuple[int, bool], list[RunningSequence]] = {}
        for row in {row.prompt: row for row in entering}.values():
            if row.prompt not in self._prompts:
                kind = slot_size(len(row.prompt.ids)), row.request.images is not None
                by_size.setdefault(kind, []).append(row)
        for (size, _), group in by_size.items():
            group.sort(key=lambda row: len(row.prompt.ids))
            count = max(1, self.budget.prefill // size)
            for start in range(0, len(group), count):
                self._read(group[start : start + count])
        for row in entering:
            self._prompts[row.prompt].users += 1
            row.prompt_routed = self._prompts[row.prompt].routed
        sampler = self._sampler(entering)
        logits = torch.stack([self._prompts[row.prompt].logits for row in entering])
        tokens = self._keep(entering, *self._peers.agree(*sampler.draw(logits, self._index([0] * len(entering)))))
        if self._look_every == 1:
            self._look()  # a first token may be the last
        self._give_back([row for row in entering if row.has_ended])
        staying = [index for index, row in enumerate(entering) if not row.has_ended]
        return [entering[index] for index in staying], tokens[self._index(staying)]

    def _read(self, rows: list[RunningSequence]) -> None:
        """Read the prompts of `rows`, each another; all of them with images, or none."""
        prompts = [row.prompt.ids for row in rows]
        longest = max(map(len, prompts))
        # With a token of its own: a NaN that padding brings in would be one after the masked product too.
        padded = [[*ids, *ids[-1:] * (longest - len(ids))] for ids in prompts]
        several = [row.request.images for row in rows if row.request.images is not None]
        images = batch_images(several, longest, self.model.config, self.device) if several else None
        shifts = list(map(rotary_shift, several)) or [0] * len(rows)
        slots = [self._store.new_prompt(len(ids), shift) for ids, shift in zip(prompts, shifts, strict=True)]
        cache = Prefill(self._store, slots, self.device, None if images is None else images.ends)
        logits, routed = self._forward(self._index(padded), cache, self._notes_experts, images)
        for index, (row, slot, after) in enumerate(zip(rows, slots, logits, strict=True)):
            experts = None if routed is None else routed[index, : slot.length].clone()
            self._prompts[row.prompt] = CachedPrompt(slot, after, experts)

    def _forward(
        self, tokens: Tensor, cache: Prefill | Decode, notes: bool, images: Images | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return `next_logits` [B, V], and with `notes` the experts of the tokens [B, S], [B, S, layers, k] int16."""
        self._peers.before_forward(images is not None)
        if images is None and self._peers.run_tower:
            images = empty_images(tokens, self.model.config)
        record = RoutingRecord(records_choices=True) if notes else None
        logits = self.model.next_logits(tokens, cache, images, record, self.adapters)
        return logits, None if record is None else record.choices_by_row(len(tokens))

    def _lay_out(self, entering: list[RunningSequence], first_tokens: Tensor) -> DecodingRows | None:
        """Bring the rows, their tokens and settings in the cache's order, where rows came, went or grew; None without
        rows."""
        old = {id(row): index for index, row in enumerate([*self._rows, *entering])}
        for row in entering:
            self._store.new_row(row, SMALLEST_SLOT if self._steps is None else row.capacity)
        if self._store.grow() or entering or (self._decoding is not None and self._decoding.decode.is_full):
            self._decoding = None
        if self._decoding is None:
            self._rows = [slot.owner for slot in self._store.rows_in_order()]
            order = self._index([old[id(row)] for row in self._rows])
            self._tokens = torch.cat([self._tokens, first_tokens])[order]
            if self._rows:
                self._decoding = self._decoding_of(self._rows)
        return self._decoding

    def _decoding_of(self, rows: list[RunningSequence]) -> DecodingRows:
        prompts = [self._prompts[row.prompt].slot for row in rows]
        kind = Decode if self._flash is None else VarlenDecode
        decode = kind(self._store, prompts, self.device, fixed=self._steps is not None)
        if self._steps is None or decode.live is None:
            return DecodingRows(decode, self._sampler(rows))
        every = [rows[0]] * decode.rows  # what is drawn for the others is not read
        for index, row in zip(decode.places, rows, strict=True):
            every[index] = row
        tokens = self._tokens.new_zeros(decode.rows)
        tokens[decode.live] = self._tokens
        sampler = self._sampler(every)
        return DecodingRows(decode, sampler, self._steps.open(decode, sampler, tokens))

    def _decode(self, decoding: DecodingRows) -> None:
        """Decode one token of every row."""
        decode, step = decoding.decode, decoding.step
        if step is None:
            decode.begin()
            notes = any(row.request.routed for row in self._rows)
            logits, routed = self._forward(self._tokens[:, None], decode, notes)  # [R, V], [R, 1, layers, k]
            drawn = self._peers.agree(*decoding.sampler.draw(logits, decode.drawn))
            self._tokens = self._keep(self._rows, *drawn, routed)
            decode.end()
        else:
            self._peers.before_forward(False)
            step()
            self._tokens = self._keep(self._rows, step.tokens[decode.live], step.logprobs[decode.live])
        decode.lengthen()

    def _sampler(self, rows: list[RunningSequence]) -> Sampler:
        return Sampler([row.request.sampling for row in rows], [row.key for row in rows], self.device)

    def _index(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def _keep(
        self, rows: list[RunningSequence], tokens: Tensor, logprobs: Tensor, routed: Tensor | None = None
    ) -> Tensor:
        self._fresh.append((rows, tokens, logprobs, routed))
        for row in rows:
            row.drawn += 1
        return tokens

    def _look(self) -> None:
        """Read what was drawn since the last look, and find the completions that have ended."""
        groups, drawn, measured, noted = zip(*self._fresh, strict=True)
        tokens, logprobs = torch.cat(drawn).tolist(), torch.cat(measured).tolist()
        rows = [row for group in groups for row in group]
        routed: list[Tensor | None] = []
        for group, experts in zip(groups, noted, strict=True):
            routed += [None] * len(group) if experts is None else experts.cpu().unbind(0)
        self._fresh = []
        for row, token, logprob, experts in zip(rows, tokens, logprobs, routed, strict=True):
            if row.is_done:
                continue
            if experts is not None and row.request.routed:
                row.routed.append(experts)
            if logprob != logprob:
                self._failed.append(row.ticket)
            elif (finish := row.push(token, logprob)) is not None:
                self._finished.append((row.ticket, Completion(row.ids, row.logprobs, finish, routed=row.all_routed())))
            else:
                continue
            row.is_done = True
            del self._sequences[row.ticket]

    def _drop_ended(self) -> None:
        """Take rows that have ended, or whose tokens are all drawn, out of the cache, and prompts without use."""
        gone = [row for row in self._rows if row.has_ended]
        if not gone:
            return
        kept = [index for index, row in enumerate(self._rows) if not row.has_ended]
        self._store.release([slot for slot in self._store.rows_in_order() if slot.owner.has_ended])
        self._rows = [self._rows[index] for index in kept]
        self._tokens = self._tokens[self._index(kept)]
        self._decoding = None
        self._give_back(gone)

    def _give_back(self, gone: list[RunningSequence]) -> None:
        """Free the positions that the rows `gone`, which are in no slot any more, have held."""
        for row in gone:
            self._held -= row.capacity
            self._prompts[row.prompt].users -= 1
        self._drop_unused({row.prompt: None for row in gone})

    def _drop_unused(self, prompts: Iterable[PromptKey]) -> None:
        held = [prompt for prompt in prompts if prompt in self._prompts and prompt not in self._waiting]
        unused = [prompt for prompt in held if not self._prompts[prompt].users]
        if unused:
            self._store.release([self._prompts.pop(prompt).slot for prompt in unused])
            self._held -= sum(slot_size(len(prompt.ids)) for prompt in unused)
            self._decoding = None

    def check(self, request: Request, name: str) -> None:
        """Raise UserError for a bad request, and where model or memory do not hold it even alone."""
        config = self.model.config
        check_request(request, config.vocab_size, name, has_decode=self._decode_text is not None)
        if request.images is not None:
            check_images(request.images, len(request.prompt), config, name)
        longest, most = len(request.prompt) + request.sampling.max_new_tokens, config.max_document_length
        if most is not None and longest > most:
            raise UserError(
                f"{name} may come to {longest} tokens, and with LongRoPE this model takes {most}; lower "
                f"max_new_tokens={request.sampling.max_new_tokens}, or shorten the prompt"
            )
        if request.routed and not self._notes_experts:
            raise UserError(f"{name} asks which experts tokens go to, which is told of a mixture of experts alone")
        needed = slot_size(len(request.prompt)) + slot_size(request.sampling.max_new_tokens)
        if needed > self.budget.tokens:
            raise UserError(
                f"{name} may come to {needed} positions of keys and values (slots are powers of two), and there is "
                f"room for {self.budget.tokens}; lower max_new_tokens={request.sampling.max_new_tokens}, or give it "
                "more memory"
            )


@dataclass(frozen=True)
class TokenScores:
    """Scores of the tokens after the first of a prompt of n, each [n − 1]: log p of the token given those before it,
    the likeliest token in its place, and log p of that one."""

    logprobs: list[float]
    argmax_ids: list[int]
    max_logprobs: list[float]


@torch.no_grad()
def score_prompts(
    model: CausalLM, prompts: Sequence[Sequence[int]], together: int, adapters: AdapterContext | None = None
) -> list[TokenScores]:
    """Return the scores of each prompt, in order, in max(float32, the model's dtype). model: whole on its device.
    together: tokens of one forward, beyond a single prompt. adapters: whether those of the model take part. No
    collective."""
    scores: dict[int, TokenScores] = {}
    with evaluation_mode(model):
        for batch, ids in _batches_of_like_length(prompts, together, next(model.parameters()).device):
            hidden = model.model(ids, MicroBatchContext(adapters=adapters))  # [B, S, D]
            for index, states, tokens in zip(batch, hidden, ids, strict=True):
                length = len(prompts[index])
                scores[index] = _token_scores(model, states[: length - 1], tokens[1:length])
    return [scores[index] for index in range(len(prompts))]


@torch.no_grad()
def classify_rows(model: CausalLM, rows: Sequence[Sequence[int]], together: int) -> Tensor:
    """Return a classifier's outputs [n, labels] for each row of ids, in max(float32, the model's dtype), on the CPU:
    read at the last token that is not the config's pad_token_id, at the first where all are. Arguments as of
    `score_prompts`."""
    weight, pad = next(model.parameters()), model.config.pad_token_id
    outputs = torch.zeros(
        len(rows), model.config.num_labels or 0, dtype=torch.promote_types(weight.dtype, torch.float32)
    )
    with evaluation_mode(model):
        for batch, ids in _batches_of_like_length(rows, together, weight.device):
            ends = [max((i for i, token in enumerate(rows[row]) if token != pad), default=0) for row in batch]
            states = model.model(ids, MicroBatchContext())[
                torch.arange(len(batch), device=ids.device), torch.tensor(ends)
            ]  # [B, D]
            outputs[batch] = model.logits(states).to(outputs)
    return outputs


def _batches_of_like_length(
    rows: Sequence[Sequence[int]], together: int, device: torch.device
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield rows of like length, as their numbers and ids [B, S], each filled up with its last token: what comes after
    a token does not reach it."""
    left = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    while left:
        count = max(1, sum(size * len(rows[index]) <= together for size, index in enumerate(left, 1)))
        batch, left = left[:count], left[count:]
        longest = len(rows[batch[-1]])
        filled = [[*rows[index], *[rows[index][-1]] * (longest - len(rows[index]))] for index in batch]
        yield batch, torch.tensor(filled, device=device)


def _token_scores(model: CausalLM, hidden: Tensor, tokens: Tensor) -> TokenScores:
    """Return the scores of tokens [n], each predicted by its row of hidden [n, D]."""
    parts: list[tuple[Tensor, ...]] = []
    rows = max(1, MAX_LOGITS_PER_CHUNK // model.config.vocab_size)
    for states, wanted in zip(hidden.split(rows), tokens.split(rows), strict=True):
        logits = model.logits(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [rows, V]
        total = logits.logsumexp(-1)
        most = logits.max(-1)
        parts.append((logits.gather(1, wanted[:, None])[:, 0] - total, most.indices, most.values - total))
    return TokenScores(*(torch.cat(part).tolist() for part in zip(*parts, strict=True)))
