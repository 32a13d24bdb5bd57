"""Setup of the tokenizer and the chat template, which are in the model's directory."""

from dtrain.base.errors import Problem, problems_in
from dtrain.data.formats.encoder import refuse_without_template
from dtrain.training.inputs import RunInputs


def check_files(inputs: RunInputs) -> list[Problem]:
    """Check that the tokenizer and the template can be read, and that the model has an embedding for every token."""
    source, config = inputs.source, inputs.source.any_config
    if config is None:
        return []

    def check_template() -> list[Problem]:
        refuse_without_template(inputs.recipe.data.prompts_as, source.template, source.path)
        return []

    problems = problems_in("data.prompts_as", check_template)
    if problems:
        return problems
    if source.tokenizer.size > config.vocab_size:
        text = (
            f"{source.path}: the tokenizer's highest id is {source.tokenizer.size - 1}, but config.json's vocab_size "
            f"is {config.vocab_size}, so the model has no embedding for it"
        )
        return [Problem("model.path", text, "Use the tokenizer that belongs to this model")]
    return []
