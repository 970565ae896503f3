"""Work that outlives an interruption: finished parts as files in a folder, where a second run of the same work looks."""

import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
import safetensors
import safetensors.torch
from torch import Tensor
from tqdm import tqdm  # type: ignore[import-untyped]

from csa2.errors import CalibrationError

_WORK = "work.json"


class UnfinishedWork:
    """Parts of one piece of work, each a set of named tensors, written whole or not at all."""

    def __init__(self, folder: Path, work: msgspec.Struct) -> None:
        """Open `folder`, made if need be. What is in it from other work is removed, which is said on the error stream.

        Args:
            work: everything that the parts depend on.

        Raises:
            CalibrationError: the folder cannot be written.
        """
        self.folder = folder
        wanted = msgspec.json.encode(work, order="sorted")
        try:
            found = (folder / _WORK).read_bytes() if (folder / _WORK).exists() else None
            if found is not None and found != wanted:
                tqdm.write(f"csa2 calibrate: {folder} is of other text, model or options: starting again", file=sys.stderr)
            if found != wanted and folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True, exist_ok=True)
            self._replace(_WORK, wanted)
        except OSError as error:
            raise CalibrationError(f"{folder} cannot be written: {error}") from error

    def has(self, part: str) -> bool:
        """Whether the part is finished."""
        return self._path(part).exists()

    def save(self, part: str, tensors: dict[str, Tensor]) -> None:
        """Write a finished part.

        Raises:
            CalibrationError: it cannot be written.
        """
        try:
            self._replace(self._path(part).name, safetensors.torch.save(tensors))
        except OSError as error:
            raise CalibrationError(f"{self._path(part)} cannot be written: {error}") from error

    def load(self, part: str, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Tensors of a finished part; only those called `names`, if given.

        Raises:
            CalibrationError: it cannot be read.
        """
        try:
            with safetensors.safe_open(self._path(part), framework="pt") as file:
                return {name: file.get_tensor(name) for name in (file.keys() if names is None else names)}
        except (OSError, safetensors.SafetensorError) as error:
            raise CalibrationError(
                f"{self._path(part)} cannot be read ({error}): remove {self.folder} and start again"
            ) from error

    def _path(self, part: str) -> Path:
        return self.folder / f"{part}.safetensors"

    def _replace(self, name: str, data: bytes) -> None:
        partial = self.folder / f"{name}.partial"
        partial.write_bytes(data)
        os.replace(partial, self.folder / name)
