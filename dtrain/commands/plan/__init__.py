"""`dtrain plan`: the memory and traffic of each rank of a mesh, at any size, in one process without a GPU.

    plan.make_plan          a recipe, resolved in a world that is not here, as a plan: memory by part, traffic, time
    step.plan_step          one rank's step, from a few layers of it: the trainer's own, traced on full rows
    planned_device          tensors without memory in place of the planned device's, and operations on them
    tracer                  sees every operation of the step, and counts its cost and its messages; its observer
    compiled                compiled parts of layers: what they move and keep
    memory                  the step's allocations
    hardware                devices, links and the estimate
    choose                  values for what a recipe leaves to `auto`
    search                  other meshes and micro-batches, and what would fit
    command                 the command's arguments
    report                  the output: a plan as text and as JSON
    background              the plan that a run shows of itself; children, the processes that all of these work in

How a step is planned. The plan runs the trainer's own step on tensors without memory, and counts what it does. No part
of the step is implemented a second time. `step.trace_step` does this in a process of its own:

    recipe, world
      -> training.step_spec.resolve_step      StepSpec: what decides the step, with the model's facts (`spec.facts`)
      -> policy.Policy(options, observer)     on meta: BuildOptions(materialize=False, kernel, host_memory, ...)
      -> Method.attach_models                 reference, teacher and reward model
      -> training.full_rows.FullRows          rows of the largest size
      -> Policy.init_optimizer,               optimizer state as it is from the second step on
         Updater.allocate_state
      -> Method.prepare, Policy.forward_backward, Policy.optimizer_step, under two modes of torch:
           PlannedDevice   function mode: meta tensors say that they are on the planned device
           Tracer          dispatch mode: counts the memory, messages and arithmetic of each operation
         PlanObserver      tells the tracer which micro-batch, layer and part of the step an operation belongs to, from
                           the events of `policy.results.StepObserver` and from hooks of layers and optimizer
      -> Trace                                a few layers and micro-batches
      -> Step                                 extrapolated to all layers and micro-batches
      -> Plan                                 with the estimated time; then text, JSON, search, choice

Code below `commands` does not know that it is planned, except in three ways. It is called with options. It checks
whether a tensor has values (`base.torch_functions.has_values`). Its `base.fused` functions and `uniform_iterations`
let a function mode take their calls: the plan counts a fused function as one kernel, and follows three iterations of
a loop.

Exact, to the byte: parameters, gradients, optimizer state and what the collectives carry; the allocations of every
operation that torch dispatches, in the order of the trainer's own step, and so their peak, for batches whose rows are
all full and all trained (`images`: with which images). On a CPU the step's rows are in it, and gloo's copy of what it
reduces and scatters.

Modelled: attention and the fused norm on CUDA (`planned_device`); what a kernel allocates inside (cuBLAS, cuDNN, the
CPU's buffers of products), the allocator's rounding and gaps and NCCL's buffers are left out, which is why a plan's
budget is less than a device's memory. With `train.compile` operations are planned as written, the bytes that fused ones
move are counted, and what selective checkpointing keeps as it is compiled (`compiled`). `parallel.cpu_offload` is
refused, except for a CPU.
A rollout of method grpo is not planned, its update is; of an evaluation (`eval`) the least that it takes.
"""
