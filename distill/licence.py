"""Under which licence a draft may be given away: its target's, which it was cut from or taught by."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard

from distill.known import BUNDLED

# Names that the hub knows; anything else is "other" with a name of its own.
HUB_NAMES = (
    "apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "openrail",
    "bigscience-openrail-m", "llama2", "llama3", "llama3.1", "llama3.2", "llama3.3", "llama4", "gemma", "mpl-2.0",
)  # fmt: skip
FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "NOTICE", "NOTICE.txt", "USE_POLICY.md")


class NoLicence(ValueError):
    """A licence that is not known, or one that contradicts the target's."""


@dataclass(frozen=True)
class Licence:
    """A licence as the hub's metadata wants it.

    Attributes:
        name: one of HUB_NAMES, or the name that goes with "other".
        source: where it was read.
        files: texts to carry over.
    """

    name: str
    source: str
    files: tuple[Path, ...] = ()

    def metadata(self) -> dict[str, str]:
        """The keys of a model card's header."""
        return {"license": self.name} if self.name in HUB_NAMES else {"license": "other", "license_name": self.name}


def licence_of(target: str, folder: Path, given: str | None = None) -> Licence:
    """The licence of a target.

    Args:
        target: its name in the recipe.
        folder: its checkpoint.
        given: what the user says; needed where neither the project nor the target's files say it.

    Raises:
        NoLicence: nobody says it, or `given` is another than the target's.
    """
    files = tuple(folder / name for name in FILES if (folder / name).is_file())
    found = _stated(target, folder, files)
    if found is None:
        if given is None:
            raise NoLicence(
                f"the licence of {target} is unknown: neither README.md nor a LICENSE file in {folder} names it; "
                "look it up and give it with --licence NAME"
            )
        return Licence(_plain(given), "given with --licence", files)
    if given is not None and _plain(given) != found.name:
        raise NoLicence(f"--licence {given}: {target} is under {found.name} ({found.source}), which its draft keeps")
    return found


def _stated(target: str, folder: Path, files: tuple[Path, ...]) -> Licence | None:
    """The project's own knowledge, then the model card's header, then the text of a licence file."""
    if target in BUNDLED:
        return Licence(_plain(BUNDLED[target].license), "bundled with the project", files)
    if (folder / "README.md").is_file():
        data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
        name = data.get("license")
        name = data.get("license_name") if name == "other" else name
        if isinstance(name, str) and name != "unknown":
            return Licence(_plain(name), "the target's README.md", files)
    for path in files:
        head = path.read_text(encoding="utf-8", errors="replace")[:400]
        for pattern, name in ((r"Apache License\s+Version 2\.0", "apache-2.0"), (r"^\s*(The )?MIT License", "mit")):
            if re.search(pattern, head):
                return Licence(name, f"the target's {path.name}", files)
    return None


def _plain(name: str) -> str:
    return name.strip().lower().replace(" ", "-")
