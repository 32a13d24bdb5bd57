"""Stage tokenizer: the tokenizer of the model's directory, and its chat template."""

from dtrain.base.errors import UserError
from dtrain.data.formats.encoder import refuse_without_template
from dtrain.training.host import Host, problems_of
from dtrain.training.spec import RunSpec


def check_files(spec: RunSpec) -> list[str]:
    """Read both, and compare the tokenizer with config.json."""
    source, config = spec.source, spec.source.any_config
    if config is None:
        return []
    prompts_as = spec.recipe.data.prompts_as
    if problems := problems_of(lambda: refuse_without_template(prompts_as, source.template, source.path)):
        return problems
    if source.tokenizer.size > config.vocab_size:
        return [
            f"{source.path}: the tokenizer's highest id is {source.tokenizer.size - 1}, but config.json's vocab_size "
            f"is {config.vocab_size}: the model has no embedding for it; take the tokenizer that belongs to this model"
        ]
    return []


def resolve(spec: RunSpec, host: Host) -> bool:
    """Read the tokenizer; without one a dry run ends, whose checks have told why. Raises UserError."""
    try:
        return spec.source.tokenizer is not None
    except (OSError, UserError):
        if not host.is_dry:
            raise
        return False
