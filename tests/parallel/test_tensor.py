"""The styles on 3 and 4 ranks against one process: logits, the loss from hidden states, and every gradient."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from dtrain.attention.kernels import SdpaKernel
from dtrain.losses.head.vocabulary import VocabShard
from dtrain.losses.head.weighted_sum import weighted_logprob_sum
from dtrain.models.common.micro_batch import MicroBatchContext
from dtrain.parallel.apply import apply_plan
from dtrain.parallel.fsdp import mixed_precision, shard_model
from dtrain.parallel.placement import local_slices, local_tensor
from dtrain.parallel.tensor import TensorParallel, VocabEmbedding, vocab_rows, without_sequence_parallel
from tests.cases import run_cases
from tests.covering import covering, named
from tests.parallel.dense import (
    LLAMA_BIASES,
    assert_gradients,
    config_of,
    dense_gradients,
    dense_loss,
    random_batch,
    random_model,
)
from tests.world import run_world

TWELVE = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4}
MODELS = {
    "llama, all biases": ("llama", LLAMA_BIASES),
    "qwen2, its biases": ("qwen2", {}),
    "qwen3, one KV head": ("qwen3", {"num_key_value_heads": 1}),
    "gemma3": ("gemma3", {"intermediate_size": 47}),
    "olmo3, shared KV heads": ("olmo3", {"attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "granite": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "granite4": ("granite4", {}),
    "ministral3": ("ministral3", {}),
    "llama, uneven MLP": ("llama", {"intermediate_size": 50}),
}


def hidden_loss(model, batch, tp):
    """The same loss from hidden states, by the head's shard."""
    trained = batch["labels"].flatten() >= 0
    index = trained.nonzero().squeeze(1)
    shard = VocabShard(model.lm_head.vocab_start, tp.get_group())

    def at_head(hidden, weight):
        targets = batch["labels"].flatten()[index]
        ones = torch.ones(index.shape)
        return -weighted_logprob_sum(hidden.flatten(0, 1), weight, targets, ones, index, shard=shard, rows_per_tile=5)

    return model.with_head(at_head, batch["input_ids"], MicroBatchContext(batch["position_ids"], batch["seq_ids"]))


def against_one_process(rank, config, size, sequence, length, packed):
    model, batch = random_model(config), random_batch(config.vocab_size, length=length, packed=packed)
    expected_loss, expected = dense_gradients(model, [batch])
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
    for loss_of in (dense_loss, lambda model, batch: hidden_loss(model, batch, mesh)):
        parallel = copy.deepcopy(model)
        apply_plan(parallel, mesh, parallel.plan, sequence_parallel=sequence)
        for name, parameter in parallel.named_parameters():
            assert parameter.device_mesh == mesh, name
            mine = dict(model.named_parameters())[name][local_slices(parameter)]
            assert torch.equal(local_tensor(parameter), mine), name
        tied = parallel.lm_head.weight is parallel.model.embed_tokens.weight
        assert tied == config.tie_word_embeddings
        loss = loss_of(parallel, batch)
        assert abs(loss.item() - expected_loss) <= 1e-12 * abs(expected_loss)
        loss.backward()
        assert_gradients(parallel, expected)


CASES = covering(
    {
        "model": list(MODELS),
        "tied": [True, False],
        "ranks": [3, 4],
        "sequence parallel": [False, True],
        "length": [7, 3],
        "packed": [False, True],
    }
)


@pytest.mark.trap(
    "a tied head is untied by loading",
    "verl-project/verl #7834",
    "the embedding lacks half of its gradient",
    "tied and untied models have the numbers of one process",
)
@pytest.mark.parametrize("size", [3, 4])
def test_a_plan_gives_the_numbers_of_one_process(tmp_path, size):
    cases = {}
    for case in (case for case in CASES if case["ranks"] == size):
        family, changes = MODELS[case["model"]]
        changes = {**changes, **(TWELVE if size == 3 else {})}
        # A vocabulary of 67: uneven over 3 and over 4.
        config = config_of(tmp_path / str(len(cases)), family, tied=case["tied"], **changes)
        cases[named(case)] = config, size, case["sequence parallel"], case["length"], case["packed"]
    run_cases(against_one_process, size, cases)


