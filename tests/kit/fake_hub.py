"""As much of the Hub as its client needs to create a repository and commit to it, on the loopback interface."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeHub:
    """A server; `repos` holds what was committed, as {repository: {path: bytes}}, and `log` every request."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, Any] = {}
        self.blobs: dict[str, bytes] = {}
        self.log: list[str] = []
        self.tokens: set[str | None] = set()
        hub = self

        class Handler(_Handler):
            server_state = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class _Handler(BaseHTTPRequestHandler):
    server_state: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        out = b""
        while size := int(self.rfile.readline(), 16):
            out += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return out

    def _answer(self, status: int, data: Any = None, **headers: str) -> None:
        body = b"" if data is None else json.dumps(data).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        self._file(self.path.split("?")[0].strip("/").split("/"))

    def _file(self, parts: list[str]) -> None:
        """A file of a repository, USER/NAME/resolve/REVISION/PATH."""
        content = self.server_state.repos.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
        if content is None:
            self._answer(404, X_Error_Code="EntryNotFound")
            return
        self.send_response(200)
        headers = {"Content-Length": str(len(content)), "ETag": '"1"', "X-Repo-Commit": "0" * 40}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_GET(self) -> None:
        hub, path = self.server_state, self.path.split("?")[0]
        hub.log.append(f"GET {path}")
        parts = path.strip("/").split("/")
        repo = "/".join(parts[2:4])
        if parts[2:3] == ["resolve"]:
            self._file(parts)
            return
        if parts[:2] == ["api", "models"] and repo in hub.repos:
            self._answer(200, {"id": repo, "sha": "0" * 40, "siblings": [{"rfilename": f} for f in hub.repos[repo]]})
        else:
            self._answer(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")

    def do_PUT(self) -> None:
        hub, oid = self.server_state, self.path.rpartition("/")[2]
        hub.log.append("PUT blob")
        body = self._body()
        assert hashlib.sha256(body).hexdigest() == oid
        hub.blobs[oid] = body
        self._answer(200)

    def do_POST(self) -> None:
        hub, path, body = self.server_state, self.path.split("?")[0], self._body()
        hub.log.append(f"POST {path}")
        hub.tokens.add(self.headers.get("Authorization"))
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif path.endswith("/info/lfs/objects/batch"):
            self._answer(200, {"transfer": "basic", "objects": [self._lfs(x) for x in json.loads(body)["objects"]]})
        elif parts[4] == "preupload":
            large = [(f["path"], f["path"].endswith(".safetensors")) for f in json.loads(body)["files"]]
            answer = [{"path": p, "uploadMode": "lfs" if x else "regular", "shouldIgnore": False} for p, x in large]
            self._answer(200, {"files": answer})
        elif parts[4] == "commit":
            self._commit("/".join(parts[2:4]), body)
        else:
            self._answer(404, {"error": path})

    def _create(self, data: dict[str, Any]) -> None:
        hub, repo = self.server_state, f"{data['organization']}/{data['name']}"
        if repo in hub.repos:
            self._answer(409, {"error": "You already created this model repo", "url": f"{hub.url}/{repo}"})
            return
        hub.repos[repo], hub.private[repo] = {}, data.get("visibility", data.get("private"))
        self._answer(200, {"url": f"{hub.url}/{repo}", "name": repo, "id": repo})

    def _lfs(self, thing: dict[str, Any]) -> dict[str, Any]:
        return thing | {"actions": {"upload": {"href": f"{self.server_state.url}/blob/{thing['oid']}"}}}

    def _commit(self, repo: str, body: bytes) -> None:
        hub = self.server_state
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                hub.repos[repo][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                hub.repos[repo][value["path"]] = hub.blobs[value["oid"]]
        url = f"{hub.url}/{repo}/commit/{'1' * 40}"
        self._answer(200, {"commitUrl": url, "commitOid": "1" * 40, "success": True})
