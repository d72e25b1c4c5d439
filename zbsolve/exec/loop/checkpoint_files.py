"""The files of a checkpoint, in the format of torch.distributed.checkpoint: each rank writes its tensors by name, and any
number of ranks reads those that it needs. Reading cannot run code: the index is a pickle in which only the names that torch
writes are allowed, and tensors are loaded with `weights_only`."""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.futures import Future
from torch.serialization import default_restore_location

from ...util.errors import BadInput, one_line
from ..transport.peers import Peers

INDEX_NAMES = {
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # as Python 3.13 writes it
        if name not in INDEX_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is not data")
        return super().find_class(module, name)


class Reader(FileSystemReader):
    """Reads the checkpoint in a folder. names: its tensors, with shapes and dtypes. Raises BadInput where it has none."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self._index: Metadata = _IndexUnpickler(io.BytesIO((path / ".metadata").read_bytes())).load()
            if self._index.storage_meta is None:
                self._index.storage_meta = StorageMeta()
            known = self._index.state_dict_metadata
            self.names = {name: entry for name, entry in known.items() if isinstance(entry, TensorStorageMetadata)}
        except OSError as error:
            raise BadInput(f"{path}: not a checkpoint: {error.strerror}") from None
        except Exception as error:
            raise BadInput(f"{path}: not a checkpoint: {one_line(error)}") from None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index, which was read before."""
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read file by file, so that an error names the file. Raises BadInput."""
        files: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            files.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in files.items():
            try:
                super().read_data(replace(plan, items=items), planner).wait()
            except OSError as error:
                raise BadInput(f"cannot read {name}: {error.strerror or error}") from None
            except Exception as error:
                raise BadInput(f"damaged: {name}: {one_line(error)}") from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def into(self, tensors: Mapping[str, Tensor]) -> None:
        """Read these tensors in place. Raises BadInput naming one that is missing or has another shape."""
        for name, tensor in tensors.items():
            if name not in self.names:
                raise BadInput(f"{self.path}: {name} is missing")
            if self.names[name].size != tensor.shape:
                theirs, ours = tuple(self.names[name].size), tuple(tensor.shape)
                raise BadInput(f"{self.path}: {name} has shape {theirs}, not {ours}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that each rank reads on its own
                load(dict(tensors), storage_reader=self, no_dist=True)
        except CheckpointException as error:
            raise BadInput(f"{self.path}: {_cause(error)[1]}") from None

    def empty(self, name: str, device: torch.device) -> Tensor:
        """A tensor that `into` can read `name` into."""
        entry = self.names[name]
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)


def write(folder: Path, tensors: Mapping[str, Tensor], group: Any, peers: Peers) -> None:
    """Write the tensors of all ranks of `group` into a new folder. A tensor that several ranks hold is written once. Raises
    BadInput on all ranks where one of them cannot write, and RunFailed where one is lost."""
    try:
        with peers.telling("checkpoint"):
            save(dict(tensors), storage_writer=FileSystemWriter(folder), process_group=group)
    except CheckpointException as error:
        shutil.rmtree(folder, ignore_errors=True)
        rank, cause = _cause(error)
        raise BadInput(f"{folder}: cannot write: rank {rank}: {cause}") from None


def replace_folder(new: Path, path: Path) -> None:
    """Rename folder `new` to `path`, which may exist. Raises BadInput; the old folder is then still there, or beside it as
    `.<name>.old`."""
    old = path.with_name(f".{path.name}.old")
    try:
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        new.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise BadInput(f"{path}: cannot write: {error.strerror}") from None


def as_tensor(body: Any, what: str) -> Tensor:
    """Serialize plain values, lists, mappings and tensors: uint8, shape (bytes,). Raises BadInput for anything else."""
    stream = io.BytesIO()
    try:
        torch.save(body, stream)
        torch.load(io.BytesIO(stream.getvalue()), weights_only=True)
    except Exception as error:
        raise BadInput(f"{what}: its state holds more than numbers, words, lists and tensors: {one_line(error)}") from None
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def from_tensor(tensor: Tensor, device: torch.device) -> Any:
    """What `as_tensor` was given. Tensors of any GPU are on `device`: another rank may have saved them."""
    stream, restore = io.BytesIO(tensor.numpy().tobytes()), cast(Any, default_restore_location)
    return torch.load(stream, lambda kept, at: restore(kept, str(device) if "cuda" in at else at), weights_only=True)


def _cause(error: CheckpointException) -> tuple[int, str]:
    """The first rank that failed, and why."""
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return rank, one_line(cause)
