"""A proxy in front of a real S3 server that delays, refuses, resets, ignores or damages what passes through."""

import random
import re
import socket
import struct
import threading
import time
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NEVER = 1 << 60


class FaultProxy(ThreadingHTTPServer):
    """Listen on loopback and pass requests on to the server.

    The next `faults_left` requests end in `fault`: "slow down", "reset" or "silence". Afterwards, a `corrupted_share`
    of the files that are read arrives with a flipped byte or is cut; listings and writes pass unchanged.
    """

    daemon_threads = True

    def __init__(self, endpoint: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.server, self.endpoint = endpoint.removeprefix("http://"), f"http://127.0.0.1:{self.server_port}"
        self.fault, self.faults_left, self.corrupted_share, self.n_corrupted = "", 0, 0.0, 0
        self.delay, self.n_requests, self.draw = 0.0, 0, random.Random(0)
        self.refused_key = "no key"  # the proxy refuses requests that this key signs
        self._refusal, self._refuse_after, self._refuse_at = (0, ""), NEVER, ""
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def refuse(self, status: int, code: str, after: int = 0, at: str = "") -> None:
        """Refuse every request after the next `after` ones, or from the first write of a path that matches `at`."""
        self._refusal, self._refuse_at = (status, code), at
        self._refuse_after = NEVER if at else after + self.n_requests

    def pass_on(self) -> None:
        """Refuse nothing any more."""
        self._refuse_after, self._refuse_at = NEVER, ""

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def fault_of(self, request: BaseHTTPRequestHandler) -> tuple[int, str] | str:
        """Count a request and return its fault: an S3 status and code, "reset", "silence", or "" for none."""
        with self.lock:
            self.n_requests += 1
            if self.faults_left:
                self.faults_left -= 1
                return (503, "SlowDown") if self.fault == "slow down" else self.fault
            if self._refuse_at and request.command in ("PUT", "POST") and re.search(self._refuse_at, request.path):
                self._refuse_after = 0
            signed = f"Credential={self.refused_key}/" in request.headers.get("Authorization", "")
            return self._refusal if signed or self.n_requests > self._refuse_after else ""

    def damaged(self, content: bytes) -> bytes:
        """Flip a byte of a share of the files, or cut them."""
        with self.lock:
            if not content or self.draw.random() >= self.corrupted_share:
                return content
            self.n_corrupted += 1
            if self.draw.random() < 0.3:
                return content[: len(content) // 2]
            place = self.draw.randrange(len(content))
            return content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]


class _Handler(BaseHTTPRequestHandler):
    server: FaultProxy
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.fault_of(self)
        if isinstance(fault, tuple):
            error = f"<?xml version='1.0'?><Error><Code>{fault[1]}</Code><Message>told by the server</Message></Error>"
            self._answer(fault[0], {"Content-Type": "application/xml", "Connection": "close"}, error.encode())
        elif fault == "silence":
            threading.Event().wait()
        elif fault == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
        else:
            time.sleep(self.server.delay)
            answer, content = self._passed_on(body)
            is_file = self.command == "GET" and answer.status < 300 and "list-type" not in self.path
            self._answer(answer.status, dict(answer.headers), content, damage=is_file)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def _passed_on(self, body: bytes) -> tuple[HTTPResponse, bytes]:
        connection = HTTPConnection(self.server.server)
        try:
            headers = {name: value for name, value in self.headers.items() if name not in ("Expect", "Connection")}
            connection.request(self.command, self.path, body or None, headers)
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes, *, damage: bool = False) -> None:
        self.send_response_only(status)
        if self.command != "HEAD":
            headers = {name: value for name, value in headers.items() if name != "Transfer-Encoding"}
            headers["Content-Length"] = str(len(content))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        sent = self.server.damaged(content) if damage else content
        self.close_connection |= len(sent) < len(content)
        if self.command != "HEAD":
            self.wfile.write(sent)

    def log_message(self, *_: object) -> None: ...
