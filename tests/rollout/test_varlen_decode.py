"""Decoding by variable-length attention over slots, by a stand-in for the operation: the products' completions and
log-probabilities, fewer launches and keys read, fewer graphs; and the proof before it is taken."""

import pytest
import torch

from dtrain.inference import engine as engine_module, varlen_decode
from dtrain.inference.cached_attention import Decode
from dtrain.inference.engine import Engine
from dtrain.inference.kv_cache import KeyValues
from dtrain.inference.request import Request, SamplingParams
from dtrain.inference.varlen_decode import VarlenDecode, check_varlen_decode, choose_varlen_decode
from tests.replay import Recording
from tests.rollout.slots import WrittenSlotFlash
from tests.rollout.test_engine import PROMPTS, build, mixed, same
from tests.rollout.test_graphs import Makers, requests

CPU = torch.device("cpu")
HEADS = {"heads": 4, "key_heads": 2, "head_dim": 16, "value_dim": 16, "device": CPU}
# Full; mixed windows; windows and sinks; two sizes of heads, and layers that read another's keys; linear and full.
VARIANTS = ["qwen3", "gemma3", "gpt-oss", "gemma4", "qwen3.5"]


def groups_of(sizes):
    """Samples of prompts of several lengths, some under a window's and some over it."""
    sampling = SamplingParams(14, 1.0, stop_ids=(3, 4, 5))
    prompts = [*PROMPTS, list(range(70))]
    return [Request(prompts[at], sampling, 2, at, n) for at, size in enumerate(sizes) for n in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_completions_are_those_of_products(variant):
    """All rows at once, and four at a time, that come and go and move to larger slots."""
    model, flash = build(variant), WrittenSlotFlash()
    for batch, options in ((mixed(13), {}), (groups_of([1, 8, 0, 1, 3, 1]), {"max_rows": 4})):
        same(Engine(model, flash=flash, **options).generate(batch), Engine(model).generate(batch))
    assert flash.calls > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_completions_with_rounded_sizes(variant, monkeypatch):
    """By kernels, for the CPU's experts are no graph; by graphs where there are none."""
    monkeypatch.setattr(engine_module, "_STEPS_PER_READ", {"cpu": 3})
    model, makers = build(variant), Makers()
    steps = makers.steps(model)
    steps.obstacle = "experts" if model.routing is not None else None
    batch, flash = requests(9), WrittenSlotFlash()
    completions = Engine(model, max_rows=12, steps=steps, flash=flash).generate(batch)
    same(completions, Engine(model).generate(batch))
    assert flash.calls > 0 and (makers.total("replayed") > 0) == (steps.obstacle is None)


def numbers(flash, windows, sinks=True, dtype=torch.float64):
    store = KeyValues(windows, flash=flash)
    return varlen_decode._attend_full_slots(store, 6, 2, 8, 8, sinks, dtype, CPU)


@pytest.mark.parametrize("sinks", [False, True])
def test_windows(sinks):
    """Over rings that are full, slots that hold what others have left, and segments without a query."""
    windows = [None, 40, 1, 520, 2000]  # 520: a row of 400 tokens does not see all of its prompt's 130
    flash = WrittenSlotFlash()
    for values, expected in zip(numbers(flash, windows, sinks), numbers(None, windows, sinks), strict=True):
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-12)
    # Two pools of rows in each layer; three of prompts, where there is no window.
    assert flash.calls == 5 * 2 + 3


