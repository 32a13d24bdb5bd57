"""A pretend CUDA device for the CPU build of torch: the real trainer takes its CUDA branches, with real values.

No GPU is to be had where these tests run. A tensor on the device has memory of its own on the host, which is counted.
An operation is the CPU's, after CUDA's rules about devices. Kernels that only CUDA has are emulated with the refusals
of the real ones, and nccl is gloo that takes CUDA tensors alone. A hollow card (`Card(hollow=True)`) computes nothing:
it counts what a step of a model of any size holds, of one rank of many. The device cannot show the numbers and the
speed of real kernels, races between streams, or fragmentation.

    worlds      what tests call: `run_pretend(fn, size, *args)` runs fn on ranks that have a card each
    server      the process that has the device and forks those ranks
    runs        a training run of a rank, with what the card felt of it
    card        which card: how many, its name, capability and memory
    journal     waits for the device, copies, collectives, choices of kernels, each with its line of dtrain
    cuda        the device put into torch, in Python
    kernels     attention, products and norms that only CUDA has
    sdpa        which kernel scaled_dot_product_attention takes
    mutants     dtrain with lines of its source replaced
    build       the library, compiled once into a cache
    native/     the library: memory, operations, nccl

Patching torch is allowed here and nowhere else: it is done in processes that end with the tests.
"""
