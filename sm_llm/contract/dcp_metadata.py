"""The names that the metadata of a distributed checkpoint of torch refers to; a pickle of it may hold no others."""

from __future__ import annotations

METADATA_MODULE = "torch.distributed.checkpoint.metadata"
CLASSES = frozenset(
    {
        *((METADATA_MODULE, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties")),
        *((METADATA_MODULE, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("collections", "OrderedDict"),
    }
)
"""What is made of a save's tensors (torch 2.5 to 2.13)."""
FUNCTIONS = frozenset(
    {
        ("torch.serialization", "_get_layout"),  # looks a name up in a table
        (METADATA_MODULE, "_MEM_FORMAT_ENCODING"),
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
    }
)
"""What is called for a value."""
SIZE = ("torch", "Size")
DTYPES = frozenset(
    {
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
        "uint8", "bool",
    }
)  # fmt: skip
"""Data types, by their names in ``torch``."""
