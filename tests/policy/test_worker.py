"""`DTensorPolicyWorker`: NeMo-RL's keywords and shapes over the numbers of `Policy`, and what it refuses by name."""

from collections import UserDict

import pytest
import torch

from dtrain.models.read_config import read_config
from dtrain.parallel.mesh import Runtime, build_mesh
from dtrain.policy import DTensorPolicyWorker, Policy
from dtrain.recipe import derive_sizes
from tests.stepping import train_step
from tests.tiny import VOCAB, tiny_grpo, tiny_recipe
from tests.world import run_world


def nll(source, batch, global_seqs, global_tokens):
    """−Σ log p(label) ÷ trained tokens of the global batch."""
    total = -source.weighted_sum()
    return total / global_tokens, {"lost": total.detach()}


GPU_INFO = {
    "rank", "world_size", "local_rank", "local_device_id", "global_device_id", "device_count", "device_name",
    "memory_allocated_mb", "memory_reserved_mb", "peak_memory_allocated_mb", "peak_memory_reserved_mb",
    "parameter_sample", "env_vars",
}  # fmt: skip


def parts_of(rank, recipe, world_size):
    derived = derive_sizes(recipe, world_size)
    runtime = Runtime(rank=rank, world_size=world_size, local_rank=rank)
    mesh = build_mesh(runtime, dp_shard=derived.dp_shard, cp=derived.cp, tp=derived.tp)
    return recipe, read_config(recipe.model.path), mesh, runtime


