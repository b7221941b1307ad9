"""Proxies in front of a real server that disturb its connections.

`FaultProxy` throttles, resets or silences a number of connections, `CorruptingProxy` flips a byte of some answers or
cuts them, and `RefusingProxy` delays requests and returns an error from a chosen moment on.
"""

import contextlib
import random
import re
import socket
import struct
import threading
import time
from urllib.parse import urlsplit

_SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"


class FaultProxy:
    """Listens on loopback; the first `n_faults` connections fail in the given way, the others reach the server."""

    def __init__(self, endpoint: str, fault: str, n_faults: int) -> None:
        self._server, self._fault, self.faults_left = urlsplit(endpoint), fault, n_faults
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(client)
            if self.faults_left:
                self.faults_left -= 1
                self._fail(client)
            else:
                self._connect(client)

    def _fail(self, client: socket.socket) -> None:
        if self._fault == "silence":
            return
        client.recv(2**16)
        if self._fault == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            head = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(_SLOW_DOWN)}\r\nConnection: close\r\n\r\n"
            client.sendall(head.encode() + _SLOW_DOWN)
        client.close()

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection((self._server.hostname, self._server.port))
        self._open.append(server)
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while content := source.recv(2**16):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)


class CorruptingProxy(FaultProxy):
    """Flip a byte of a share of the files that are read, or cut them; pass listings and writes unchanged."""

    def __init__(self, endpoint: str, share: float, seed: int = 0) -> None:
        self._share, self._draw, self.n_corrupted = share, random.Random(seed), 0
        super().__init__(endpoint, "corruption", 0)

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection((self._server.hostname, self._server.port))
        self._open.append(server)
        asked: list[bytes] = [b""]  # the request that is being answered
        threading.Thread(target=self._pass_requests, args=(client, server, asked), daemon=True).start()
        threading.Thread(target=self._pass_answers, args=(server, client, asked), daemon=True).start()

    def _pass_requests(self, client: socket.socket, server: socket.socket, asked: list[bytes]) -> None:
        with contextlib.suppress(OSError):
            while content := client.recv(2**16):
                asked[0] = content if content[:4] in (b"GET ", b"PUT ", b"HEAD", b"POST", b"DELE") else asked[0]
                server.sendall(content)
            server.shutdown(socket.SHUT_WR)

    def _pass_answers(self, server: socket.socket, client: socket.socket, asked: list[bytes]) -> None:
        doomed = False
        with contextlib.suppress(OSError):
            while content := server.recv(2**16):
                head = content.find(b"\r\n\r\n") + 4 if content.startswith(b"HTTP/1.1 20") else 0
                if head:
                    file = asked[0].startswith(b"GET ") and b"list-type" not in asked[0].partition(b"\r")[0]
                    doomed = file and self._draw.random() < self._share
                if doomed and len(content) > head:
                    doomed, self.n_corrupted = False, self.n_corrupted + 1
                    if self._draw.random() < 0.3:
                        client.sendall(content[: (head + len(content)) // 2])
                        break
                    place = self._draw.randrange(head, len(content))
                    content = content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :]
                client.sendall(content)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


class RefusingProxy(FaultProxy):
    """Return an S3 error once `refuse` has been called, and wait `delay` seconds before every request."""

    def __init__(self, endpoint: str, delay: float = 0.0) -> None:
        self.delay, self._answer, self.n_requests, self.listings, self._refuse_at = delay, b"", 0, 0, 1 << 60
        self._refuse_at_write = b""
        self.refused_key = b""  # it also refuses requests that this key signs
        self._counting = threading.Lock()
        super().__init__(endpoint, "refusal", 0)

    def refuse(self, status: int, code: str, after: int = 0, at: str = "") -> None:
        """Refuse every request after the next `after` ones, or from the first write of a path that matches `at`."""
        self._refuse_at_write = at.encode()
        body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>told by the server</Message></Error>".encode()
        head = f"HTTP/1.1 {status} Refused\r\nContent-Type: application/xml\r\nConnection: close\r\n"
        self._answer = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._refuse_at = 1 << 60 if at else after + self.n_requests

    def pass_on(self) -> None:
        """Refuse nothing any more."""
        self._refuse_at, self._refuse_at_write = 1 << 60, b""

    def _connect(self, client: socket.socket) -> None:
        server = socket.create_connection((self._server.hostname, self._server.port))
        self._open.append(server)
        threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
        threading.Thread(target=_copy, args=(server, client), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := client.recv(2**16):
                line = content.partition(b"\r\n")[0]
                if line.endswith(b"HTTP/1.1"):
                    with self._counting:
                        self.n_requests += 1
                        self.listings += b"list-type" in line
                        if (at := self._refuse_at_write) and re.match(rb"(PUT|POST) .*" + at, line):
                            self._refuse_at = 0
                    signed = b"Credential=" + self.refused_key + b"/"
                    if self.n_requests > self._refuse_at or (self.refused_key and signed in content):
                        head = self._answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
                        client.sendall(head if line.startswith(b"HEAD") else self._answer)
                        client.shutdown(socket.SHUT_RDWR)
                        return
                    time.sleep(self.delay)
                server.sendall(content)
            server.shutdown(socket.SHUT_WR)
