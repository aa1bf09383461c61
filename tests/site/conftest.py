"""The site, built once a session as `make site` builds it, and served from this machine."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = "search/search_index.json"
sys.path.insert(0, str(ROOT / "docs"))  # the hooks' own place: `pages` is imported from there


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "REPOSITORY": ""}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a request a line would drown the report."""


@cache
def nothing_in(index: Path) -> bytes:
    return json.dumps({**json.loads(index.read_text("utf-8")), "docs": []}).encode()


class Unsearched(Quiet):
    """With nothing to be found: each page reads the whole index, which takes a browser as long as all the rest."""

    def do_GET(self) -> None:
        if not self.path.endswith(INDEX):
            return super().do_GET()
        none = nothing_in(Path(self.directory) / INDEX)
        self.send_response(200)
        self.send_header("Content-Length", str(len(none)))
        self.end_headers()
        self.wfile.write(none)


@contextmanager
def served(site: Path, handler: type[Quiet]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def searched(site: Path) -> Iterator[str]:
    with served(site, Quiet) as address:
        yield address


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    with served(site, Unsearched) as address:
        yield address
