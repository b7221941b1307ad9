"""Ports for the servers that tests start."""

import random
import socket

_RANGE = range(20_000, 32_000)  # below the ports that systems hand out by themselves, above those of Ray's workers


def free_ports(n: int) -> list[int]:
    """Ports on loopback that nobody listens on, all different; nobody gets one of them without asking for it."""
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
