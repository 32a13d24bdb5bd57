"""The generation engine of one rank: continuous batching over a KV cache, from requests to completions.

Requests wait in a queue. Each `Engine.step` admits as many as rows and memory allow, reads their prompts, and decodes
one token of every row. Rows that have ended leave, and make room for waiting requests. Example: an engine with 3 rows,
and 4 requests, of which A1 and A2 are two samples of the same prompt A:

    step 1    admit A1 A2 B    read the prompts A and B once each, and sample the first tokens of A1, A2 and B
                               decode one token more of A1, A2 and B
    step 2                     decode one token of A1, A2 and B       A2 ends with a stop token
    step 3    admit C          read the prompt C, and sample its first token
                               decode one token of A1, B and C

On CUDA, the host must wait for the device to read sampled tokens, so it reads them only every 16 steps. A row may
therefore compute tokens beyond its end, which are dropped. A completion does not depend on the other requests, except
for rounding.

`score_prompts` returns log-probabilities of prompt tokens, and `classify_rows` the outputs of a classifier. Both run
one forward for each batch and sample nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dtrain.base.errors import Interrupted, UserError
from dtrain.inference.cached_attention import Decode, Prefill
from dtrain.inference.decodable import refuse_undecodable
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
"""Identity of a request in an engine."""

# Steps between readings of sampled tokens. On CUDA, each reading waits for the device.
_STEPS_PER_READ = {"cpu": 1}
_STEPS_PER_READ_ELSEWHERE = 16

# Elements of the float32 logits that `score_prompts` computes at once.
MAX_LOGITS_PER_CHUNK = 1 << 26


@dataclass
class DecodingRows:
    """Rows that are decoded together.

    Attributes:
        decode: Their cache.
        sampler: Their sampling settings.
        step: The captured step. None without CUDA graphs.
    """

    decode: Decode
    sampler: Sampler
    step: "GraphedStep | None" = None


@dataclass
class _Sampled:
    """Tokens that were sampled, and not yet read by the host.

    Attributes:
        rows: The rows, R of them.
        tokens: Token of each, int64 [R].
        logprobs: Its log-probability, [R].
        routed: Experts of the tokens that were read to sample these, [R, 1, layers, k]. None if not recorded.
    """

    rows: list[RunningSequence]
    tokens: Tensor
    logprobs: Tensor
    routed: Tensor | None


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
    """The model's logits of some rows are not finite. These rows have ended; the others continue.

    Attributes:
        tickets: The requests.
    """

    def __init__(self, tickets: Sequence[Ticket]):
        self.tickets = tickets
        super().__init__(
            "the model's logits are not finite, so no token can be sampled. Check that its weights have no NaN, and "
            "that its dtype is wide enough (float16 overflows above 65504)"
        )


class Peers:
    """Coordination of an engine with other ranks.

    This base class is for an engine on a single rank, which needs none. `native` overrides it for a mesh.

    Attributes:
        run_tower: Whether the next forward runs the vision tower on every rank, because one of them has images.
    """

    run_tower = False

    def before_forward(self, has_images: bool) -> None:
        """Prepare a forward. Called before every forward of the model.

        Args:
            has_images: Whether this rank's forward has images.
        """

    def agree(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return sampled tokens, int64 [R], and logprobs, [R], made equal on all ranks that decode the same rows."""
        return tokens, logprobs

    def should_stop(self) -> bool:
        """Check whether to stop between two steps. All ranks that decode the same rows return the same value."""
        return False


