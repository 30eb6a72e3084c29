"""A model hub on localhost with one repository: just what the hub client asks for when it downloads a snapshot."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(repository: str, files: dict[str, bytes]) -> Iterator[str]:
    """Serves `files` as `repository`; yields the hub's URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            name = self.path.removeprefix(f"/{repository}/resolve/{COMMIT}/").split("?")[0]
            if self.path.startswith(f"/api/models/{repository}/revision/"):
                siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
                self.send(json.dumps({"id": repository, "sha": COMMIT, "siblings": siblings}).encode(), {})
            elif self.path.startswith(f"/api/models/{repository}/tree/{COMMIT}"):
                entries = [{"type": "file", "path": file, "size": len(data), "oid": ""} for file, data in files.items()]
                self.send(json.dumps(entries).encode(), {})
            elif name in files:
                etag = hashlib.sha256(files[name]).hexdigest()
                self.send(files[name], {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
            else:
                self.send(b"{}", {"X-Error-Code": "RepoNotFound"}, status=404)

        def send(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in (headers | {"Content-Length": str(len(body))}).items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
