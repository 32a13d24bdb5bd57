"""`dtrain plan`: the memory and traffic of each rank of a mesh, at any size, in one process without a GPU.

    spec                    everything that decides a planned step
    plan.make_plan          a recipe, resolved in a world that is not here, as a plan: memory by part, traffic, time
    step.plan_step          one rank's step, from a few layers of it: the trainer's own, traced on full rows
    images                  the images of its rows, by the first rows of the data
    policy                  the policy that steps, on tensors without memory
    planned_device          how tensors without memory answer as the planned device's would
    meta_kernels            operations on them
    tracer                  sees every operation of the step, and counts its cost and its messages
    compiled                compiled parts of layers: what they move and keep
    memory                  the step's allocations
    hardware                devices, links and the estimate
    choose                  values for what a recipe leaves to `auto`
    search                  other meshes and micro-batches, and what would fit
    units                   bytes and seconds as text
    command, report         the command's arguments; its output: a plan as text and as JSON
    beside                  the plan that a run shows of itself; children, the processes that all of these work in

Exact, to the byte: parameters, gradients, optimizer state and what the collectives carry; the allocations of every
operation that torch dispatches, in the order of the trainer's own step, and so their peak, for batches whose rows are
all full and all trained (`images`: with which images). On a CPU the step's rows are in it, and gloo's copy of what it
reduces and scatters.

Modelled: attention and the fused norm on CUDA (`planned_device`); what a kernel allocates inside (cuBLAS, cuDNN, the
CPU's buffers of products), the allocator's rounding and gaps and NCCL's buffers are left out, which is why a plan's
budget is less than a device's memory. With `train.compile` operations are planned as written, the bytes that fused ones
move are counted, and what selective checkpointing keeps as it is compiled (`compiled`). `parallel.cpu_offload`
is refused.
A rollout of method grpo is not planned, its update is; of an evaluation (`eval`) the least that it takes.
"""