class Engine:
    """Engine of one rank. The model is complete on its device, gathered, or sharded over tp ranks that run in lockstep.

    A request is admitted only if its full length fits into memory, so a running one is never evicted.

    Args:
        model: The model.
        decode: Decodes token ids to text. Needed only for stop texts.
        max_rows: Sequences that are decoded together. None: see `choose_budget`.
        max_tokens: Positions of keys and values in the cache, in slots of powers of two. None: see `choose_budget`.
        device: Device of the engine. None: that of the parameters.
        peers: Other ranks.
        steps: Decodes by captured CUDA graphs, if the model is complete on its device or its weights are gathered. Rows
            then have slots for all their tokens from the beginning.
        records_routing: Record the experts of prompt tokens, so that requests may ask for them. Only for mixtures of
            experts, and without graphs.
        flash: Flash attention of decoding rows to their slots. None: matrix products. `NativeEngine` passes it for its
            many rows. With a few rows of many keys it is slow, because FlashAttention-2 does not split keys.

    Raises:
        UserError: If the model has states that the cache does not store (`decodable`).
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
        refuse_undecodable(model.config)
        self.model = model
        self.device = device or next(model.parameters()).device
        chosen = choose_budget(model, self.device, with_graphs=steps is not None)
        self.budget = replace(chosen, rows=max_rows or chosen.rows, tokens=max_tokens or chosen.tokens)
        self._decode_text = decode
        self._peers = peers or Peers()
        self._steps = steps
        self._records_routing = records_routing
        self._flash = flash
        self.adapters: AdapterContext | None = None  # of every forward, see `use_adapters`
        self._steps_per_read = _STEPS_PER_READ.get(self.device.type, _STEPS_PER_READ_ELSEWHERE)
        self._last_ticket = 0
        self._sequences: dict[Ticket, RunningSequence] = {}  # unfinished ones
        self._finished: list[tuple[Ticket, Completion]] = []  # not yet returned by `step`
        self._failed: list[Ticket] = []
        self._clear()

    def _clear(self) -> None:
        """Drop the cache and all rows.

        An engine without work keeps no memory except that of captured steps, because the trainer needs the memory, and
        keys and values of the old weights would be wrong after an update.
        """
        config = self.model.config
        if self._steps is None:
            self._store = KeyValues.of(config, self._flash)
        else:
            self._store = self._steps.rest(self._flash)
        self._waiting: dict[PromptKey, deque[RunningSequence]] = {}  # by prompt, in the order of the prompts' arrival
        self._prompts: dict[PromptKey, CachedPrompt] = {}  # in the cache
        self._reserved = 0  # positions that cached prompts and running rows may fill at most
        self._rows: list[RunningSequence] = []  # decoding, in the cache's order
        self._unread: list[_Sampled] = []
        self._tokens = self._index([])  # the last token of each row, [R]
        self._decoding: DecodingRows | None = None  # None if rows have come, gone or moved

    def use_adapters(self, enabled: bool) -> None:
        """Compute further requests with or without the model's adapters. A new engine uses them.

        The setting belongs to this engine. The model itself is not changed.

        Raises:
            ValueError: If the engine has work, because its cached keys and values were computed with the old setting,
                or if it decodes by graphs.
        """
        if enabled == (self.adapters is None):
            return
        if self.has_work or self._steps is not None:
            raise ValueError("use_adapters needs an engine without work and without graphs")
        self.adapters = None if enabled else NO_ADAPTERS

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completions of `requests`, in order.

        Raises:
            UserError: If a request is not valid, or logits are not finite.
            ValueError: If the engine has other work.
            Interrupted: If the peers give up.
        """
        if self.has_work:
            raise ValueError("generate needs an engine without work. Use add and step to run requests next to others")
        for index, request in enumerate(requests):
            self.check(request, f"request {index}")
        tickets = [self._enqueue(request) for request in requests]
        completions: dict[Ticket, Completion] = {}
        try:
            while self.has_work:
                # Ask only when no sampled tokens are unread. `should_stop` may read a tensor of the last step, and
                # would make the host wait for the device.
                if not self._unread and self._peers.should_stop():
                    raise Interrupted
                completions.update(self.step())
        finally:
            self.drop_all_work()
        return [completions[ticket] for ticket in tickets]

    def add(self, request: Request) -> Ticket:
        """Put a request in the queue, and return its ticket. Raises UserError if it is not valid."""
        self.check(request, "the request")
        return self._enqueue(request)

    @property
    def has_work(self) -> bool:
        """Whether a request waits or is being decoded, or `step` has a completion to return."""
        return bool(self._sequences or self._finished)

    def progress(self, ticket: Ticket, start: int = 0) -> tuple[list[int], list[float]]:
        """Return the tokens and logprobs of an unfinished request so far, for streaming.

        Args:
            ticket: The request.
            start: The number of tokens to leave out at the beginning.

        Raises:
            KeyError: If the request has ended.
        """
        sequence = self._sequences[ticket]
        return sequence.ids[start:], sequence.logprobs[start:]

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request, whether it waits or is being decoded. Does nothing if it has ended."""
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
        """Admit waiting requests, decode one token of every row, and return the completions that have ended.

        Completions are returned in no particular order. On CUDA they may be returned up to 16 steps late, because
        reading tokens makes the host wait for the device.

        Returns:
            (ticket, completion) of each ended request.

        Raises:
            NonFiniteLogits: If the logits of rows are not finite. Completions that ended in the same step are returned
                by the next step.
        """
        with evaluation_mode(self.model):
            if self._sequences:
                self._drop_ended()
                entering, first_tokens = self._read_prompts(self._admit())
                decoding = self._lay_out(entering, first_tokens)
                if decoding is not None:
                    self._decode(decoding)
                if self._unread:
                    is_due = len(self._unread) >= self._steps_per_read
                    if is_due or all(row.has_all for row in self._rows):
                        self._read_sampled()
        if not self._sequences:
            self._clear()
        if self._failed:
            failed, self._failed = self._failed, []
            raise NonFiniteLogits(failed)
        finished, self._finished = self._finished, []
        return finished

    def _enqueue(self, request: Request) -> Ticket:
        """Put a checked request in the queue."""
        self._last_ticket += 1
        ticket = self._last_ticket
        if request.sampling.max_new_tokens == 0:
            self._finished.append((ticket, Completion()))
            return ticket
        sequence = RunningSequence(ticket, request, self._decode_text)
        self._sequences[ticket] = sequence
        self._waiting.setdefault(sequence.prompt, deque()).append(sequence)
        return ticket

    def drop_all_work(self) -> None:
        """Drop all work, also after a step has raised an error."""
        self._sequences.clear()
        self._finished.clear()
        self._failed.clear()
        self._clear()

    def _admit(self) -> list[RunningSequence]:
        """Return the waiting sequences for which there are rows and memory."""
        entering = self._admit_within(self.budget.rows - len(self._rows))
        if not entering and not self._rows:
            # Nothing runs and nothing fits. The memory is taken by cached prompts that wait for more samples, so they
            # are dropped and read again later.
            self._store.release([prompt.slot for prompt in self._prompts.values()])
            self._prompts.clear()
            self._reserved = 0
            entering = self._admit_within(self.budget.rows)
        return entering

    def _admit_within(self, rows: int) -> list[RunningSequence]:
        """Remove from the queue, and return, at most `rows` sequences for which there is memory.

        Samples of cached prompts come first, then samples of other prompts in the order of arrival. If a sequence must
        wait for memory, all later ones wait too, so that large requests are not overtaken for ever.
        """
        entering: list[RunningSequence] = []
        for prompt in sorted(self._waiting, key=lambda prompt: prompt not in self._prompts):
            queue = self._waiting[prompt]
            has_slot = prompt in self._prompts
            while queue and len(entering) < rows:
                needed = queue[0].capacity + (0 if has_slot else slot_size(len(prompt.ids)))
                if self._reserved + needed > self.budget.tokens:
                    break
                self._reserved += needed
                has_slot = True
                entering.append(queue.popleft())
            if queue:
                break
            del self._waiting[prompt]
        return entering

    def _read_prompts(self, entering: list[RunningSequence]) -> tuple[list[RunningSequence], Tensor]:
        """Read the prompts of admitted sequences that are not cached, and sample the first tokens.

        Returns:
            The sequences that continue, and the first token of each, int64 [rows].
        """
        if not entering:
            return [], self._index([])
        # Prompts with equal slot sizes are read in one forward: they need little padding, and their slots are
        # consecutive. Prompts with images form batches of their own.
        one_per_prompt = {row.prompt: row for row in entering}
        groups: dict[tuple[int, bool], list[RunningSequence]] = {}
        for row in one_per_prompt.values():
            if row.prompt not in self._prompts:
                kind = slot_size(len(row.prompt.ids)), row.request.images is not None
                groups.setdefault(kind, []).append(row)
        for (size, _), group in groups.items():
            group.sort(key=lambda row: len(row.prompt.ids))
            count = max(1, self.budget.prefill // size)
            for start in range(0, len(group), count):
                self._read(group[start : start + count])
        for row in entering:
            self._prompts[row.prompt].users += 1
            row.prompt_routed = self._prompts[row.prompt].routed
        sampler = self._sampler(entering)
        logits = torch.stack([self._prompts[row.prompt].logits for row in entering])
        num_sampled = self._index([0] * len(entering))
        tokens, logprobs = self._peers.agree(*sampler.sample(logits, num_sampled))
        self._record(entering, tokens, logprobs)
        if self._steps_per_read == 1:
            self._read_sampled()  # the first token may be the last one
        self._release_reserved([row for row in entering if row.has_ended])
        staying = [index for index, row in enumerate(entering) if not row.has_ended]
        return [entering[index] for index in staying], tokens[self._index(staying)]

    def _read(self, rows: list[RunningSequence]) -> None:
        """Read the prompts of `rows` in one forward.

        Args:
            rows: Sequences with different prompts. Either all or none of the prompts have images.
        """
        prompts = [row.prompt.ids for row in rows]
        longest = max(map(len, prompts))
        # Pad with each prompt's own last token. Keys of padding are masked, but masking multiplies by 0, and a padding
        # token whose embedding gives NaN would turn the product into NaN.
        padded = [[*ids, *ids[-1:] * (longest - len(ids))] for ids in prompts]
        row_images = [row.request.images for row in rows if row.request.images is not None]
        images = None
        shifts = [0] * len(rows)
        if row_images:
            images = batch_images(row_images, longest, self.model.config, self.device)
            shifts = [rotary_shift(images_of_row) for images_of_row in row_images]
        slots = [self._store.new_prompt(len(ids), shift) for ids, shift in zip(prompts, shifts, strict=True)]
        cache = Prefill(self._store, slots, self.device, None if images is None else images.ends)
        logits, routed = self._forward(self._index(padded), cache, self._records_routing, images)
        for index, (row, slot, row_logits) in enumerate(zip(rows, slots, logits, strict=True)):
            row_routed = None if routed is None else routed[index, : slot.length].clone()
            self._prompts[row.prompt] = CachedPrompt(slot, row_logits, row_routed)

    def _forward(
        self, tokens: Tensor, cache: Prefill | Decode, records_routing: bool, images: Images | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model on tokens [B, S].

        Returns:
            The logits after each row's last token, [B, V], and with `records_routing` the experts of the tokens, int16
            [B, S, layers, k].
        """
        self._peers.before_forward(images is not None)
        if images is None and self._peers.run_tower:
            images = empty_images(tokens, self.model.config)
        record = RoutingRecord(records_choices=True) if records_routing else None
        logits = self.model.next_logits(tokens, cache, images, record, self.adapters)
        return logits, None if record is None else record.choices_by_row(len(tokens))

    def _lay_out(self, entering: list[RunningSequence], first_tokens: Tensor) -> DecodingRows | None:
        """Give new rows their slots, and bring rows, tokens and settings into the cache's order.

        Args:
            entering: New rows.
            first_tokens: Their first tokens, int64 [rows].

        Returns:
            The rows to decode. None if there are none.
        """
        old_index = {id(row): index for index, row in enumerate([*self._rows, *entering])}
        for row in entering:
            self._store.new_row(row, SMALLEST_SLOT if self._steps is None else row.capacity)
        has_grown = self._store.grow()
        is_full = self._decoding is not None and self._decoding.decode.is_full
        if has_grown or entering or is_full:
            self._decoding = None
        if self._decoding is None:
            self._rows = [slot.owner for slot in self._store.rows_in_order()]
            order = self._index([old_index[id(row)] for row in self._rows])
            self._tokens = torch.cat([self._tokens, first_tokens])[order]
            if self._rows:
                self._decoding = self._build_decoding(self._rows)
        return self._decoding

    def _build_decoding(self, rows: list[RunningSequence]) -> DecodingRows:
        """Build the cache and the sampler of a step for `rows`, in the cache's order."""
        prompts = [self._prompts[row.prompt].slot for row in rows]
        decode_class = Decode if self._flash is None else VarlenDecode
        decode = decode_class(self._store, prompts, self.device, fixed=self._steps is not None)
        if self._steps is None or decode.live is None:
            return DecodingRows(decode, self._sampler(rows))
        # A captured step is padded to more rows. The tokens of padding are not read, so it may have any settings.
        padded_rows = [rows[0]] * decode.rows
        for index, row in zip(decode.places, rows, strict=True):
            padded_rows[index] = row
        tokens = self._tokens.new_zeros(decode.rows)
        tokens[decode.live] = self._tokens
        sampler = self._sampler(padded_rows)
        return DecodingRows(decode, sampler, self._steps.open(decode, sampler, tokens))

    def _decode(self, decoding: DecodingRows) -> None:
        """Decode one token of every row."""
        decode, step = decoding.decode, decoding.step
        if step is None:
            decode.begin()
            records_routing = any(row.request.routed for row in self._rows)
            logits, routed = self._forward(self._tokens[:, None], decode, records_routing)  # [R, V], [R, 1, layers, k]
            tokens, logprobs = self._peers.agree(*decoding.sampler.sample(logits, decode.num_sampled))
            self._record(self._rows, tokens, logprobs, routed)
            decode.end()
        else:
            self._peers.before_forward(False)
            step()
            tokens = step.tokens[decode.live]
            self._record(self._rows, tokens, step.logprobs[decode.live])
        self._tokens = tokens
        decode.lengthen()

    def _sampler(self, rows: list[RunningSequence]) -> Sampler:
        return Sampler([row.request.sampling for row in rows], [row.key for row in rows], self.device)

    def _index(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)

    def _record(
        self, rows: list[RunningSequence], tokens: Tensor, logprobs: Tensor, routed: Tensor | None = None
    ) -> None:
        """Remember sampled tokens until the host reads them."""
        self._unread.append(_Sampled(rows, tokens, logprobs, routed))
        for row in rows:
            row.num_sampled += 1

    def _read_sampled(self) -> None:
        """Copy the tokens sampled since the last call to the host, and collect the completions that have ended."""
        unread, self._unread = self._unread, []
        # One copy of all tokens and one of all logprobs, because each waits for the device.
        tokens = torch.cat([sampled.tokens for sampled in unread]).tolist()
        logprobs = torch.cat([sampled.logprobs for sampled in unread]).tolist()
        rows: list[RunningSequence] = []
        routed: list[Tensor | None] = []
        for sampled in unread:
            rows += sampled.rows
            if sampled.routed is None:
                routed += [None] * len(sampled.rows)
            else:
                routed += sampled.routed.cpu().unbind(0)
        for row, token, logprob, experts in zip(rows, tokens, logprobs, routed, strict=True):
            if row.is_done:  # it has computed tokens beyond its end
                continue
            if experts is not None and row.request.routed:
                row.routed.append(experts)
            if math.isnan(logprob):
                self._failed.append(row.ticket)
            else:
                finish = row.push(token, logprob)
                if finish is None:
                    continue
                completion = Completion(row.ids, row.logprobs, finish, routed=row.all_routed())
                self._finished.append((row.ticket, completion))
            row.is_done = True
            del self._sequences[row.ticket]

    def _drop_ended(self) -> None:
        """Remove rows that can leave (`RunningSequence.has_ended`) and unused prompts from the cache."""
        gone = [row for row in self._rows if row.has_ended]
        if not gone:
            return
        staying = [index for index, row in enumerate(self._rows) if not row.has_ended]
        self._store.release([slot for slot in self._store.rows_in_order() if slot.owner.has_ended])
        self._rows = [self._rows[index] for index in staying]
        self._tokens = self._tokens[self._index(staying)]
        self._decoding = None
        self._release_reserved(gone)

    def _release_reserved(self, gone: list[RunningSequence]) -> None:
        """Release the positions that were reserved for `gone`, rows without a slot."""
        for row in gone:
            self._reserved -= row.capacity
            self._prompts[row.prompt].users -= 1
        self._drop_unused({row.prompt: None for row in gone})

    def _drop_unused(self, prompts: Iterable[PromptKey]) -> None:
        """Remove prompts from the cache that no row uses and for which no sample waits."""
        unused = []
        for prompt in prompts:
            if prompt in self._prompts and prompt not in self._waiting and not self._prompts[prompt].users:
                unused.append(prompt)
        if unused:
            self._store.release([self._prompts.pop(prompt).slot for prompt in unused])
            self._reserved -= sum(slot_size(len(prompt.ids)) for prompt in unused)
            self._decoding = None

    def check(self, request: Request, name: str) -> None:
        """Raise UserError if a request is not valid, or exceeds the limits of the model or the memory of the cache.

        Args:
            request: The request.
            name: Name of the request in messages, such as "request 3".
        """
        config = self.model.config
        check_request(request, config.vocab_size, name, has_decode=self._decode_text is not None)
        if request.images is not None:
            check_images(request.images, len(request.prompt), config, name)
        max_length = len(request.prompt) + request.sampling.max_new_tokens
        max_positions = config.max_document_length
        if max_positions is not None and max_length > max_positions:
            raise UserError(
                f"{name} may come to {max_length} tokens, and this model takes at most {max_positions}. Lower "
                f"max_new_tokens={request.sampling.max_new_tokens}, or shorten the prompt"
            )
        if request.routed and not self._records_routing:
            raise UserError(
                f"{name} asks for the experts of its tokens, which this engine does not record (only a mixture of "
                "experts has any)"
            )
        needed = slot_size(len(request.prompt)) + slot_size(request.sampling.max_new_tokens)
        if needed > self.budget.tokens:
            raise UserError(
                f"{name} may come to {needed} positions of keys and values (slots are powers of two), and there is "
                f"room for {self.budget.tokens}. Lower max_new_tokens={request.sampling.max_new_tokens}, or free "
                "some memory"
            )