def nemo_batch(count, seed=0):
    """Rows as NeMo-RL hands them over: right-padded ids with lengths, float masks, a row left out."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 11, (count,), generator=generator)
    ids = torch.randint(0, VOCAB, (count, 10), generator=generator)
    ids[torch.arange(10) >= lengths[:, None]] = 0
    token_mask = ((torch.arange(10) < lengths[:, None]) & (torch.arange(10) >= 2)).float()
    sample_mask = torch.ones(count)
    sample_mask[1] = 0
    return {"input_ids": ids, "input_lengths": lengths, "token_mask": token_mask, "sample_mask": sample_mask}


def same_numbers(rank, recipe, world_size):
    parts = parts_of(rank, recipe, world_size)
    policy, worker = Policy(*parts), DTensorPolicyWorker(*parts)
    policy.init_optimizer(10)
    policy.init_reference_model()
    dp, place = policy.mesh.dp_size, policy.mesh.dp_rank
    batch = {name: value[place::dp] for name, value in nemo_batch(12).items()}
    data = UserDict(batch)  # as a BatchedDataDict is one
    found = worker.train(data=data, loss_fn=nll, gbs=8)
    per_step = 8 // dp
    parts = [slice(0, per_step), slice(per_step, None)]
    steps = [train_step(policy, {name: value[rows] for name, value in batch.items()}, nll) for rows in parts]
    assert found["global_loss"].tolist() == [step.loss for step in steps]
    assert found["grad_norm"].tolist() == torch.tensor([steps[-1].grad_norm]).tolist()
    assert (found["rank"], found["model_dtype"], found["gpu_name"]) == (rank, torch.float64, "cpu")
    assert found["tokens"][:, 0].tolist() == [step.result.counts.trained_tokens for step in steps]
    assert {name: values.tolist() for name, values in found["sums"].items()} == {
        name: [step.result.metrics[name] for step in steps] for name in steps[0].result.names
    }
    assert found["all_mb_metrics"].keys() == set(steps[0].result.names)
    evaluated = worker.train(data=data, loss_fn=nll, eval_mode=True, gbs=12, mbs=1)
    assert evaluated["grad_norm"] is None and evaluated["global_loss"].shape == (1,)
    bare = {name: batch[name] for name in ("input_ids", "input_lengths")}  # masks of `batch` are not read
    logprobs = worker.get_logprobs(data=data, micro_batch_size=3)["logprobs"]
    assert torch.equal(logprobs[:, 1:], policy.logprobs(bare, 3)[:, :-1])
    reference = worker.get_reference_policy_logprobs(data=data, micro_batch_size=3)["reference_logprobs"]
    with policy.use_reference_model():
        assert torch.equal(reference[:, 1:], policy.logprobs(bare, 3)[:, :-1])
    assert not torch.equal(reference, logprobs)  # the first weights, not the trained ones
    top = worker.get_topk_logits(data=data, k=3)
    assert top["topk_logits"].shape == top["topk_indices"].shape == (*batch["input_ids"].shape, 3)
    worker.offload_after_refit()
    worker.prepare_for_training("whatever", flag=True)
    assert worker.model.training


@pytest.mark.parametrize(("world_size", "change"), [(1, ()), (2, ("parallel.tp=2",)), (2, ("parallel.cp=2",))])
def test_the_numbers_are_those_of_policy(tmp_path, world_size, change):
    run_world(same_numbers, world_size, tiny_recipe(tmp_path, *change), world_size)


def weights_out(rank, recipe):
    worker = DTensorPolicyWorker(*parts_of(rank, recipe, 2), init_optimizer=False, init_reference_model=False)
    assert worker.optimizer is None and worker.reference is None
    with pytest.raises(RuntimeError, match="prepare_weights_for_ipc first"):
        worker.get_weights_ipc_handles(["model.norm.weight"])
    full = {name: tensor.clone() for name, tensor in worker.weights.full_tensors()}
    sizes, free = worker.prepare_weights_for_ipc()
    assert sizes == [(name, tensor.numel() * tensor.element_size()) for name, tensor in full.items()]
    assert isinstance(free, float) and free > 0
    ((device, (is_packed, handles)),) = worker.get_weights_ipc_handles(keys=iter(full)).items()
    assert device == worker.report_device_id() == "cpu" and is_packed is False
    assert [name for name, _ in handles] == list(full)
    for name, (function, arguments) in handles:
        assert torch.equal(function(*arguments), full[name])
    info = worker.get_gpu_info()
    assert info.keys() == GPU_INFO
    assert (info["rank"], info["world_size"], info["local_rank"], info["device_name"]) == (rank, 2, rank, "cpu")
    ((name, sample),) = info["parameter_sample"].items()
    assert sample == {"device": "cpu", "shape": list(full[name].shape), "dtype": "torch.float64"}
    variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    assert info["env_vars"] == variables | {"CUDA_VISIBLE_DEVICES": "1,0"}
    logits = torch.randn(3, 5)
    assert torch.equal(worker._apply_temperature_scaling(logits.clone()), logits)  # a recipe without rollouts
    assert worker.return_model_config() is worker.model.config
    assert worker.is_alive() is True and worker.shutdown() is None and worker.is_alive()


def test_weights_and_devices_have_nemo_rls_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    run_world(weights_out, 2, tiny_recipe(tmp_path))


def noise(rank, recipe, world_size, at):
    worker = DTensorPolicyWorker(*parts_of(rank, recipe, world_size), init_reference_model=False)
    before = {name: tensor.clone() for name, tensor in worker.weights.full_tensors()}
    worker._add_noise_to_weights()
    added = {name: tensor - before[name] for name, tensor in worker.weights.full_tensors()}
    logits = torch.randn(3, 5)
    scaled = logits.clone()
    assert worker._apply_temperature_scaling(scaled) is scaled and torch.equal(scaled, logits / 0.5)
    if rank == 0:
        torch.save(added, at / f"{world_size}.pt")


def test_nemo_rls_helpers_for_tests(tmp_path):
    """NeMo-RL adds normal(0, 0.01) to trained weights, and divides logits by the temperature of generation."""
    run_world(noise, 1, tiny_grpo(tmp_path, "grpo.sampling.temperature=0.5"), 1, tmp_path)
    run_world(noise, 2, tiny_grpo(tmp_path, "grpo.sampling.temperature=0.5", "parallel.tp=2"), 2, tmp_path)
    one, two = (torch.load(tmp_path / f"{world_size}.pt") for world_size in (1, 2))
    values = torch.cat([tensor.flatten() for tensor in one.values()])
    error = 5 * 0.01 / len(values) ** 0.5  # five standard errors of the mean; those of the deviation are smaller
    assert abs(values.mean()) < error and abs(values.std() - 0.01) < error
    assert all(tensor.abs().max() > 0 for tensor in one.values())
    assert all(torch.allclose(tensor, two[name], rtol=0, atol=1e-12) for name, tensor in one.items())


def saved(rank, recipe, at):
    parts, data = parts_of(rank, recipe, 1), nemo_batch(8)
    first = DTensorPolicyWorker(*parts)
    first.train(data=data, loss_fn=nll)
    first.save_checkpoint(str(at / "weights"), str(at / "optimizer"))
    second = DTensorPolicyWorker(*parts, weights_path=str(at / "weights"), optimizer_path=str(at / "optimizer"))
    losses = [one.train(data=data, loss_fn=nll)["global_loss"].tolist() for one in (first, second)]
    assert losses[0] == losses[1]
    logprobs = [one.get_reference_policy_logprobs(data=data)["reference_logprobs"] for one in (first, second)]
    assert torch.equal(*logprobs)  # of the weights before anything was loaded


def test_a_worker_goes_on_from_what_was_saved(tmp_path):
    run_world(saved, 1, tiny_recipe(tmp_path, "scheduler.warmup_steps=0"), tmp_path)


def within_a_context(rank, recipe):
    worker = DTensorPolicyWorker(*parts_of(rank, recipe, 2))
    ids = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    places = torch.arange(8).repeat(2, 1)
    buffers = [ids.clone(), places.clone()]
    ctx = DTensorPolicyWorker.create_context_parallel_ctx(
        cp_mesh=worker.mesh.cp,
        cp_buffers=buffers,
        cp_seq_dims=[1, 1],
        cp_no_restore_buffers=set(),
        cp_rotate_method="addtoall",
    )
    with DTensorPolicyWorker.train_context(ctx), torch.no_grad():
        logits = worker.model(buffers[0], buffers[1])
        mine = places[0, buffers[1][0]]
    with DTensorPolicyWorker.train_context():
        pass
    assert torch.equal(buffers[0], ids)
    logprobs = worker.get_logprobs(data={"input_ids": ids})["logprobs"]
    own = logits.log_softmax(-1)
    for at, place in enumerate(mine.tolist()):
        if place < 7:
            got = own[:, at].gather(1, ids[:, place + 1, None])[:, 0]
            torch.testing.assert_close(got, logprobs[:, place + 1], rtol=1e-12, atol=1e-12)


def test_the_contexts_are_those_of_context_parallel(tmp_path):
    run_world(within_a_context, 2, tiny_recipe(tmp_path, "parallel.cp=2"))


class TokenLevel:
    loss_type = "token_level"

    def __call__(self, logits, data, seqs, tokens):
        raise AssertionError("not reached")


def refused(rank, recipe):
    parts = parts_of(rank, recipe, 1)
    worker = DTensorPolicyWorker(*parts)
    for call, message in (
        (lambda: worker.train(data=nemo_batch(2), loss_fn=TokenLevel()), "train with TokenLevel: .* full logits"),
        (lambda: worker.score(data={}), "score: .* method=reward"),
        (lambda: worker.stream_weights_via_ipc_zmq(5), r"stream_weights_via_ipc_zmq: .*prepare_weights_for_ipc"),
        (worker.get_zmq_address, "get_zmq_address"),
        (worker.maybe_init_zmq, "maybe_init_zmq"),
        (worker.report_node_ip_and_gpu_id, "report_node_ip_and_gpu_id: .* Ray"),
        (lambda: DTensorPolicyWorker({"model_name": "x"}, None), "needs a recipe of dtrain"),
        (lambda: DTensorPolicyWorker(config={"model_name": "x"}, tokenizer=None), "needs a recipe of dtrain"),
        (lambda: DTensorPolicyWorker(*parts, processor=object()), "does not read a config, tokenizer or processor"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            call()
    recipe.train.steps, recipe.train.epochs = None, 1
    with pytest.raises(ValueError, match="train.steps=null: the learning rate schedule needs"):
        DTensorPolicyWorker(*parts)


def test_what_it_cannot_do_is_refused_by_name(tmp_path):
    run_world(refused, 1, tiny_recipe(tmp_path))
