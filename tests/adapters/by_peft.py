"""Adapters on disk that PEFT has saved: the outside oracle for reading, writing and merging."""

import warnings
from pathlib import Path

import peft
import torch
import transformers as hf

from tests.models import oracle, towers

IDS = torch.arange(24).view(2, 12) % 67
SHAPES = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "patterns": {"rank_pattern": {"k_proj": 2, "^model.layers.1.mlp.*": 6}, "alpha_pattern": {"layers.0.*q_proj": 5}},
    "regex": {"target_modules": r".*\.(1|2)\.(self_attn\.[qo]|mlp\.down)_proj"},
    "layers": {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2], "layers_pattern": "layers"},
    "excluded": {"exclude_modules": r".*\.0\..*", "target_modules": ["v_proj", "down_proj"]},
    "saved": {"modules_to_save": ["lm_head", "input_layernorm", "2.mlp.up_proj"]},
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        "rank_pattern": {"down_proj": 3},
        "alpha_pattern": {"experts.gate_up_proj": 20},
    },
    "one stack": {"target_modules": [], "target_parameters": ["layers.1.mlp.experts.gate_up_proj"], "use_rslora": True},
    "all linear": {"alpha_pattern": {"gate.weight": 30}},  # of Mixtral and Qwen3-MoE experts and routers too
    "latents": {"target_modules": r".*self_attn\.(q_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)"},
    "dora patterns": {"use_dora": True, "use_rslora": True, "rank_pattern": {"v_proj": 3}},
}
STACKS = ("experts", "one stack", "all linear")
TIED = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}


def save_base(directory: Path, variant: str, dtype: torch.dtype = torch.float32):
    """The directory of a tiny model of a variant of tests/models/oracle.py."""
    oracle.save(towers.make_multimodal() if variant == "gemma3-vision" else oracle.make(variant, dtype), directory)
    return directory


def load_base(directory: Path, dtype: torch.dtype = torch.float32):
    options = {"dtype": dtype, "experts_implementation": "eager"}  # torch's grouped product takes neither float64
    return quietly(lambda: hf.AutoModelForCausalLM.from_pretrained(directory, **options).eval())  # nor odd sizes


def save_adapter(base: Path, directory: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **options):
    """PEFT's model of `base` with a random adapter, whose files then lie in `directory`."""
    wanted = {"r": 4, "lora_alpha": 12, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **options}
    model = quietly(lambda: peft.get_peft_model(load_base(base, dtype), peft.LoraConfig(**wanted)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), alpha=0.1)
    quietly(lambda: model.save_pretrained(directory))
    return model.eval()


def load_adapter(base: Path, directory: Path, dtype: torch.dtype = torch.float32):
    """As PEFT's users do; what it warns of (keys that are missing or left over) is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*(missing|unexpected) .*keys.*")
        return peft.PeftModel.from_pretrained(load_base(base, dtype), str(directory)).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def quietly(act):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return act()
