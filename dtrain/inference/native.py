"""The native engine on a mesh: it samples with the training weights themselves.

Requests are distributed over the dp and cp ranks, each of which decodes its own. The ranks of one tp group decode the
same rows in lockstep. Context parallel plays no part, because attention over a cache needs none.

FSDP's weights are gathered once for the full rollout if memory allows. Otherwise each forward gathers them layer by
layer, which is collective. All ranks must then do the same number of forwards, so a rank that is done continues with
forwards of a single token until the last rank is done:

    rank 0    forward   forward   forward   forward   forward     done
    rank 1    forward   forward   forward   (idle)    (idle)      done with its own requests after 3 forwards
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtrain.base.errors import Interrupted
from dtrain.base.hardware import free_device_memory
from dtrain.base.ranks import Ranks, balance_by_cost
from dtrain.inference.cached_attention import Prefill
from dtrain.inference.engine import Engine, Peers, evaluation_mode
from dtrain.inference.images import empty_images
from dtrain.inference.kv_cache import KeyValues, PromptKey, choose_budget
from dtrain.inference.request import Completion, Request, RolloutEngine, ShouldStop
from dtrain.inference.varlen_decode import choose_varlen_decode
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.tensor import without_sequence_parallel
from dtrain.policy import Policy

if TYPE_CHECKING:
    from dtrain.inference.graphs import GraphedSteps


class _RankResult(NamedTuple):
    """Result of one rank's part of a rollout.

    Attributes:
        completions: Completions of the rank's requests. None if it was asked to stop.
        obstacle: Reason why steps cannot be CUDA graphs. None: they can, or graphs are not used.
        not_kept_reason: Reason why captured graphs are not kept until the next rollout. None: they are.
    """

    completions: list[Completion] | None
    obstacle: str | None = None
    not_kept_reason: str | None = None


class NativeEngine(RolloutEngine):
    """Engine of a policy's model on its mesh. Each call uses the weights as they are.

    Args:
        policy: The policy.
        decode: Decodes token ids to text. Needed only for stop texts.
        unshard: Whether FSDP's weights are gathered once for a full rollout. "auto": if they take at most half of the
            free memory.
        steps: CUDA graphs, as in `Engine`. Must be None under tensor parallel. The engine gives graphs up, with a note,
            if the weights are not gathered once or a rank finds an obstacle.
        offloads: Whether the optimizer's state is in host memory during a rollout.
        print_line: Prints a note.

    Attributes:
        model: The policy's model.
        mesh: The policy's mesh.
        device: The policy's device.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        decode: Callable[[list[int]], str] | None = None,
        unshard: bool | str = "auto",
        steps: "GraphedSteps | None" = None,
        offloads: bool = False,
        print_line: Callable[[str], None] = print,
    ):
        self.model, self.mesh, self.device = policy.model, policy.mesh, policy.device
        if steps is not None and self.mesh.tp.size() > 1:
            raise ValueError("CUDA graphs cannot contain collectives, so they cannot be used with tensor parallel")
        self._steps = steps
        self._offloader = policy.offloader if offloads else None
        self._print_line = print_line
        self._decode, self._unshard = decode, unshard
        self._flash, note = choose_varlen_decode(
            self.model.config, policy.precision.compute, self.device, self.mesh.tp.size()
        )
        if note:
            print_line(f"note: {note}")
        self._sharding = policy.sharding

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], should_stop: ShouldStop | None = None, *, version: int = 0
    ) -> list[Completion]:
        """Return the completions of `requests`, in order, on every rank. Every rank must pass all requests.

        Tokens are the same on every mesh in float64. In float32 they are, too, unless two tokens are almost tied.

        Args:
            requests: The requests.
            should_stop: Called on each rank between two tokens. If it returns True, this rank gives up, and all ranks
                raise Interrupted as soon as the others have given up, too, or are done.
            version: Not used.

        Raises:
            UserError: On every rank, if a request is not valid. Any other error is raised only on the rank where it
                occurs, while the other ranks wait in their next collective.
            Interrupted: On every rank, if any rank was asked to stop.

        Collectives:
            Those of the model. Under tp, one broadcast per decoding step. If weights are gathered layer by layer, or
            experts are distributed, one all-reduce per forward. For each call, up to two small reductions and one
            all-gather of objects.
        """
        if not requests:
            return []
        shares = distribute_requests(requests, self.mesh.dp_cp.size())
        with ExitStack() as stack:
            if self._offloader is not None:
                self._offloader.offload_before_refit()
                stack.callback(self._offloader.prepare_for_training)
            gathers_once = self._gathers_once()
            self._prepare_weights(stack, gathers_once)
            local_requests = [requests[index] for index in shares[self.mesh.dp_cp.get_local_rank()]]
            completions = self._generate_local(requests, local_requests, gathers_once, should_stop)
        result = _RankResult(completions)
        if self._steps is not None:
            result = _RankResult(completions, self._steps.obstacle, self._steps.not_kept_reason)
        results = self._gather_results(result)
        by_index: dict[int, Completion] = {}
        for share, rank_result in zip(shares, results, strict=True):
            if rank_result.completions is None:
                raise Interrupted
            by_index.update(zip(share, rank_result.completions, strict=True))
        return [by_index[index] for index in range(len(requests))]

    def _prepare_weights(self, stack: ExitStack, gathers_once: bool) -> None:
        """Gather the weights for a rollout, or prepare to gather them in each forward, until `stack` closes."""
        if self._steps is not None and self._sharding.is_sharded and not gathers_once:
            self._steps.give_up(
                "graphs need the full weights on every rank, which take more than half of the free memory. "
                "grpo.unshard=true gathers them nevertheless"
            )
            self._give_up_graphs(self._steps.obstacle)
        stack.enter_context(without_sequence_parallel(self.model))
        if not gathers_once:
            stack.callback(self._sharding.reshard)
            return
        sharded_weights = [] if self._steps is None else self._steps.weights()
        stack.enter_context(self._sharding.unsharded())
        if self._steps is not None:
            self._steps.refresh(sharded_weights)

    def _generate_local(
        self,
        requests: Sequence[Request],
        local_requests: Sequence[Request],
        gathers_once: bool,
        should_stop: ShouldStop | None,
    ) -> list[Completion] | None:
        """Return the completions of this rank's requests, or None if it was asked to stop.

        Args:
            requests: All requests, which are checked.
            local_requests: Those of this rank.
            gathers_once: Whether the weights are gathered.
            should_stop: As in `generate`.
        """
        gathers_in_forwards = self._sharding.is_sharded and self.mesh.dp_cp.size() > 1 and not gathers_once
        in_step = self.mesh.ep is not None or gathers_in_forwards
        peers = _MeshPeers(self.mesh, in_step=in_step, should_stop=should_stop)
        engine = self._engine(requests, peers)
        completions: list[Completion] | None = None
        with suppress(Interrupted):
            completions = engine.generate(local_requests)
        with evaluation_mode(self.model):
            while peers.others_go_on():
                self._run_idle_forward(peers.run_tower)
        return completions

    def _run_idle_forward(self, run_tower: bool) -> None:
        """Run a forward of one token, so that this rank takes part in the collectives of the other ranks' forwards."""
        store = KeyValues([None] * self.model.config.num_hidden_layers)
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        images = empty_images(token, self.model.config) if run_tower else None
        self.model.next_logits(token, Prefill(store, [store.new_prompt(1)], self.device), images)

    def _gather_results(self, result: _RankResult) -> list[_RankResult]:
        """Return the results of all dp and cp ranks, and give up graphs if one of them has found an obstacle."""
        results = [result]
        if self.mesh.dp_cp.size() > 1:
            results = Ranks(self.mesh.dp_cp.get_group()).gather_results(lambda: result)
        reasons = [each.not_kept_reason for each in results if each.not_kept_reason is not None]
        obstacles = [each.obstacle for each in results if each.obstacle is not None]
        if self._steps is not None:
            self._steps.not_kept_reason = reasons[0] if reasons else None
        self._give_up_graphs(obstacles[0] if obstacles else None)
        return results

    def _give_up_graphs(self, obstacle: str | None) -> None:
        """Decode without graphs from here on if there is an obstacle. Print this, or that graphs are not kept."""
        if self._steps is not None and obstacle is not None:
            self._steps = None
            self._print_line(f"note: decoding goes on kernel by kernel, without CUDA graphs: {obstacle}")
        elif self._steps is not None and self._steps.not_kept_reason is not None:
            self._print_line(f"note: {self._steps.not_kept_reason}")
            self._steps.not_kept_reason = None

    def check(self, requests: Sequence[Request]) -> None:
        """Raise UserError, on every rank, if a request is not valid or does not fit into memory. Collective."""
        self._engine(requests)

    def _engine(self, requests: Sequence[Request], peers: Peers | None = None) -> Engine:
        """Return this rank's engine. Collective.

        Raises:
            UserError: If one of `requests` is not valid or does not fit into memory.
        """
        mesh, has_graphs = self.mesh, self._steps is not None
        budget = choose_budget(self.model, self.device, mesh.size, mesh.tp.size(), with_graphs=has_graphs)
        engine = Engine(
            self.model,
            decode=self._decode,
            max_rows=budget.rows,
            max_tokens=self._min_over_ranks(budget.tokens),  # the ranks of a tp group must admit the same rows
            device=self.device,
            peers=peers,
            steps=self._steps,
            flash=self._flash,
        )
        for index, request in enumerate(requests):
            engine.check(request, f"request {index}")
        return engine

    def _gathers_once(self) -> bool:
        """Check whether weights are gathered once, the same on every rank. Collective with `unshard="auto"`."""
        if not self._sharding.is_sharded:
            return False
        if self._unshard != "auto":
            return bool(self._unshard)
        model_bytes = sum(parameter.numel() * parameter.dtype.itemsize for parameter in self.model.parameters())
        per_rank = model_bytes // self.mesh.tp.size()
        fits = 2 * per_rank <= free_device_memory(self.device, self.mesh.size)
        return bool(self._min_over_ranks(int(fits)))

    def _min_over_ranks(self, value: int) -> int:
        """Return the smallest value of all ranks. One all-reduce over dp and cp, and one over tp."""
        smallest = torch.tensor([value])
        for mesh in (self.mesh.dp_cp, self.mesh.tp):
            if mesh.size() > 1:
                dist.all_reduce(smallest, dist.ReduceOp.MIN, group=mesh.get_group())
        return int(smallest)


