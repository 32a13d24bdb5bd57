"""Text and rows that others got wrong, by name: expected ids and labels written out by hand."""

import pytest
import torch

from dtrain.base.batch import IGNORE_INDEX, PADDING_SEQ_ID, collate
from dtrain.data.formats.encoder import Encoder
from dtrain.data.formats.formats import normalise
from dtrain.data.rows.cache import Source, open_cache
from dtrain.data.rows.rows import build_row
from dtrain.data.text.template import ChatTemplate
from dtrain.data.text.tokenizer import Tokenizer
from tests.data.makers import byte_level, save, write_jsonl

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]


@pytest.mark.trap(
    "the end of text is not trained where it is the padding token too",
    "ibm-granite/granite-3.1-language-models #2",
    "the model does not stop writing",
)
def test_the_end_of_text_is_a_label_where_it_is_the_padding_token():
    """Padding is told by its place and not by its id: each text keeps its end as a label, padding has none."""
    end = 9
    rows = [build_row([(torch.tensor(ids), torch.ones(len(ids), dtype=torch.bool))]) for ids in ([1, 2, end], [3, end])]
    batch = collate(rows)
    batch["input_ids"][1, 2] = end  # as a caller pads whose padding token is the end
    assert batch["labels"].tolist() == [[2, end, IGNORE_INDEX], [end, IGNORE_INDEX, IGNORE_INDEX]]
    assert batch["seq_ids"].tolist() == [[0, 0, 0], [0, 0, PADDING_SEQ_ID]]


@pytest.mark.trap(
    "the cache of another template is used",
    "allenai/open-instruct PR#1497",
    "training in a format that nobody asked for",
)
def test_another_template_is_another_cache(tmp_path):
    """A template that differs in one character has tokens of its own; the first ones are still there."""
    tokenizer = Tokenizer.from_directory(save(tmp_path / "model", byte_level()))
    file = write_jsonl(tmp_path / "chat.jsonl", [{"messages": CHAT}] * 3)
    found = []
    for source in (TEMPLATE, TEMPLATE.replace("}}<", "}} <"), TEMPLATE):
        template = ChatTemplate(source, "here", {"eos_token": "<|endoftext|>"})
        encoder = Encoder(tokenizer, template, max_length=64)
        samples = open_cache([Source((file,), ("messages",))], encoder, cache_dir=tmp_path / "cache")
        assert samples[0][0][0].tolist() == encoder.encode(normalise({"messages": CHAT}, "messages"))[0]
        found.append(samples.fingerprint)
    assert found[0] == found[2] != found[1]
