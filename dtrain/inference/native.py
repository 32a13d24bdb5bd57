"""The native engine on a mesh: the training weights themselves, every rank's share of the requests, one result.

Requests are shared out over the dp and cp ranks, which decode theirs each by itself; the ranks of one tp group decode
the same rows in step. FSDP's weights are gathered once for all of it where memory allows; else layer by layer in every
forward, in which all ranks must then take part until the last one is done. Context parallel plays no part: a cache
attends by itself.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

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


class NativeEngine(RolloutEngine):
    """Engine of a policy's model on its mesh, with its weights as they are at each call: they may change in between.

    decode: token ids → text; needed for stop texts only. unshard: whether FSDP's weights are gathered once for a whole
    rollout; "auto" where they take at most half of the memory that is free. steps: as `Engine` has it; not under tp.
    Where weights are not gathered once, or another rank found an obstacle, a rollout goes without, and `say` says so
    once. offloads: whether the optimizer's state moves to host memory meanwhile.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        decode: Callable[[list[int]], str] | None = None,
        unshard: bool | str = "auto",
        steps: "GraphedSteps | None" = None,
        offloads: bool = False,
        say: Callable[[str], None] = print,
    ):
        self.model, self.mesh, self.device = policy.model, policy.mesh, policy.device
        if steps is not None and self.mesh.tp.size() > 1:
            raise ValueError("graphs hold no collective: none under tensor parallel")
        self._steps, self._offloader, self._say = steps, policy.offloader if offloads else None, say
        self._decode, self._unshard = decode, unshard
        self._flash, note = choose_varlen_decode(
            self.model.config, policy.precision.compute, self.device, self.mesh.tp.size()
        )
        if note:
            say(f"note: {note}")
        self._sharding = policy.sharding

    @torch.no_grad()
    def generate(
        self, requests: Sequence[Request], should_stop: ShouldStop | None = None, *, version: int = 0
    ) -> list[Completion]:
        """Return the completions of `requests`, in order. Collective: every rank passes all requests, gets all results.

        should_stop: called on each rank between two tokens; once it returns True that rank gives up, and Interrupted is
        raised on all of them, as soon as the others have given up too, or are done.

        Tokens are the same on every mesh in float64, and in float32 but where two tokens all but tie. Besides the
        model's own collectives: under tp one broadcast per draw; one all-reduce per forward where weights are gathered
        layer by layer or experts lie on several ranks; two small reductions and one all-gather of objects in all.
        Raises UserError, for bad requests on every rank; what else goes wrong on one rank is raised there, and the
        others wait for it.
        """
        if not requests:
            return []
        ranks = self.mesh.dp_cp.size()
        shares = distribute_requests(requests, ranks)
        with ExitStack() as stack:
            if self._offloader is not None:
                self._offloader.offload_before_refit()
                stack.callback(self._offloader.prepare_for_training)
            gathers_once = self._gathers_once()
            if self._steps is not None and self._sharding.is_sharded and not gathers_once:
                self._steps.give_up(
                    "graphs need the whole weights on every rank, which take more than half of the free memory; "
                    "grpo.unshard=true gathers them all the same"
                )
                self._without_graphs(self._steps.obstacle)
            stack.enter_context(without_sequence_parallel(self.model))
            if gathers_once:
                before = [] if self._steps is None else self._steps.weights()
                stack.enter_context(self._sharding.unsharded())
                if self._steps is not None:
                    self._steps.refresh(before)
            else:
                stack.callback(self._sharding.reshard)
            in_step = self.mesh.ep is not None or (self._sharding.is_sharded and ranks > 1 and not gathers_once)
            peers = _MeshPeers(self.mesh, in_step=in_step, should_stop=should_stop)
            engine = self._engine(requests, peers)
            mine = [requests[index] for index in shares[self.mesh.dp_cp.get_local_rank()]]
            completions: list[Completion] | None = None
            with suppress(Interrupted):
                completions = engine.generate(mine)
            with evaluation_mode(self.model):
                while peers.others_go_on():  # a forward on nothing, for the weights or the experts that the others need
                    store = KeyValues([None] * self.model.config.num_hidden_layers)
                    token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
                    images = empty_images(token, self.model.config) if peers.run_tower else None
                    self.model.next_logits(token, Prefill(store, [store.new_prompt(1)], self.device), images)
        mine_and_why = completions, *((None, None) if self._steps is None else (self._steps.obstacle, self._steps.lost))
        everywhere = (
            Ranks(self.mesh.dp_cp.get_group()).gather_results(lambda: mine_and_why) if ranks > 1 else [mine_and_why]
        )
        if self._steps is not None:
            self._steps.lost = next((lost for *_, lost in everywhere if lost is not None), None)
        self._without_graphs(next((obstacle for _, obstacle, _ in everywhere if obstacle is not None), None))
        by_index: dict[int, Completion] = {}
        for share, (drawn, *_) in zip(shares, everywhere, strict=True):
            if drawn is None:
                raise Interrupted
            by_index.update(zip(share, drawn, strict=True))
        return [by_index[index] for index in range(len(requests))]

    def _without_graphs(self, obstacle: str | None) -> None:
        """Decode kernel by kernel from here on, where there is an obstacle, and say so; or that graphs are not kept."""
        if self._steps is not None and obstacle is not None:
            self._steps = None
            self._say(f"note: decoding goes on kernel by kernel, without CUDA graphs: {obstacle}")
        elif self._steps is not None and self._steps.lost is not None:
            self._say(f"note: {self._steps.lost}")
            self._steps.lost = None

    def check(self, requests: Sequence[Request]) -> None:
        """Raise UserError, on every rank, for requests that are bad, or do not fit into memory. Collective."""
        self._engine(requests)

    def _engine(self, requests: Sequence[Request], peers: Peers | None = None) -> Engine:
        """Return this rank's engine, which can answer each of `requests`. Collective. Raises UserError."""
        mesh, has_graphs = self.mesh, self._steps is not None
        chosen = choose_budget(self.model, self.device, mesh.size, mesh.tp.size(), with_graphs=has_graphs)
        engine = Engine(
            self.model,
            decode=self._decode,
            max_rows=chosen.rows,
            max_tokens=self._least(chosen.tokens),  # the ranks of a tp group must let in the same rows
            device=self.device,
            peers=peers,
            steps=self._steps,
            flash=self._flash,
        )
        for index, request in enumerate(requests):
            engine.check(request, f"request {index}")
        return engine

    def _gathers_once(self) -> bool:
        """Return whether weights are gathered once, the same on every rank. Collective where it depends on memory."""
        if not self._sharding.is_sharded or self._unshard != "auto":
            return self._sharding.is_sharded and bool(self._unshard)
        whole = sum(parameter.numel() * parameter.dtype.itemsize for parameter in self.model.parameters())
        per_rank = whole // self.mesh.tp.size()
        return bool(self._least(int(2 * per_rank <= free_device_memory(self.device, self.mesh.size))))

    def _least(self, value: int) -> int:
        """Return the smallest of all ranks' values. An all-reduce over dp and cp, and one over tp."""
        host = torch.tensor([value])
        for mesh in (self.mesh.dp_cp, self.mesh.tp):
            if mesh.size() > 1:
                dist.all_reduce(host, dist.ReduceOp.MIN, group=mesh.get_group())
        return int(host)


