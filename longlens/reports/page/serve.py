"""The page from a small server on this machine: it follows runs that train. Nobody else can reach it."""

import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from longlens.errors import BadInput
from longlens.reports.page.render import Changing, Still, content_policy, render_page

ADDRESS = "127.0.0.1"
REST = 9  # times as long as a look took: the server has a tenth of a core at most


class Server(ThreadingHTTPServer):
    """``look`` says what the runs are like now, and is asked by one request at a time."""

    daemon_threads = True

    def __init__(self, still: Still, look: Callable[[], Changing], port: int):
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise BadInput(f"cannot listen on port {port}: {reason}; choose another with --port") from None
        self.still, self.look, self.lock = still, look, threading.Lock()
        self.last: Changing | None = None
        self.due = 0.0  # when it is time to look again

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/"

    def now(self) -> Changing:
        """What is known, looked at again when enough time has passed: the cores are for the runs."""
        with self.lock:
            if self.last is None or time.monotonic() >= self.due:
                start = time.thread_time()
                self.last = self.look()
                self.due = time.monotonic() + REST * (time.thread_time() - start)
            return self.last


class Handler(BaseHTTPRequestHandler):
    """Two addresses: the page, and what has changed of it."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    server_version = "longlens"
    sys_version = ""
    timeout = 30  # seconds for a request: one that never ends holds a thread

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if self.headers.get("Host") not in self._own_names():  # a foreign name that leads here: DNS rebinding
            self._answer(HTTPStatus.MISDIRECTED_REQUEST, "text/plain", "this is not that host")
        elif asked.path == "/":
            page = render_page(self.server.still, self.server.now(), follows=True)
            self._answer(HTTPStatus.OK, "text/html", page)
        elif asked.path == "/live":
            now = self.server.now()
            if parse_qs(asked.query).get("seen") == [now.version]:
                self._answer(HTTPStatus.NO_CONTENT)
            else:
                values = {"version": now.version, "parts": now.parts, "data": now.data}
                self._answer(HTTPStatus.OK, "application/json", json.dumps(values))
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only /")

    def _own_names(self) -> set[str]:
        port = self.server.server_port
        names = {f"{name}:{port}" for name in (ADDRESS, "localhost")}
        return names | {ADDRESS, "localhost"} if port == 80 else names

    def _answer(self, status: HTTPStatus, kind: str = "", text: str = "") -> None:
        body = text.encode(errors="replace")
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", f"{content_policy()}; frame-ancestors 'none'")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a line every two seconds helps nobody."""
