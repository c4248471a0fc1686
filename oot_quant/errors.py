"""Problems that a user can fix. Every class has a stable code; docs/errors.md lists them.

An error says what failed, where, what was found, what is needed and what to do. It crosses
process borders (vLLM's workers), so it pickles by its fields.
"""

from __future__ import annotations

from typing import ClassVar


class OotQuantError(RuntimeError):
    """Base of every error that a user can fix.

    ``RuntimeError`` and not ``ValueError``: pydantic, which vLLM's configuration is built
    on, rewraps value errors and would bury the text.
    """

    code: ClassVar[str] = "oot-quant"

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        found: str = "",
        needed: str = "",
        fix: str = "",
    ) -> None:
        self.what, self.where, self.found, self.needed, self.fix = what, where, found, needed, fix
        lines = [f"{self.code}: {what}"]
        fields = (("where", where), ("found", found), ("needed", needed), ("fix", fix))
        lines += [f"  {name}: {text}" for name, text in fields if text]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        fields = (self.what, self.where, self.found, self.needed, self.fix)
        return (_rebuild, (type(self), fields))


def _rebuild(cls: type[OotQuantError], fields: tuple[str, str, str, str, str]) -> OotQuantError:
    what, where, found, needed, fix = fields
    return cls(what, where=where, found=found, needed=needed, fix=fix)


class ShardMisaligned(OotQuantError):
    """A split over ranks would cut a stored element in two."""

    code = "shard-misaligned"


class CheckpointMissing(OotQuantError):
    """The model's folder, repository or one of its listed files is not there."""

    code = "checkpoint-missing"


class CheckpointUnreadable(OotQuantError):
    """A file of the checkpoint is truncated or is not what its name says."""

    code = "checkpoint-unreadable"


class CheckpointIncomplete(OotQuantError):
    """A quantized weight lacks one of the tensors that belong to it."""

    code = "checkpoint-incomplete"


class CheckpointSurplus(OotQuantError):
    """A tensor belongs to no weight that the method knows."""

    code = "checkpoint-surplus"


class WeightMismatch(OotQuantError):
    """A tensor's shape, size or content does not fit the layer it is for."""

    code = "weight-mismatch"


class ConfigContradiction(OotQuantError):
    """The quantization config says one thing and the stored tensors another."""

    code = "config-contradiction"


class UnknownOption(OotQuantError):
    """The quantization config has an option, or a value, that the method does not know."""

    code = "unknown-option"


class UnsupportedFormat(OotQuantError):
    """The checkpoint uses a format that the method cannot serve."""

    code = "unsupported-format"


class LibraryMissing(OotQuantError):
    """The quantization library is not installed."""

    code = "library-missing"


class LibraryTooOld(OotQuantError):
    """The quantization library is older than the oldest version that works."""

    code = "library-too-old"


class LibraryBroken(OotQuantError):
    """The quantization library is installed but does not work here."""

    code = "library-broken"


class EngineUnsupported(OotQuantError):
    """The installed vLLM is outside the range that this release supports."""

    code = "engine-unsupported"


class RivalPlugin(OotQuantError):
    """Another vLLM plugin claims the same quantization method."""

    code = "rival-plugin"


class BackendFailed(OotQuantError):
    """The backend that serves this method could not be used; the reason was recorded."""

    code = "backend-failed"


def all_errors() -> list[type[OotQuantError]]:
    """Every error class, sorted by code: what docs/errors.md and the tests go through."""
    return sorted(OotQuantError.__subclasses__(), key=lambda cls: cls.code)
