#!/usr/bin/env python3
"""Time and peak memory of the functions of dtrain.losses, as JSON, beside the plain PyTorch way and the physical floor.

    .venv/bin/python tools/bench_losses.py
    .venv/bin/python tools/bench_losses.py --ops logprob hidden --tp 1 --tokens 1024 --vocab 8192 --hidden 256
    .venv/bin/python tools/bench_losses.py --device cuda --dtype bfloat16 --tokens 16384 --vocab 151936

Each op runs forward, and forward with backward, --rounds times in turn with the plain way, on --tp ranks (one thread
each on a CPU). The plain way computes whole logits, gathered over the ranks where the vocabulary is cut. `ratio` is the
median of plain over dtrain: above 1, dtrain is faster. Memory is the peak above what was held before, in MiB, of rank
0, measured in a process of its own. `floor` is the least time: the bytes that must move at this machine's copy speed,
or the FLOPs of the head's matrix products at the speed of one, measured before. Of per-token values the backward
computes the logits again, four products in all; a sum with known weights needs three, and distillation one more, the
teacher's. `of_floor` is the floor over dtrain's time.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dtrain import losses  # noqa: E402
from dtrain.losses.head.kl import forward_kl, kl_sum_from_hidden_states  # noqa: E402
from dtrain.losses.head.logprobs import logprobs_from_hidden_states  # noqa: E402
from dtrain.losses.head.topk import topk_kl_sum_from_hidden_states, topk_logits_from_hidden_states  # noqa: E402
from dtrain.losses.head.vocabulary import HeadInput, VocabShard  # noqa: E402
from dtrain.losses.head.weighted_sum import weighted_logprob_sum  # noqa: E402
from dtrain.parallel.collectives import gather_along  # noqa: E402
from dtrain.parallel.placement import chunk_bounds  # noqa: E402

SAMPLING = {"top_k": 50, "top_p": 0.9}
KEPT = 64


@dataclass
class Inputs:
    """What every op reads on one rank."""

    logits: Tensor  # [1, S, V/tp]
    teacher: Tensor  # [1, S, V/tp]
    teacher_hidden: Tensor  # [S, D]
    teacher_weight: Tensor  # [V/tp, D]
    hidden: Tensor  # [S, D]
    weight: Tensor  # [V/tp, D]
    targets: Tensor  # [1, S]
    ids: Tensor  # [1, S, K]
    start: int
    group: Any

    @property
    def end(self) -> int:
        return self.start + len(self.weight)

    @property
    def shard(self) -> VocabShard:
        return VocabShard(self.start, self.group)

    def whole(self, shard: Tensor) -> Tensor:
        return shard if dist.get_world_size() == 1 else gather_along(shard, shard.dim() - 1, self.group)

    def plain_logits(self) -> Tensor:
        return self.whole(self.hidden @ self.weight.T).float()

    def plain_teacher_logits(self) -> Tensor:
        return self.whole(self.teacher_hidden @ self.teacher_weight.T).float()

    @property
    def every_token(self) -> Tensor:
        return torch.arange(len(self.hidden), device=self.hidden.device)


def at(logp: Tensor, ids: Tensor) -> Tensor:
    return logp.gather(-1, ids)


def plain_entropy(logits: Tensor) -> Tensor:
    logp = logits.log_softmax(-1)
    return (logp.exp() * logp).sum(-1)


def plain_sampled(x: Inputs) -> Tensor:
    filtered, _ = losses.apply_top_k_top_p(x.whole(x.logits).float(), **SAMPLING)
    return at(filtered.log_softmax(-1), x.targets[..., None]).nan_to_num(neginf=0.0)


def head(x: Inputs, **asked: bool) -> Tensor:
    values = logprobs_from_hidden_states(x.hidden, x.weight, x.targets[0], shard=x.shard, **asked)
    return values.logprobs + values.entropy if asked else values.logprobs


def plain_head(x: Inputs, entropy: bool) -> Tensor:
    logits = x.plain_logits()
    logp = at(logits.log_softmax(-1), x.targets[0][:, None]).squeeze(1)
    return logp - plain_entropy(logits) if entropy else logp


def weighted(x: Inputs) -> Tensor:
    ones = torch.ones(len(x.hidden), device=x.hidden.device)
    return weighted_logprob_sum(x.hidden, x.weight, x.targets[0], ones, x.every_token, shard=x.shard)


def kl(x: Inputs) -> Tensor:
    student, teacher = HeadInput(x.hidden, x.weight), HeadInput(x.teacher_hidden, x.teacher_weight)
    return kl_sum_from_hidden_states(student, teacher, x.every_token, shard=x.shard).total


def plain_kl(x: Inputs) -> Tensor:
    return forward_kl(x.plain_logits().log_softmax(-1), x.plain_teacher_logits().log_softmax(-1)).sum()


def topk_kl(x: Inputs) -> Tensor:
    student, teacher = HeadInput(x.hidden, x.weight), HeadInput(x.teacher_hidden, x.teacher_weight)
    logits, ids = topk_logits_from_hidden_states(teacher, KEPT, x.every_token, shard=x.shard)
    return topk_kl_sum_from_hidden_states(student, logits, ids, x.every_token, shard=x.shard).total


def plain_topk_kl(x: Inputs) -> Tensor:
    logits, ids = x.plain_teacher_logits().topk(KEPT, -1)
    return forward_kl(at(x.plain_logits().log_softmax(-1), ids), logits.log_softmax(-1)).sum()


def gathered_logits(x: Inputs) -> Tensor:
    bounds = {"vocab_start_index": x.start, "vocab_end_index": x.end}
    return losses.gather_logits_at_global_indices(x.logits, x.ids, x.group, **bounds)


Function = Callable[[Inputs], Tensor]


@dataclass(frozen=True)
class Op:
    """dtrain's way and the plain one; what must be done at least, forward and in both directions together: passes over
    the logits, or products of the head. None: no backward."""

    ours: Function
    plain: Function
    forward: int
    both: int | None
    unit: str = "passes"


# A forward reads the logits; a backward reads them again and writes their gradient.
OPS = {
    "logprob": Op(
        lambda x: losses.DistributedLogprob.apply(x.logits, x.targets, x.start, x.end, x.group),
        lambda x: at(x.whole(x.logits).float().log_softmax(-1), x.targets[..., None]),
        1,
        3,
    ),
    "chunked_logprob": Op(
        lambda x: losses.ChunkedDistributedLogprob.apply(x.logits, x.targets, x.start, x.end, 1024, x.group),
        lambda x: at(x.whole(x.logits).float().log_softmax(-1), x.targets[..., None]),
        1,
        3,
    ),
    "gather_logprob": Op(
        lambda x: losses.ChunkedDistributedGatherLogprob.apply(x.logits, x.ids, x.start, x.end, 1024, x.group),
        lambda x: at(x.whole(x.logits).float().log_softmax(-1), x.ids),
        1,
        3,
    ),
    "gather_logits": Op(  # reads K logits of each token only; the gradient is written whole
        gathered_logits,
        lambda x: at(x.whole(x.logits).float(), x.ids),
        0,
        1,
    ),
    "entropy": Op(
        lambda x: losses.ChunkedDistributedEntropy.apply(x.logits, 1024, x.group),
        lambda x: plain_entropy(x.whole(x.logits).float()),
        1,
        3,
    ),
    "cross_entropy": Op(
        lambda x: losses.DistributedCrossEntropy.apply(x.logits, x.teacher, x.group),
        lambda x: -(x.whole(x.teacher).float().softmax(-1) * x.whole(x.logits).float().log_softmax(-1)).sum(-1),
        2,
        5,
    ),
    "sampled": Op(
        lambda x: losses.DistributedLogprobWithSampling.apply(
            x.logits, x.targets, x.group, SAMPLING["top_k"], SAMPLING["top_p"]
        ).nan_to_num(neginf=0.0),
        plain_sampled,
        1,
        3,
    ),
    "chunked_sampled": Op(
        lambda x: losses.ChunkedDistributedLogprobWithSampling.apply(
            x.logits, x.targets, x.group, SAMPLING["top_k"], SAMPLING["top_p"], 1024
        ).nan_to_num(neginf=0.0),
        plain_sampled,
        1,
        3,
    ),
    "topk": Op(
        lambda x: losses.distributed_vocab_topk(
            x.logits, KEPT, x.group, vocab_start_index=x.start, vocab_end_index=x.end
        )[0],
        lambda x: x.whole(x.logits.detach()).float().topk(KEPT, -1).values,
        1,
        None,
    ),
    "hidden": Op(head, lambda x: plain_head(x, False), 1, 4, "products"),
    "hidden_entropy": Op(lambda x: head(x, entropy=True), lambda x: plain_head(x, True), 1, 4, "products"),
    "hidden_weighted_sum": Op(weighted, lambda x: plain_head(x, False).sum(), 1, 3, "products"),
    "hidden_kl": Op(kl, plain_kl, 2, 4, "products"),
    "hidden_topk_kl": Op(topk_kl, plain_topk_kl, 2, 4, "products"),
}


def make_inputs(args: argparse.Namespace, rank: int) -> Inputs:
    dtype, device = getattr(torch, args.dtype), _device(args, rank)
    start, end = chunk_bounds(args.vocab, dist.get_world_size(), rank)
    torch.manual_seed(0)
    targets = torch.randint(0, args.vocab, (1, args.tokens), device=device)
    ids = torch.randint(0, args.vocab, (1, args.tokens, KEPT), device=device)
    hidden, teacher_hidden = (torch.randn(args.tokens, args.hidden, device=device, dtype=dtype) for _ in range(2))
    torch.manual_seed(rank)

    def logits() -> Tensor:
        return torch.randn(1, args.tokens, end - start, device=device, dtype=dtype)

    weight, teacher_weight = (
        torch.randn(end - start, args.hidden, device=device, dtype=dtype) * args.hidden**-0.5 for _ in range(2)
    )
    teacher = logits(), teacher_hidden, teacher_weight
    inputs = Inputs(logits(), *teacher, hidden, weight, targets, ids, start, dist.group.WORLD)
    for tensor in (inputs.logits, inputs.hidden, inputs.weight):
        tensor.requires_grad_()
    return inputs


def _device(args: argparse.Namespace, rank: int) -> torch.device:
    return torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")


def run_once(function: Function, inputs: Inputs, backward: bool) -> None:
    if backward:
        function(inputs).sum().backward()
        inputs.logits.grad = inputs.hidden.grad = inputs.weight.grad = None
    else:
        with torch.no_grad():
            function(inputs)


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def time_op(args: argparse.Namespace, inputs: Inputs, op: str) -> dict[str, Any]:
    """Seconds (median) of both ways in turn, after one round that does not count."""
    ours, plain, has_backward = OPS[op].ours, OPS[op].plain, OPS[op].both is not None
    result = {}
    for name, backward in (("forward", False), ("forward_backward", True))[: 1 + has_backward]:
        seconds: dict[str, list[float]] = {"dtrain": [], "plain": []}
        for round_ in range(args.rounds + 1):
            for side, function in (("dtrain", ours), ("plain", plain)):
                synchronize(args)
                began = time.perf_counter()
                run_once(function, inputs, backward)
                synchronize(args)
                if round_:
                    seconds[side].append(time.perf_counter() - began)
        result[name] = {
            **{side: statistics.median(values) for side, values in seconds.items()},
            "ratio": statistics.median(b / a for a, b in zip(*seconds.values(), strict=True)),
        }
    return result


def peak_memory(args: argparse.Namespace, inputs: Inputs, op: str, side: str) -> float:
    """MiB above what is held, of one forward and backward."""
    function, backward = OPS[op].ours if side == "dtrain" else OPS[op].plain, OPS[op].both is not None
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        run_once(function, inputs, backward)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    held = _status("VmRSS")
    run_once(function, inputs, backward)
    return _status("VmHWM") - held


def _status(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def speeds(args: argparse.Namespace, rank: int) -> dict[str, float]:
    """This machine's copy speed in bytes/s (read and written) and its FLOP/s in matrix products."""
    device, dtype = _device(args, rank), getattr(torch, args.dtype)
    source = torch.zeros(64 * 2**20, device=device)
    target = torch.empty_like(source)
    size = 1024 if args.device == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))

    def best(function: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(5):
            synchronize(args)
            began = time.perf_counter()
            function()
            synchronize(args)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    return {
        "bytes": 2 * source.nbytes / best(lambda: target.copy_(source)),
        "flops": 2 * size**3 / best(lambda: a @ b),
    }


def floor(args: argparse.Namespace, tp: int, op: str, speed: dict[str, float]) -> dict[str, float]:
    """Seconds at these speeds of the forward, and of forward and backward where there is one."""
    logits = args.tokens * -(-args.vocab // tp)
    found = {"forward": OPS[op].forward, "forward_backward": OPS[op].both}
    if OPS[op].unit == "products":
        one = 2 * logits * args.hidden / speed["flops"]
    else:
        one = logits * getattr(torch, args.dtype).itemsize / speed["bytes"]
    return {name: count * one for name, count in found.items() if count is not None}


def rank_main(rank: int, tp: int, store: str, results: Any, args: argparse.Namespace, task: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "cpu:gloo,cuda:nccl" if args.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.FileStore(store, tp), rank=rank, world_size=tp)
    if task[0] == "speeds":
        answer = speeds(args, rank)
    else:
        inputs = make_inputs(args, rank)
        answer = (time_op if task[0] == "time" else peak_memory)(args, inputs, *task[1:])
    if rank == 0:
        results.put(answer)
    dist.destroy_process_group()


def on_ranks(args: argparse.Namespace, tp: int, *task: str) -> Any:
    """Rank 0's answer to a task, in processes of their own. Raises RuntimeError where a rank fails."""
    context = multiprocessing.get_context("spawn" if args.device == "cuda" else "fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=rank_main, args=(rank, tp, f"{directory}/store", results, args, task))
            for rank in range(tp)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise RuntimeError(f"{' '.join(task)} on {tp} ranks failed: exit codes {[p.exitcode for p in ranks]}")
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--tp", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for tp in args.tp:
        if args.device == "cuda" and tp > torch.cuda.device_count():
            print(json.dumps({"tp": tp, "skipped": f"{torch.cuda.device_count()} CUDA devices"}), flush=True)
            continue
        speed = on_ranks(args, tp, "speeds")
        shape = {"tokens": args.tokens, "vocab": args.vocab, "hidden": args.hidden}
        print(json.dumps({"tp": tp, "device": args.device, "dtype": args.dtype, **shape, "speeds": speed}), flush=True)
        for op in args.ops:
            timed = on_ranks(args, tp, "time", op)
            memory = {side: on_ranks(args, tp, "memory", op, side) for side in ("dtrain", "plain")}
            for name, least in floor(args, tp, op, speed).items():
                timed[name] |= {"floor": least, "of_floor": least / timed[name]["dtrain"]}
            print(json.dumps({"tp": tp, "op": op, **timed, "memory_mib": memory}), flush=True)


if __name__ == "__main__":
    main()