def lookup_with_empty_shards(rank, size, vocabulary):
    torch.manual_seed(0)
    weight = torch.randn(vocabulary, 4, dtype=torch.float64)
    ids = torch.arange(vocabulary).repeat(2)[None]
    scale = torch.arange(1.0, ids.numel() + 1)[None, :, None]
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))

    table = VocabEmbedding(vocabulary, 4, padding_idx=2, dtype=torch.float64)
    oracle = nn.Embedding(vocabulary, 4, padding_idx=2, dtype=torch.float64)
    for module in (table, oracle):
        with torch.no_grad():
            module.weight.copy_(weight)
    vocab_rows(table, TensorParallel(mesh, False, 1))
    found, expected = table(ids), oracle(ids)
    assert torch.equal(found, expected)
    (found * scale).sum().backward()
    (expected * scale).sum().backward()
    assert torch.allclose(table.weight.grad.full_tensor(), oracle.weight.grad, rtol=1e-12, atol=0)
    return local_tensor(table.weight).shape[0]


@pytest.mark.parametrize(("size", "vocabulary", "rows"), [(2, 67, [34, 33]), (4, 9, [3, 3, 3, 0]), (3, 4, [2, 2, 0])])
def test_a_lookup_in_uneven_and_empty_shards(size, vocabulary, rows):
    assert run_world(lookup_with_empty_shards, size, size, vocabulary) == rows


def used_outside(rank, config, fsdp):
    mesh = init_device_mesh("cpu", (fsdp, 2), mesh_dim_names=("fsdp", "tp"))
    model = random_model(config)
    apply_plan(model, mesh["tp"], model.plan, sequence_parallel=False)
    shard_model(model, mesh["fsdp"], mixed_precision(torch.float64, torch.float64))
    hidden = torch.zeros(1, 6, config.hidden_size, dtype=torch.float64)
    for module in (model.lm_head, model.model.norm, model.model.layers[0].mlp):
        with pytest.raises(RuntimeError, match="outside the forward of its FSDP root"):
            module(hidden)
    model.with_head(
        lambda hidden, weight: hidden @ weight.t(), torch.arange(6)[None], MicroBatchContext()
    )  # registered: gathers what it needs
    return True


@pytest.mark.trap(
    "the head's weight read outside the forward that gathers it",
    "NVIDIA-NeMo/Automodel PR#3414",
    "the head's gradient lacks the other ranks",
    "it is refused",
)
@pytest.mark.parametrize("fsdp", [1, 2])
def test_a_head_used_outside_the_roots_forward_is_refused(tmp_path, fsdp):
    """Its weight is one rank's shard there: without the refusal the numbers are wrong and nothing is said."""
    assert all(run_world(used_outside, 2 * fsdp, config_of(tmp_path), fsdp))


def generate_from_a_cache(rank, config):
    from dtrain.inference.cached_attention import Decode, Prefill
    from dtrain.inference.kv_cache import KeyValues

    model = random_model(config)
    model.use_kernel(SdpaKernel())
    ids = torch.arange(1, 9).view(2, 4)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def decoded(model):
        store = KeyValues([None] * config.num_hidden_layers)
        places = [store.new_prompt(3), store.new_prompt(3)]
        first = model.next_logits(ids[:, :3], Prefill(store, places, ids.device))
        for _ in places:
            store.new_row()
        step = Decode(store, places, ids.device)
        step.begin()
        return torch.stack([first, model.next_logits(ids[:, 3:], step)], 1)

    with torch.no_grad():
        expected = model(ids)[:, 2:]
        parallel = copy.deepcopy(model)
        apply_plan(parallel, mesh, parallel.plan, sequence_parallel=False)
        assert torch.allclose(decoded(parallel), expected, rtol=1e-12)
        sequence = copy.deepcopy(model)
        apply_plan(sequence, mesh, sequence.plan, sequence_parallel=True)
        with pytest.raises(ValueError, match="cache cannot be used with sequence parallel"):
            decoded(sequence)
        with without_sequence_parallel(sequence):
            assert torch.allclose(decoded(sequence), expected, rtol=1e-12)
        assert torch.allclose(sequence(ids).full_tensor()[:, 2:], expected, rtol=1e-12)


def test_a_cache_goes_with_tensor_parallel_and_whole_sequences(tmp_path):
    run_world(generate_from_a_cache, 2, config_of(tmp_path))
