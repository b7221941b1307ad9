"""The small classifiers of the attacks' tests."""

from tests.attacks.conftest import images, small_net, victim

__all__ = ["images", "small_net", "victim"]
