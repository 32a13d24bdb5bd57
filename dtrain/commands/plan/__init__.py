"""`dtrain plan`: the memory, traffic and time of each rank of a mesh of any size, computed without GPU.

    plan.make_plan          from a recipe and a number of devices to a plan
    step.plan_step          one rank's step, extrapolated from traces of a few layers and micro-batches
    planned_device          tensors without memory that stand for those of the planned device, and operations on them
    tracer                  counts the memory, messages and arithmetic of every operation of the traced step
    compiled                counts what compiled parts of layers move and keep
    memory                  timeline of the step's allocations
    hardware                devices, links and the estimated time
    choose                  values for the keys of a recipe that are `auto`
    search                  faster meshes and micro-batches, and the smallest change that fits
    command                 the command's arguments
    report                  the output as text and as JSON
    background              the plan that a run computes of itself
    processes               the forked processes in which traces run

How a step is planned. The plan runs the trainer's own step on tensors without memory, and counts what it does. No part
of the step is implemented a second time. `step.trace_step` does this in a process of its own:

    recipe, world
      -> training.step_spec.resolve_step      StepSpec: everything that determines the step, with facts of the model
      -> policy.Policy(options, observer)     on meta: BuildOptions(materialize=False, kernel, host_memory, ...)
      -> Method.attach_models                 reference model, teacher and reward model
      -> training.full_rows.FullRows          rows of the largest size
      -> Policy.init_optimizer,               optimizer state, which exists from the second step on
         Updater.allocate_state
      -> Method.prepare, Policy.forward_backward, Policy.optimizer_step, under two modes of torch:
           PlannedDevice   function mode: meta tensors report that they are on the planned device
           Tracer          dispatch mode: counts the memory, messages and arithmetic of each operation
         PlanObserver      tells the tracer which micro-batch, layer and part of the step an operation belongs to, from
                           the events of `policy.results.StepObserver` and from hooks of layers and optimizer
      -> Trace                                of a few layers and micro-batches
      -> Step                                 extrapolated to all layers and micro-batches
      -> Plan                                 with the estimated time; then text, JSON, search, choice

Code in lower packages does not know that it is planned, except in three ways. It is called with options. It checks
whether a tensor has values (`base.torch_functions.has_values`). A function mode can intercept its `base.fused`
functions and loops: the plan counts a fused function as one kernel, and runs three rounds of a loop.

Accuracy. The bytes of parameters, gradients, optimizer state and collectives' messages are exact. The peak is exact for
all allocations of operations that torch dispatches, in the order of the trainer's own step, for batches whose rows are
all full and all trained. On a CPU the peak includes the step's rows, and gloo's copy of tensors that it reduces and
scatters.

Attention and the fused norm on CUDA are modelled (`planned_device`). A plan does not include allocations inside kernels
(cuBLAS, cuDNN, the CPU's buffers of products), the allocator's rounding and gaps, and NCCL's buffers. This is why a
plan's budget is less than a device's memory. With `train.compile`, memory is planned for uncompiled operations. Only
the bytes that fused operations move, and the tensors that selective checkpointing keeps, are counted as after
compilation (`compiled`).

Not supported: `parallel.cpu_offload`, except on a CPU. For method grpo the update is planned, but not the rollout. For
evaluations (`eval`) only a lower bound is computed.
"""
