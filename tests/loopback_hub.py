"""A hub on loopback that huggingface_hub's own client talks to: repositories in memory, files up and down, tokens."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants


@dataclass
class Hub:
    """datasets and models: id -> revision -> path -> bytes. asked: method and path of each request. private: ids that
    want the token. made: what repositories were created with."""

    url: str = ""
    datasets: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    models: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    private: set[str] = field(default_factory=set)
    made: list[dict] = field(default_factory=list)
    token: str = "hf_right"
    may_write: bool = True

    def files(self, kind: str, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The commit and the files of a revision, which may be a commit itself."""
        revisions = getattr(self, kind).get(name, {})
        for branch, files in revisions.items():
            commit = hashlib.sha1(json.dumps([branch, *sorted(map(str, files.items()))]).encode()).hexdigest()
            if revision in (branch, commit):
                return commit, files
        return None


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def json(self, value, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def refuse(self, status: int, code: str, said: str) -> None:
        self.answer(status, json.dumps({"error": said}).encode(), X_Error_Code=code, X_Error_Message=said)

    @property
    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {self.hub.token}"

    def found(self, kind: str, name: str, revision: str):
        if name in self.hub.private and not self.is_known or name not in getattr(self.hub, kind):
            self.refuse(401, "RepoNotFound", "Repository not found")
            return None
        files = self.hub.files(kind, name, unquote(revision))
        if files is None:
            self.refuse(404, "RevisionNotFound", "Invalid rev id")
        return files

    def do_GET(self):  # noqa: N802 (http.server's name)
        path = urlsplit(self.path).path
        self.hub.asked.append(f"{self.command} {path}")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts[:2] == ["api", "whoami-v2"]:
            return self.json({"name": "me", "type": "user"}) if self.is_known else self.refuse(401, "", "Invalid token")
        if parts[0] == "api" and parts[1] in ("datasets", "models") and len(parts) > 3:
            kind, name, revision = parts[1], "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
            if (found := self.found(kind, name, revision)) is None:
                return None
            commit, files = found
            if len(parts) > 4 and parts[4] == "tree":
                oid = {name: hashlib.sha1(content).hexdigest() for name, content in files.items()}
                return self.json([
                    {"type": "file", "path": name, "size": len(content), "oid": oid[name]}
                    for name, content in files.items()
                ])  # fmt: skip
            return self.json(
                {"id": name, "sha": commit, "private": False, "siblings": [{"rfilename": f} for f in files]}
            )
        kind, parts = ("datasets", parts[1:]) if parts[0] == "datasets" else ("models", parts)
        if len(parts) > 4 and parts[2] == "resolve":
            if (found := self.found(kind, "/".join(parts[:2]), parts[3])) is None:
                return None
            commit, files = found
            if (content := files.get("/".join(parts[4:]))) is None:
                return self.refuse(404, "EntryNotFound", "Entry not found")
            return self.answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=commit)
        return self.refuse(404, "", f"no route {path}")

    do_HEAD = do_GET

    def do_POST(self):  # noqa: N802
        path = urlsplit(self.path).path
        self.hub.asked.append(f"POST {path}")
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.is_known:
            return self.refuse(401, "", "Invalid username or password.")
        if not self.hub.may_write:
            return self.refuse(403, "", "You don't have the rights to create a model under the namespace org")
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
            self.hub.made.append({**asked, "id": name})
            if name in self.hub.models:
                return self.json({"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"}, 409)
            self.hub.models[name] = {"main": {}}
            return self.json({"url": f"{self.hub.url}/{name}", "name": name})
        if parts == ["api", "validate-yaml"]:
            return self.json({"errors": [], "warnings": []})
        name = "/".join(parts[2:4])
        if parts[4] == "branch":
            self.hub.models[name].setdefault(parts[5], {})
            return self.json({})
        if parts[4] == "preupload":
            files = json.loads(body)["files"]
            return self.json(
                {"files": [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False} for one in files]}
            )
        if parts[4] == "commit":
            held = self.hub.models[name].setdefault(parts[5], {})
            for line in map(json.loads, body.decode().splitlines()):
                if line["key"] == "file":
                    held[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    held.pop(line["value"]["path"], None)
            commit, _ = self.hub.files("models", name, parts[5])
            return self.json({"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit})
        return self.refuse(404, "", f"no route {path}")


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[Hub]:
    """The hub that this process's huggingface_hub talks to, its cache under tmp_path, no token."""
    with serving() as one:
        monkeypatch.setattr(constants, "ENDPOINT", one.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", one.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        from huggingface_hub import hf_api

        monkeypatch.setattr(hf_api.api, "endpoint", one.url)
        yield one


def parquet(rows: list[dict], path: Path) -> bytes:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path.read_bytes()


def jsonl(rows: list[dict]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
