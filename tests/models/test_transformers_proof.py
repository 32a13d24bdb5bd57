"""The proof at a run's start that dtrain computes a model of transformers as that library does.

The mutants are classes derived from transformers' Llama that do something dtrain does not know. Each of them trains
without an error in dtrain, and with wrong numbers.
"""

import json

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP

from dtrain.models.transformers.proof import prove, prove_on_mesh
from dtrain.parallel.mesh import Runtime, build_mesh
from tests.problem_lines import preflight
from tests.running import run, trajectory
from tests.tiny import tiny_recipe, write_model
from tests.world import run_world

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PACKING = "data.packing=false"


class CumulativeMLP(nn.Module):
    """An MLP that adds the sum of all earlier tokens of its row, as a recurrent layer would."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden):
        return self.mlp(hidden + 0.1 * hidden.cumsum(dim=1))


class ReversedMLP(CumulativeMLP):
    """An MLP that reads the later tokens of its row, also those of padding."""

    def forward(self, hidden):
        return self.mlp(hidden + 0.1 * hidden.flip(1).cumsum(dim=1).flip(1))


class LeakyConfig(hf.LlamaConfig):
    model_type = "dtrain_leaky"


class LeakyForCausalLM(LlamaForCausalLM):
    config_class = LeakyConfig
    mlp = CumulativeMLP

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = self.mlp(layer.mlp)


class ReversedConfig(hf.LlamaConfig):
    model_type = "dtrain_reversed"


class ReversedForCausalLM(LeakyForCausalLM):
    config_class = ReversedConfig
    mlp = ReversedMLP


class DirectMLP(nn.Module):
    """An MLP whose up_proj is never called: its weight is read directly, as Jamba's dt_proj and Gemma 3n's are."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, hidden):
        up = nn.functional.linear(hidden, self.up_proj.weight)
        return self.down_proj(nn.functional.silu(self.gate_proj(hidden)) * up)


class DirectConfig(hf.LlamaConfig):
    model_type = "dtrain_direct"


class DirectForCausalLM(LeakyForCausalLM):
    config_class = DirectConfig
    mlp = DirectMLP


class ScaledConfig(hf.LlamaConfig):
    model_type = "dtrain_scaled"


class ScaledForCausalLM(LlamaForCausalLM):
    """The head has a factor that is no field of the config."""

    config_class = ScaledConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 1.001
        return output


class DetachedConfig(hf.LlamaConfig):
    model_type = "dtrain_detached"


class DetachedForCausalLM(LlamaForCausalLM):
    """The loss is right and a gradient is not: the reference leaves out that of the head."""

    config_class = DetachedConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        hidden = self.model(*args, **kwargs).last_hidden_state
        output.logits = hidden @ (self.lm_head.weight.detach() * 0.5 + self.lm_head.weight * 0.5).t()
        return output


class UnsummedConfig(hf.LlamaConfig):
    """Each tp rank has some of the inner activations of an MLP, and the gradient of their gain is not summed."""

    model_type = "dtrain_unsummed"


class GainMLP(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.gain)


class UnsummedForCausalLM(LlamaForCausalLM):
    config_class = UnsummedConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = GainMLP(config)


MUTANTS = [
    LeakyForCausalLM,
    DirectForCausalLM,
    ReversedForCausalLM,
    ScaledForCausalLM,
    DetachedForCausalLM,
    UnsummedForCausalLM,
]


@pytest.fixture(autouse=True)
def mutants():
    for cls in MUTANTS:
        hf.AutoConfig.register(cls.config_class.model_type, cls.config_class, exist_ok=True)
        hf.AutoModelForCausalLM.register(cls.config_class, cls, exist_ok=True)


def values_of(cls, **changes):
    """The fields of config.json of a small model."""
    return {**cls.config_class(**{**SIZES, **changes}).to_dict(), "architectures": [cls.__name__]}