class _MeshPeers(Peers):
    """Peers on a mesh. in_step: every forward gathers weights over dp and cp, or sends tokens to experts there, so that
    all those ranks make as many."""

    def __init__(self, mesh: Mesh, *, in_step: bool, should_stop: ShouldStop | None):
        self._tp, self._dp_cp = mesh.tp, mesh.dp_cp
        self._in_step = in_step
        self._ask_stop = should_stop
        self._first_stops: Tensor | None = None  # the first tp rank's `should_stop` at the last draw, [R]

    def before_forward(self, has_images: bool) -> None:
        if self._in_step:
            self._ranks_at_work(1, has_images)

    def others_go_on(self) -> bool:
        """Return whether this rank, which is done, must take part in one forward more."""
        return self._in_step and self._ranks_at_work(0, False) > 0

    def agree(self, tokens: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first tp rank's tokens [R] int64 and logprobs [R] float64; one broadcast. All have the same
        logits, but a sum may be rounded in another order on a GPU."""
        if self._tp.size() == 1:
            return tokens, logprobs
        stops = float(self._ask_stop is not None and self._ask_stop())
        logprobs = logprobs.to(torch.float64)
        drawn = torch.stack([tokens.to(torch.float64), logprobs, torch.full_like(logprobs, stops)])
        dist.broadcast(drawn, group=self._tp.get_group(), group_src=0)
        self._first_stops = drawn[2]
        return drawn[0].to(torch.int64), drawn[1]

    def give_up(self) -> bool:
        """Return whether to stop: of the tp ranks' answers the first one's counts, as its draws do."""
        if self._tp.size() > 1:
            return self._first_stops is not None and bool(self._first_stops.any())
        return self._ask_stop is not None and self._ask_stop()

    def _ranks_at_work(self, mine: int, has_images: bool) -> int:
        counts = torch.tensor([mine, has_images])
        dist.all_reduce(counts, group=self._dp_cp.get_group())
        ranks, with_images = counts.tolist()
        self.run_tower = with_images > 0
        return ranks


# What reading a token of a prompt costs beside drawing one: it is read among many in one product, and once per group.
_READING = 0.25
# How far above the mean the largest share may be before groups are cut for the sake of evenness.
_SLACK = 1.1


def distribute_requests(requests: Sequence[Request], ranks: int) -> list[list[int]]:
    """Return the indices of `requests` for each of `ranks` ranks, ascending; the same on every rank that asks.

    The work of a request is taken from its max_new_tokens, for nobody knows where it will stop. What is dealt are whole
    groups of equal prompts, or their halves, quarters and so on until the shares are even.
    """
    if ranks == 1:
        return [list(range(len(requests)))]
    groups: dict[PromptKey, list[int]] = {}
    for index, request in enumerate(requests):
        groups.setdefault(PromptKey.of(request), []).append(index)
    largest = max(map(len, groups.values()), default=1)
    best: tuple[float, list[list[int]]] | None = None
    parts = 1
    while True:
        pieces = []
        for members in groups.values():
            size = -(-len(members) // parts)
            pieces += [members[start : start + size] for start in range(0, len(members), size)]
        costs = [_work(requests, piece) for piece in pieces]
        dealt = balance_by_cost(costs, ranks)
        load = max(sum(costs[piece] for piece in share) for share in dealt)
        if best is None or load < best[0]:
            best = load, [sorted(index for piece in share for index in pieces[piece]) for share in dealt]
        mean = sum(_work(requests, piece) for piece in groups.values()) / ranks
        if best[0] <= _SLACK * mean or parts >= largest:
            return best[1]
        parts *= 2


def _work(requests: Sequence[Request], piece: list[int]) -> float:
    drawing = sum(requests[index].sampling.max_new_tokens for index in piece)
    return drawing + _READING * len(requests[piece[0]].prompt)