@dataclass(frozen=True)
class TokenScores:
    """Scores of the tokens of a prompt after the first one, n − 1 of n tokens.

    Attributes:
        logprobs: Log-probability of each token, given those before it.
        argmax_ids: The token with the highest probability in its place.
        max_logprobs: Log-probability of that token.
    """

    logprobs: list[float]
    argmax_ids: list[int]
    max_logprobs: list[float]


@torch.no_grad()
def score_prompts(
    model: CausalLM, prompts: Sequence[Sequence[int]], together: int, adapters: AdapterContext | None = None
) -> list[TokenScores]:
    """Compute log-probabilities of prompt tokens, in max(float32, the model's dtype).

    Issues no collective.

    Args:
        model: The model, complete on its device.
        prompts: Token ids.
        together: Tokens per forward, unless a single prompt is longer.
        adapters: Context that enables or disables the model's adapters. None: they are enabled.

    Returns:
        The scores of each prompt, in order.
    """
    scores: dict[int, TokenScores] = {}
    with evaluation_mode(model):
        for indices, ids in _batches_by_length(prompts, together, next(model.parameters()).device):
            hidden = model.model(ids, MicroBatchContext(adapters=adapters))  # [B, S, D]
            for index, states, tokens in zip(indices, hidden, ids, strict=True):
                length = len(prompts[index])
                scores[index] = _token_scores(model, states[: length - 1], tokens[1:length])
    return [scores[index] for index in range(len(prompts))]


