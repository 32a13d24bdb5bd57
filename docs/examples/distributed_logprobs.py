"""Log-probabilities from your own logits that are sharded over the vocabulary, with their gradient.

    torchrun --nproc-per-node 2 distributed_logprobs.py

No rank holds all logits. The result is checked against the same computation on one tensor.
"""

import torch
import torch.distributed as dist

import dtrain

BATCH, LENGTH, VOCAB = 2, 16, 1001  # the vocabulary need not be divisible by the number of ranks


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    all_logits = torch.randn(BATCH, LENGTH, VOCAB, generator=generator, dtype=torch.float64)
    input_ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)

    # This rank's columns, as torch.chunk and DTensor divide them: 501 and 500 for two ranks.
    columns = list(torch.arange(VOCAB).chunk(size))[rank]
    start, end = int(columns[0]), int(columns[-1]) + 1
    logits = all_logits[:, :, start:end].clone().requires_grad_()

    # The targets are the input ids, unshifted: position t of the result is log p(input_ids[t + 1]).
    logprobs = dtrain.from_parallel_logits_to_logprobs(logits, input_ids, start, end, dist.group.WORLD)
    logprobs.sum().backward()

    full = all_logits.clone().requires_grad_()
    expected = full[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    expected.sum().backward()
    torch.testing.assert_close(logprobs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(logits.grad, full.grad[:, :, start:end], rtol=1e-12, atol=1e-12)
    if rank == 0:
        print(f"{size} ranks: log-probabilities {tuple(logprobs.shape)} and gradients are right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
