"""From what was typed after `dtrain serve` to a server that runs."""

from collections.abc import Callable
from pathlib import Path

from dtrain.data.prompts import PromptEncoder, PromptOptions
from dtrain.data.template import choose_template
from dtrain.errors import UserError
from dtrain.rollout.engine import Engine
from dtrain.rollout.generate import choose_device, choose_dtype, load
from dtrain.rollout.http import read_key
from dtrain.rollout.serve.protocol import Parser
from dtrain.rollout.serve.server import Server, Service, serve
from dtrain.rollout.serve.updates import Updates
from dtrain.rollout.serve.worker import Worker


def serve_directory(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    device: str = "auto",
    dtype: str = "auto",
    max_rows: int | None = None,
    max_tokens: int | None = None,
    max_length: int | None = None,
    name: str | None = None,
    chat_template: str | None = None,
    api_key_file: Path | None = None,
    watch: Path | None = None,
    grace: float = 30.0,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the model of `directory` (as `dtrain generate` takes it) until a signal; see `server.serve`, which raises.

    max_rows, max_tokens: the engine's. max_length: prompt and completion together, at most what the model was built
    for. name: what clients call the model (default: `directory` as given). chat_template: a file, in place of the
    model's own. Raises UserError.
    """
    torch_device = choose_device(device)
    torch_dtype = choose_dtype(dtype, torch_device)
    model, tokenizer = load(Path(directory), torch_dtype, torch_device)
    model.eval()
    most = model.config.max_position_embeddings
    if max_length is not None and max_length > most:
        raise UserError(f"--max-length {max_length}: the model was built for {most} positions")
    template = choose_template(tokenizer.directory, tokenizer.special_tokens, chat_template)
    length = max_length or most
    encoder = PromptEncoder(tokenizer, template, max_length=length, options=PromptOptions(length))

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    worker = Worker(Engine(model, decode=decode, max_rows=max_rows, max_tokens=max_tokens))
    service = Service(
        Parser(encoder, name or str(directory), length), worker, Updates(model, worker), read_key(api_key_file)
    )
    try:
        server = Server((host, port), service)
    except OSError as error:
        raise UserError(
            f"cannot listen at {host}:{port} ({error.strerror or error}); choose another --port, or 0 for a free one"
        ) from error
    kind = str(torch_dtype).removeprefix("torch.")
    shown = f"[{host}]" if ":" in host else host
    say(f"serving {name or directory} at http://{shown}:{server.server_port} ({kind} on {torch_device})")
    serve(server, grace=grace, watch=watch, say=say)
