"""The error tree, with one root to catch; each message says what is wrong, the value and the next step."""


class MixedNutsError(Exception):
    """Root of every error that this package raises on purpose."""


class InvalidInputError(MixedNutsError, ValueError):
    """An argument of a public function is outside its domain (NaN logits, K = 1, beta = 98.5)."""


class ConfigError(MixedNutsError):
    """The configuration file or an override cannot be used as written."""


class ThreatModelError(InvalidInputError):
    """The norm or the radius of a threat model is not usable."""


class DatasetError(MixedNutsError):
    """A dataset URI cannot be resolved to images."""


class BaseClassifierError(MixedNutsError):
    """A base classifier URI cannot be resolved, or what it resolves to is not a classifier in our sense."""


class StoreError(MixedNutsError):
    """The storage refused, or an address points outside of it."""


class FingerprintMismatch(StoreError):
    """A stored file belongs to another run, another schema version or other weights, or it is damaged."""


class NewerSchema(FingerprintMismatch):
    """A stored file is of a release that this one does not know; nothing of it is read or changed."""


class DamagedFile(FingerprintMismatch):
    """A stored file is not what was written. Whoever reads it leaves it alone; the stage that computes it again sets it
    aside under another name.

    Args:
        message: what is wrong.
        path: the file's, in the run's folder.
    """

    def __init__(self, message: str, path: str = "") -> None:
        super().__init__(message)
        self.path = path


class MissingArtifact(MixedNutsError):
    """A stage was asked for whose input an earlier stage has not written yet."""


class PartitionFailed(MixedNutsError):
    """At least one partition failed all of its tries; every other partition was finished first."""


class ClusterError(MixedNutsError):
    """Ray cannot be reached, or its workers cannot start."""