def recipe_of(root, cls, *overrides, name="run"):
    directory = write_model(root / "qwen3-tied")
    (directory / "config.json").write_text(json.dumps(values_of(cls)))
    return tiny_recipe(
        root, "model.implementation=transformers", "train.steps=1", "scheduler.warmup_steps=0", *overrides
    )


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "deepseek_v3", "recurrent_gemma"])
def test_published_sizes_are_proved_in_seconds(kind):
    """The default config of each class is of a published model, such as DeepSeek-V3 with 671 billion parameters."""
    config = hf.CONFIG_MAPPING[kind]()
    values = {**config.to_dict(), "architectures": [hf.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]}
    proof = prove(values)
    assert proof.problem == ""
    assert proof.leak == ("temporal_block (RecurrentGemmaRecurrentBlock)" if kind == "recurrent_gemma" else "")


def test_a_layer_that_mixes_documents_is_named(tmp_path):
    recipe = recipe_of(tmp_path, LeakyForCausalLM)
    path = recipe.model.path
    mixed = f"model.path={path}: its mlp (CumulativeMLP) mixes the documents of a packed row"
    assert preflight(recipe, 1) == [f"{mixed}. Set data.packing=false and parallel.cp=1."]
    with pytest.raises(Exception, match="its mlp \\(CumulativeMLP\\) mixes the documents"):
        run(recipe)
    (problem,) = preflight(recipe_of(tmp_path, LeakyForCausalLM, PACKING, "parallel.cp=2"), 2)
    assert problem.startswith(f"parallel.cp=2: the mlp (CumulativeMLP) of model.path={path} needs all tokens")
    run(recipe_of(tmp_path, LeakyForCausalLM, PACKING))  # padded rows train


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (ReversedForCausalLM, "the loss is"),
        (ScaledForCausalLM, "the loss is"),
        (DetachedForCausalLM, "the loss is right and the gradient of lm_head.weight differs by"),
    ],
)
def test_a_class_that_computes_something_else_is_refused(tmp_path, cls, reason):
    (problem,) = preflight(recipe_of(tmp_path, cls, PACKING), 1)
    assert f"dtrain cannot train this model of transformers {hf.__version__}" in problem
    assert f"In a small copy of it, {reason}" in problem
    assert problem.endswith("Set model.path to another model.")


def test_a_run_stores_its_proof_and_validate_stores_nothing(tmp_path):
    recipe = recipe_of(tmp_path, LlamaForCausalLM)
    assert preflight(recipe, 1) == []
    assert not (tmp_path / "runs").exists()
    run(recipe)
    (stored,) = (tmp_path / "runs" / ".cache" / "proofs").iterdir()
    assert json.loads(stored.read_text()) == {"leak": "", "kept": [], "uncalled": []}
    # The next start reads it.
    stored.write_text(json.dumps({"leak": "conv (Stored)", "kept": [], "uncalled": []}))
    (problem,) = preflight(recipe, 1)
    assert "its conv (Stored) mixes the documents" in problem


def prove_on_ranks(rank, cases, shape):
    mesh = build_mesh(Runtime(rank=rank, local_rank=rank, world_size=4), **shape)
    return [prove_on_mesh(values, mesh, rotate, torch.device("cpu")) for values, rotate in cases]


def test_ranks_compute_the_numbers_of_one_process():
    experts = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    }
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    mixture = values_of(hf.DeepseekV3ForCausalLM, **experts, **latent, num_key_value_heads=4, moe_intermediate_size=16)
    tied = values_of(hf.Qwen3ForCausalLM, tie_word_embeddings=True)
    unsummed = values_of(UnsummedForCausalLM)
    cases = [(mixture, "allgather"), (tied, "ring"), (unsummed, "allgather")]
    for results in run_world(prove_on_ranks, 4, cases, {"tp": 2, "cp": 2}):
        assert results[:2] == [None, None]
        assert "mlp.gain differs by" in results[2]


class PlanlessConfig(hf.LlamaConfig):
    model_type = "dtrain_planless"
    base_model_tp_plan = None


class PlanlessForCausalLM(LlamaForCausalLM):
    config_class = PlanlessConfig


class UnknownStyleConfig(hf.LlamaConfig):
    model_type = "dtrain_unknown_style"
    base_model_tp_plan = {**hf.LlamaConfig.base_model_tp_plan, "layers.*.self_attn.o_proj": "dtrain_unknown"}


class UnknownStyleForCausalLM(LlamaForCausalLM):
    config_class = UnknownStyleConfig


MUTANTS += [PlanlessForCausalLM, UnknownStyleForCausalLM]
TP2 = "parallel.tp=2"