def decode_of(flash, layers, device=CPU):
    """The cache of a step of 33 rows of five prompts."""
    store = KeyValues([None] * layers, flash=flash)
    prompts = [store.new_prompt(length) for length in (100, 120, 70, 90, 127)]
    owners = {}
    for row in range(33):
        slot = store.new_row(row, 1024)
        slot.length, owners[row] = 5 + 10 * row, prompts[min(row // 8, 4)]
    kind = Decode if flash is None else VarlenDecode
    return kind(store, [owners[slot.owner] for slot in store.rows_in_order()], device, fixed=True)


def launches(flash, device=CPU, dtype=torch.float64):
    """How many calls a recording takes of the second layer's attention."""
    decode = decode_of(flash, 2, device)
    q, k, v = (torch.randn(decode.rows, 1, heads, 16).to(device, dtype) for heads in (8, 2, 2))
    for recording in (Recording(device), Recording(device)):
        decode.begin()
        decode.attend(0, q, k, v, 0.25)
        with recording:
            decode.attend(1, q, k, v, 0.25)
        recording.end()
        decode.end()
    return len(recording)


def test_launches_of_a_layer():
    """In half precision some copies come to both."""
    assert (launches(None), launches(WrittenSlotFlash())) == (25, 14)


class Counting(WrittenSlotFlash):
    """Counts the keys that its calls read."""

    keys = 0

    def __call__(self, q, k, v, slots, scale):
        self.keys += int(slots.used[slots.query_ends.diff() > 0].sum())
        return super().__call__(q, k, v, slots, scale)


def test_keys_read():
    """Of one head in a step: as many as there are, where products read all rows' as far as the longest row's."""
    q, k, v = (torch.randn(40, 1, heads, 16, dtype=torch.float64) for heads in (8, 2, 2))
    flash, products = Counting(), decode_of(None, 1)
    decode = decode_of(flash, 1)
    decode.begin()
    assert decode.attend(0, q, k, v, 0.25).isfinite().all()  # of rows without a sequence too
    assert flash.keys == sum(6 + 10 * row for row in range(33)) + (40 - 33) + 100 + 120 + 70 + 90 + 127
    products.begin()
    own = sum(len(own.indices) * own.views[None].keys for own in products._row_parts)
    shared = sum(shared.table.shape[0] * shared.views[None].keys for shared in products.products.parts)
    assert (own, shared) == (40 * 512, 8 * 128)


class Placed(WrittenSlotFlash):
    """Notes where the keys and values of its calls lie."""

    def __init__(self):
        super().__init__()
        self.addresses = set()

    def __call__(self, q, k, v, slots, scale):
        self.addresses |= {k.data_ptr(), v.data_ptr()}
        return super().__call__(q, k, v, slots, scale)


def test_the_cache_is_not_copied():
    """Memory lies as what reads it wants it: by position for `flash`, by head for products."""
    flash, windows = Placed(), [None, 40, 520, 2000]
    store = KeyValues(windows, flash=flash)
    varlen_decode._attend_full_slots(store, 6, 2, 8, 8, False, torch.float64, CPU)
    layers = {(pool, at): pool._layers[at] for pool in store.pools for at in range(len(windows))}
    of_products = {key for key in layers if key[0] in store.prompts.values() and windows[key[1]] is not None}
    assert len(of_products) == 3 * 3
    assert all(part.is_contiguous() for key in of_products for part in layers[key])
    assert flash.addresses == {part.data_ptr() for key in layers.keys() - of_products for part in layers[key]}


def test_queries_of_prompts():
    """Of each size of prompts as many as it has rows, rounded up; none of a size that is no longer used."""
    store = KeyValues([None], flash=WrittenSlotFlash())
    prompts = [store.new_prompt(length) for length in (20, 50, 200, 900)]
    of_rows = prompts[:1] * 17 + prompts[1:2] * 30 + prompts[2:3]
    for row in range(len(of_rows)):
        store.new_row(row, 64)
    decode = VarlenDecode(store, of_rows, CPU, fixed=True)
    assert decode.rows == 48
    assert [(each.pool.capacity, len(each.order)) for each in decode._prompts] == [(32, 32), (64, 32), (256, 16)]
    before = decode.shape
    store.release(store.rows_in_order()[-1:])  # the last prompt's
    decode = VarlenDecode(store, of_rows[:-1], CPU, fixed=True)
    assert decode.rows == 48 and decode.shape[3:] == before[3:-1]


@pytest.mark.slow
def test_graphs_of_any_length(monkeypatch):
    """Rows that end one by one: shapes differ in their number and in the sizes of their prompts, and mostly come again
    in the next rollout."""
    monkeypatch.setattr(engine_module, "_STEPS_PER_READ", {"cpu": 8})
    model = build("qwen3")
    sampling = SamplingParams(70, 1.0, stop_ids=(3, 11, 17))
    prompts = [[(at * at + 7 * n) % 60 for n in range(5 + 9 * at)] for at in range(5)]
    batches = [
        [Request(prompt, sampling, seed, at, n) for at, prompt in enumerate(prompts) for n in range(3)]
        for seed in range(3)
    ]
    captures = []
    for flash in (None, WrittenSlotFlash()):
        makers = Makers()
        steps = makers.steps(model, keeps=2**40)
        for batch in batches:
            before = makers.total("captured")
            completions = Engine(model, max_rows=12, steps=steps, flash=flash).generate(batch)
            captures.append(makers.total("captured") - before)
        same(completions, Engine(model).generate(batches[-1]))
    print(captures, makers.total("replayed"))
    assert sum(captures[3:]) * 3 < sum(captures[:3]) and captures[5] <= 1


@pytest.mark.parametrize(("window", "sinks"), [(None, False), (5, True), (500, False)])
def test_the_proof(window, sinks):
    for dtype in (torch.bfloat16, torch.float16):
        assert check_varlen_decode(WrittenSlotFlash(), window=window, dtype=dtype, sinks=sinks, **HEADS) is None
    problem = check_varlen_decode(WrittenSlotFlash(1.1), window=window, dtype=torch.bfloat16, sinks=sinks, **HEADS)
    assert problem is not None and problem.startswith("varlen_attn gives other numbers than products here: ")


class Older(WrittenSlotFlash):
    def __call__(self, q, k, v, slots, scale):
        raise TypeError("varlen_attn() got an unexpected keyword argument 'seqused_k'")


class Refusing(WrittenSlotFlash):
    def __call__(self, q, k, v, slots, scale):
        raise AssertionError("head_dim (512, 512) is not supported")


class Short(WrittenSlotFlash):
    """Does not see the last key of a segment that has several."""

    def __call__(self, q, k, v, slots, scale):
        return super().__call__(q, k, v, slots._replace(used=slots.used - (slots.used > 1).int()), scale)


class Whole(WrittenSlotFlash):
    """Sees every key of a segment."""

    def __call__(self, q, k, v, slots, scale):
        return super().__call__(q, k, v, slots._replace(used=slots.key_ends.diff()), scale)


@pytest.mark.parametrize(
    ("flash", "words"),
    [
        (Older, "varlen_attn does not run here: varlen_attn() got an unexpected keyword argument 'seqused_k'"),
        (Refusing, "varlen_attn does not run here: head_dim (512, 512) is not supported"),
        (Short, "gives other numbers"),
        (Whole, "gives other numbers"),
    ],
)
def test_what_is_wrong_is_refused(flash, words):
    assert words in check_varlen_decode(flash(), window=None, dtype=torch.bfloat16, **HEADS)


def test_elsewhere_nothing_is_tried():
    config = build("qwen3").config
    assert choose_varlen_decode(config, torch.bfloat16, CPU) == (None, "")
    assert choose_varlen_decode(config, torch.float32, torch.device("cuda")) == (None, "")