@torch.no_grad()
def classify_rows(model: CausalLM, rows: Sequence[Sequence[int]], together: int) -> Tensor:
    """Compute a classifier's outputs for rows of token ids. No collective.

    Args:
        model: The classifier, complete on its device.
        rows: Token ids. Outputs are read at the last token that is not the config's pad_token_id, or at the first one
            if all are.
        together: Tokens per forward, unless a single row is longer.

    Returns:
        [n, labels] in max(float32, the model's dtype), on the CPU.
    """
    weight, pad = next(model.parameters()), model.config.pad_token_id
    outputs = torch.zeros(
        len(rows), model.config.num_labels or 0, dtype=torch.promote_types(weight.dtype, torch.float32)
    )
    with evaluation_mode(model):
        for indices, ids in _batches_by_length(rows, together, weight.device):
            last_tokens = [_last_index(rows[index], pad) for index in indices]
            hidden = model.model(ids, MicroBatchContext())  # [B, S, D]
            states = hidden[torch.arange(len(indices), device=ids.device), torch.tensor(last_tokens)]  # [B, D]
            outputs[indices] = model.logits(states).to(outputs)
    return outputs


def _last_index(ids: Sequence[int], pad: int | None) -> int:
    """Return the index of the last token that is not `pad`, or 0 if all tokens are.

    Example:
        >>> _last_index([5, 6, 0, 0], pad=0), _last_index([0, 0], pad=0)
        (1, 0)
    """
    last = 0
    for index, token in enumerate(ids):
        if token != pad:
            last = index
    return last


