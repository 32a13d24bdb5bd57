"""Hugging Face directories out: transformers loads them with equal logits; ranks write what one process writes."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dtrain import models
from dtrain.base.errors import UserError
from dtrain.base.ranks import Ranks
from dtrain.checkpoint.dcp.training_state import model_tensors
from dtrain.checkpoint.huggingface.model_files import write_companions
from dtrain.checkpoint.huggingface.write import write_directory, write_files
from tests.checkpoint.families import FAMILIES, MULTIMODAL, logits, save_family
from tests.checkpoint.tiny import on_mesh, seeded
from tests.data.makers import byte_level, save
from tests.world import run_world

IDS = torch.arange(24).view(2, 12) % 67


def trained(directory):
    """A family's model with weights that are not those of its directory any more."""
    model = models.from_pretrained(directory).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.02)
    return model


def read_all(directory):
    tensors = {}
    for file in directory.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_it_with_equal_logits(tmp_path, family):
    save_family(family, tmp_path / "source")
    model = trained(tmp_path / "source")
    write_directory(model, tmp_path / "out", tmp_path / "source")
    kind = hf.Gemma3ForConditionalGeneration if family == MULTIMODAL else hf.AutoModelForCausalLM
    loaded, info = kind.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        assert (model(IDS) - logits(loaded.eval(), IDS)).abs().max() < 1e-4
    source, out = read_all(tmp_path / "source"), read_all(tmp_path / "out")
    assert out.keys() == source.keys(), "tied weights once, under the source's names"


def test_parts_that_are_not_trained_are_copied_through(tmp_path):
    save_family(MULTIMODAL, tmp_path / "source", max_shard_size="4KB")
    write_directory(trained(tmp_path / "source"), tmp_path / "out", tmp_path / "source", torch.float16)
    source, out = read_all(tmp_path / "source"), read_all(tmp_path / "out")
    for name, tensor in source.items():
        if name.startswith("language_model."):
            assert out[name].dtype == torch.float16
        else:
            assert torch.equal(out[name], tensor) and out[name].dtype == tensor.dtype


def test_the_sources_own_prefix_is_kept(tmp_path):
    save_family(MULTIMODAL, tmp_path / "source")
    old = read_all(tmp_path / "source")
    new = {f"model.{name}".replace("model.language_model.model.", "model.language_model."): old[name] for name in old}
    save_file(new, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    model = trained(tmp_path / "source")
    write_directory(model, tmp_path / "out", tmp_path / "source")
    assert read_all(tmp_path / "out").keys() == new.keys() != old.keys()
    loaded = hf.Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        assert (model(IDS) - logits(loaded, IDS)).abs().max() < 1e-4


def test_a_text_tower_from_scratch_is_written_as_a_model_of_its_own(tmp_path):
    save_family(MULTIMODAL, tmp_path / "source")
    model = trained(tmp_path / "source")
    (tmp_path / "source" / "model.safetensors").unlink()
    write_directory(model, tmp_path / "out", tmp_path / "source")
    loaded, info = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert isinstance(loaded, hf.Gemma3ForCausalLM) and not any(info.values())
    with torch.no_grad():
        assert (model(IDS) - logits(loaded.eval(), IDS)).abs().max() < 1e-4


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_is_written_and_said(tmp_path, key, dtype):
    source = tmp_path / "source"
    save_family("llama3", source)
    config = json.loads((source / "config.json").read_text())
    del config["dtype"]
    (source / "config.json").write_text(json.dumps(config | ({key: "float32"} if key else {})))
    model = trained(source)
    write_directory(model, tmp_path / "out", source, dtype)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    name = str(dtype).removeprefix("torch.")
    assert {k: written.pop(k) for k in ("dtype", "torch_dtype") if k in written} == {key or "torch_dtype": name}
    assert written == config
    for stored, tensor in read_all(tmp_path / "out").items():
        assert torch.equal(tensor, model.state_dict()[stored].to(dtype))
    assert hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == dtype


def test_nothing_is_rounded_by_default(tmp_path):
    save_family("llama3", tmp_path / "source")
    model = models.from_pretrained(tmp_path / "source", dtype=torch.float64)
    write_directory(model, tmp_path / "out", tmp_path / "source")
    assert {tensor.dtype for tensor in read_all(tmp_path / "out").values()} == {torch.float64}


def test_shards_and_their_index(tmp_path):
    save_family("llama3", tmp_path / "source")
    model = trained(tmp_path / "source")
    write_directory(model, tmp_path / "one", tmp_path / "source")
    write_directory(model, tmp_path / "out", tmp_path / "source", max_shard_bytes=25_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    whole = read_all(tmp_path / "one")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), whole.pop(name))
            assert opened.metadata() == {"format": "pt"}
        assert (tmp_path / "out" / file).stat().st_size < 30_000
    assert not whole
    hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_small_files_go_along(tmp_path):
    source = tmp_path / "source"
    save_family("llama3", source)
    names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "vocab.json"]
    names += ["additional_chat_templates/tool_use.jinja", "qformer_tokenizer/tokenizer.json"]
    for name in [*names, "train.log", "logs/tokenizer.json"]:
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(f"of {name}")
    model = trained(source)
    write_directory(model, tmp_path / "out", source)
    assert all((tmp_path / "out" / name).read_text() == f"of {name}" for name in names)
    files = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert set(map(str, files)) == {*names, "config.json", "model.safetensors"}


