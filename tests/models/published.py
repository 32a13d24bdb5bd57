"""config.json of published models, field by field as transformers 4 wrote them: published.json."""

import json
from pathlib import Path

CONFIGS = json.loads(Path(__file__).with_name("published.json").read_text())  # of a model's name
# The other families have tests of their own.
_OTHERS = ("granite4", "qwen3.6-35b", "gemma4", "phi4", "qwen3-30b", "gpt-oss")
PUBLISHED = {name: config for name, config in CONFIGS.items() if not name.startswith(_OTHERS)}