def _batches_by_length(
    rows: Sequence[Sequence[int]], together: int, device: torch.device
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield batches of rows with similar lengths, as their indices and ids [B, S].

    Rows are padded with their last token, which does not change what the tokens before it compute.

    Args:
        rows: Token ids.
        together: Tokens per batch, with padding, unless a single row is longer.
        device: Device of the ids.
    """
    remaining = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    while remaining:
        # Rows are sorted by length, so the last row of a batch determines the length to which all are padded.
        count = 0
        while count < len(remaining) and (count + 1) * len(rows[remaining[count]]) <= together:
            count += 1
        count = max(1, count)
        batch, remaining = remaining[:count], remaining[count:]
        longest = len(rows[batch[-1]])
        padded = []
        for index in batch:
            ids = rows[index]
            padded.append([*ids, *[ids[-1]] * (longest - len(ids))])
        yield batch, torch.tensor(padded, device=device)


def _token_scores(model: CausalLM, hidden: Tensor, tokens: Tensor) -> TokenScores:
    """Return the scores of tokens [n], which were predicted from the hidden states [n, D]."""
    logprobs: list[Tensor] = []
    argmax_ids: list[Tensor] = []
    max_logprobs: list[Tensor] = []
    rows = max(1, MAX_LOGITS_PER_CHUNK // model.config.vocab_size)
    for states, chunk_tokens in zip(hidden.split(rows), tokens.split(rows), strict=True):
        logits = model.logits(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # [rows, V]
        total = logits.logsumexp(-1)
        largest = logits.max(-1)
        logprobs.append(logits.gather(1, chunk_tokens[:, None])[:, 0] - total)
        argmax_ids.append(largest.indices)
        max_logprobs.append(largest.values - total)
    return TokenScores(
        logprobs=torch.cat(logprobs).tolist(),
        argmax_ids=torch.cat(argmax_ids).tolist(),
        max_logprobs=torch.cat(max_logprobs).tolist(),
    )