@pytest.mark.parametrize(
    ("cls", "overrides", "problem"),
    [
        (LlamaForCausalLM, ["lora={quantize: nf4}"], "lora.quantize=nf4 does not store the layers of LlamaForCausalLM"),
        (LlamaForCausalLM, ["train.tile=mlp"], "train.tile=mlp does not cut the layers"),
        (LlamaForCausalLM, ["train.compile=true"], "train.compile=true: the layers of LlamaForCausalLM"),
        (LlamaForCausalLM, ["parallel.ep=2"], "parallel.ep=2: this model has no experts"),
        (LlamaForCausalLM, ["moe.balance=0.1"], "moe.balance=0.1 does not read the routers"),
        (LlamaForCausalLM, [TP2, "parallel.sequence_parallel=true"], "parallel.sequence_parallel=true does not shard"),
        (LlamaForCausalLM, [TP2, "parallel.custom_plan={lm_head: vocab_head}"], "parallel.custom_plan: the layers of"),
        (LlamaForCausalLM, ["model.linear_attention=fla"], "model.linear_attention=fla: the transformers library"),
        (LlamaForCausalLM, ["train.vision=all"], "train.vision=all: this model has no vision tower"),
        (PlanlessForCausalLM, [TP2], "parallel.tp=2: transformers has no tensor-parallel plan for this class"),
        (UnknownStyleForCausalLM, [TP2], "parallel.tp=2: layers.*.self_attn.o_proj: dtrain does not know the style"),
    ],
)
def test_options_that_these_models_do_not_have_are_refused(tmp_path, cls, overrides, problem):
    found = preflight(recipe_of(tmp_path, cls, *overrides), 2)
    assert [line for line in found if line.startswith(problem)], found


def test_adapters_of_layers_that_are_never_called_are_refused(tmp_path):
    """Such an adapter would train nothing, without an error."""
    for target in ([], ["lora.target=[up_proj, q_proj]"]):
        (problem,) = preflight(recipe_of(tmp_path, DirectForCausalLM, "lora={rank: 2}", *target), 1)
        assert problem.startswith("lora.target selects mlp.up_proj, whose weight another module")
        assert "lora.exclude=[mlp.up_proj]" in problem
    excluded = recipe_of(tmp_path, DirectForCausalLM, "lora={rank: 2, exclude: [mlp.up_proj]}")
    assert preflight(excluded, 1) == []
    assert preflight(recipe_of(tmp_path, DirectForCausalLM), 1) == []


def test_all_problems_of_a_recipe_are_reported_together(tmp_path):
    recipe = recipe_of(tmp_path, LeakyForCausalLM, "parallel.tp=3", "train.tile=mlp", "optimizer.lr=-1")
    keys = {problem.partition("=")[0].partition(" ")[0] for problem in preflight(recipe, 3)}
    assert sorted(keys) == ["model.path", "optimizer.lr", "parallel.tp", "train.tile"]


@pytest.mark.parametrize("kind", ["none", "full", "selective", "mlp"])
def test_activations_may_be_recomputed_and_offloaded(tmp_path, kind):
    expected = trajectory(run(recipe_of(tmp_path, LlamaForCausalLM, name="expected")))
    options = (f"train.activation_checkpointing={kind}", "train.activation_offload=true")
    assert trajectory(run(recipe_of(tmp_path, LlamaForCausalLM, *options))) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_trains(tmp_path, dtype):
    expected = trajectory(run(recipe_of(tmp_path, LlamaForCausalLM, name="expected")))
    ((loss, *_),) = trajectory(run(recipe_of(tmp_path, LlamaForCausalLM, f"train.dtype={dtype}")))
    assert loss == pytest.approx(expected[0][0], rel=1e-2)


def test_a_checked_plan_leaves_nothing_to_the_run_in_the_same_process(tmp_path):
    """A rank of torchrun checks the recipe, whose plan is applied to ranks that do not exist, and then trains."""
    recipe = recipe_of(tmp_path, LlamaForCausalLM, TP2, "train.micro_batch=4", "train.dtype=float32")
    assert preflight(recipe, 2) == []
    run(recipe, 2)
    assert len(trajectory(recipe)) == 1