class _MeshPeers(Peers):
    """Coordination of an engine with the other ranks of a mesh.

    Args:
        mesh: The mesh.
        in_step: Whether every forward is collective over dp and cp, because it gathers weights or sends tokens to
            experts. All these ranks must then do the same number of forwards.
        should_stop: As in `NativeEngine.generate`.
    """

    def __init__(self, mesh: Mesh, *, in_step: bool, should_stop: ShouldStop | None):
        self._tp, self._dp_cp = mesh.tp, mesh.dp_cp
        self._in_step = in_step
        self._should_stop = should_stop
        self._first_rank_stops: Tensor | None = None  # the first tp rank's `should_stop` at the last token, [R]

    def before_forward(self, has_images: bool) -> None:
        """Announce a forward of this rank's own requests to the other ranks. One all-reduce if ranks are in step."""
        if self._in_step:
            self._count_working_ranks(is_working=True, has_images=has_images)

    def others_go_on(self) -> bool:
        """Check whether this rank, whose requests are done, must do another forward for the other ranks.

        Collectives:
            One all-reduce if ranks are in step.
        """
        return self._in_step and self._count_working_ranks(is_working=False, has_images=False) > 0

    def agree(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first tp rank's tokens, int64 [R], and logprobs, float64 [R].

        All tp ranks have the same logits up to rounding. On a GPU, sums may be computed in another order on each rank,
        so two ranks could sample different tokens.

        Collectives:
            One broadcast over tp, which also sends whether the first rank was asked to stop.
        """
        if self._tp.size() == 1:
            return tokens, logprobs
        stops = float(self._should_stop is not None and self._should_stop())
        logprobs = logprobs.to(torch.float64)
        sampled = torch.stack([tokens.to(torch.float64), logprobs, torch.full_like(logprobs, stops)])
        dist.broadcast(sampled, group=self._tp.get_group(), group_src=0)
        self._first_rank_stops = sampled[2]
        return sampled[0].to(torch.int64), sampled[1]

    def should_stop(self) -> bool:
        """Check whether to stop. In a tp group only the first rank decides: `agree` has broadcast its decision."""
        if self._tp.size() > 1:
            return self._first_rank_stops is not None and bool(self._first_rank_stops.any())
        return self._should_stop is not None and self._should_stop()

    def _count_working_ranks(self, *, is_working: bool, has_images: bool) -> int:
        """Return how many dp and cp ranks do a forward for their own requests. Sets `run_tower`. One all-reduce."""
        counts = torch.tensor([int(is_working), int(has_images)])
        dist.all_reduce(counts, group=self._dp_cp.get_group())
        num_working, num_with_images = counts.tolist()
        self.run_tower = num_with_images > 0
        return num_working


# Cost of reading one prompt token, relative to sampling one token. The tokens of a prompt are read in one matrix
# product, and only once for all samples of the prompt.
_READING_COST = 0.25
# Largest load of a rank, relative to the mean, that is accepted before groups are divided further.
_MAX_IMBALANCE = 1.1


def distribute_requests(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """Distribute requests over ranks, so that all have about the same work.

    Requests with equal prompts stay together, because they share the reading of the prompt. If the loads of the ranks
    are too uneven, these groups are divided into halves, quarters and so on. The work of a request is estimated by its
    `max_new_tokens`, because its length is not known in advance.

    Args:
        requests: The requests.
        ranks: The number of ranks.

    Returns:
        For each rank, the indices of its requests in ascending order; the same on every rank that calls it.

    Example: two prompts of two samples each, and then eight samples of one prompt, which are divided into halves.
        >>> from dtrain.inference.request import SamplingParams
        >>> sampling = SamplingParams(max_new_tokens=16)
        >>> prompts = [[1, 2], [1, 2], [3, 4], [3, 4]]
        >>> distribute_requests([Request(prompt, sampling) for prompt in prompts], 2)
        [[0, 1], [2, 3]]
        >>> distribute_requests([Request([1, 2], sampling) for _ in range(8)], 2)
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """
    if ranks == 1:
        return [list(range(len(requests)))]
    groups: dict[PromptKey, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(PromptKey.of(request), []).append(index)
    largest_group = max(map(len, groups.values()), default=1)
    mean_load = sum(_work(requests, members) for members in groups.values()) / ranks
    best_load = math.inf
    best_shares: list[list[int]] = []
    parts = 1  # of each group
    while True:
        pieces: list[list[int]] = []
        for members in groups.values():
            size = -(-len(members) // parts)  # rounded up
            pieces += [members[start : start + size] for start in range(0, len(members), size)]
        costs = [_work(requests, piece) for piece in pieces]
        pieces_of_rank = balance_by_cost(costs, ranks)
        load = max(sum(costs[piece] for piece in share) for share in pieces_of_rank)
        if load < best_load:
            best_load = load
            best_shares = []
            for share in pieces_of_rank:
                best_shares.append(sorted(index for piece in share for index in pieces[piece]))
        if best_load <= _MAX_IMBALANCE * mean_load or parts >= largest_group:
            return best_shares
        parts *= 2


def _work(requests: Sequence[Request], piece: list[int]) -> float:
    """Return the work of requests with the same prompt, in sampled tokens."""
    sampled_tokens = sum(requests[index].sampling.max_new_tokens for index in piece)
    return sampled_tokens + _READING_COST * len(requests[piece[0]].prompt)
