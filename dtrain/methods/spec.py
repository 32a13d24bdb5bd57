from dtrain.methods.registry import spec_of

REWARD_MODEL = "grpo.reward_model.path"
__all__ = ["spec_of", "REWARD_MODEL"]
