"""Ports for the servers that tests start."""

import random
import socket

_RANGE = range(20_000, 32_000)  # below the ephemeral ports, above those of Ray's workers


def free_ports(n: int) -> list[int]:
    """Return distinct free ports on loopback, outside the range that systems assign."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_RANGE, len(_RANGE)):
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == n:
            break
    return found
