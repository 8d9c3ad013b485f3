"""The base model that a server trains and samples, and the names that clients may give it."""

from dataclasses import dataclass
from pathlib import Path

from viva.serve.bodies import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModelNames:
    """The only base model of a server."""

    model: str
    """As the engine knows it."""
    names: tuple[str, ...]
    """Further names."""

    def check(self, name: str) -> None:
        """Refuse another model.

        Raises:
            RequestError: If it is one (404).
        """
        known = (self.model, *self.names)
        if name not in known and Path(name).resolve() != Path(self.model).resolve():
            raise RequestError(
                f"model {name[:200]!r} is not served here; served: {', '.join(dict.fromkeys(known))}",
                status=404,
            )
