"""Throttled, broken and silent connections in front of a real server, as many as asked for; then it steps aside."""

import contextlib
import socket
import struct
import threading
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