ASK = [{"role": "user", "content": "a"}]


def test_a_template_of_ones_own_is_the_only_one_that_is_written(tmp_path):
    source = tmp_path / "source"
    save_family("llama3", source)
    oracle = hf.PreTrainedTokenizerFast.from_pretrained(save(source, byte_level()))
    oracle.chat_template = {"default": "theirs", "tool_use": "theirs with tools"}
    oracle.save_pretrained(source)
    (source / "chat_template.json").write_text(json.dumps({"chat_template": "theirs too"}))
    write_directory(trained(source), tmp_path / "own", source, chat_template="own")
    written = hf.AutoTokenizer.from_pretrained(tmp_path / "own")
    assert written.apply_chat_template(ASK, tools=[{}], tokenize=False) == written.chat_template == "own"
    assert not (tmp_path / "own" / "chat_template.json").exists()  # a processor would read it first
    # The same for an adapter that was trained with a template of its own.
    adapter = save(tmp_path / "adapter", byte_level())
    (adapter / "chat_template.jinja").write_text("the adapter's")
    (tmp_path / "both").mkdir()
    write_companions(tmp_path / "both", [source, adapter], None, None)
    written = hf.AutoTokenizer.from_pretrained(tmp_path / "both")
    assert written.apply_chat_template(ASK, tools=[{}], tokenize=False) == written.chat_template == "the adapter's"


def test_what_is_there_stays_unless_it_is_to_be_replaced(tmp_path):
    save_family("llama3", tmp_path / "source")
    model, out = trained(tmp_path / "source"), tmp_path / "deep" / "out"
    write_directory(model, out, tmp_path / "source", torch.float16)
    (tmp_path / "deep" / ".out.partial").mkdir()
    with pytest.raises(UserError, match="already there"):
        write_directory(model, out, tmp_path / "source")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    write_directory(model, out, tmp_path / "source", replace=True)
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    (tmp_path / "empty").mkdir()
    write_directory(model, tmp_path / "empty", tmp_path / "source")
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_errors_name_the_place(tmp_path):
    model = seeded(0)
    with pytest.raises(UserError, match="has no config.json"):
        write_directory(model, tmp_path / "out", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="not .*float8"):
        write_directory(model, tmp_path / "out", tmp_path, torch.float8_e4m3fn)


def write_on(rank, source, out, sizes, tied, dtype):
    model = on_mesh(seeded(0, tied=tied), **sizes)
    write_directory(model, out, source, dtype, max_shard_bytes=2000)


@pytest.mark.parametrize(
    ("sizes", "tied", "dtype"),
    [
        ({"replicate": 2, "shard": 2}, False, None),
        ({"shard": 3, "tp": 2}, True, torch.bfloat16),
        ({"shard": 9}, False, torch.bfloat16),
    ],
)
def test_ranks_write_what_one_process_writes(tmp_path, sizes, tied, dtype):
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    model = seeded(0, tied=tied)
    write_directory(model, tmp_path / "one", tmp_path, dtype, max_shard_bytes=2000)
    run_world(write_on, torch.Size(sizes.values()).numel(), tmp_path, tmp_path / "many", sizes, tied, dtype)
    one, many = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in ("one", "many"))
    assert one == many
    stored = read_all(tmp_path / "many")
    for name, tensor in model_tensors(model).items():
        assert torch.equal(stored[name], tensor.to(dtype or torch.float32))


def fail_on_one_rank(rank, source, out):
    import resource
    import signal

    model = on_mesh(seeded(0), shard=2)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        write_directory(model, out, source, max_shard_bytes=2000)
    except UserError as error:
        return str(error)


def test_a_full_disk_on_one_rank_ends_all_and_leaves_nothing(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    messages = run_world(fail_on_one_rank, 2, tmp_path, tmp_path / "out")
    assert messages[0] == messages[1] and "File too large" in messages[0]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_writing_needs_one_tensor_beside_the_model(tmp_path):
    # Five of 40 MiB as written: blocks that malloc gives back at once when they are freed.
    (tmp_path / "config.json").write_text("{}")
    code = textwrap.dedent(f"""
        import resource, torch
        from torch import nn
        from dtrain.checkpoint.huggingface.write import write_directory

        class Model(nn.Module):
            ignored_checkpoint_names = ()
            def checkpoint_names(self, name):
                return [name]

        model = Model()
        for i in range(5):
            model.register_parameter(f"w{{i}}", nn.Parameter(torch.ones(5 << 10, 1024)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        write_directory(model, {str(tmp_path / "out")!r}, {str(tmp_path)!r}, torch.float64)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) < 80 * 1024, f"{result.stdout} KiB above the model"


def test_a_directory_that_fails_at_its_end_leaves_the_one_before(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")

    def finish(partial):
        raise UserError("the disk is full")

    with pytest.raises(UserError, match="full"):
        write_files({}, finish, out, replace=True, ranks=Ranks(single_process=True))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["config.json", "out"]
