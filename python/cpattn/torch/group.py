# SPDX-License-Identifier: MIT OR Apache-2.0
"""What an adapter of a model or a trainer needs of a group of ranks, beside `Context` and `Batch`.

An adapter changes code that it does not own so that its ranks work on parts of a batch. For this the ranks compare what they were
given before anything moves (`compare`, `digest`, `content`, `same_weights`), tell each other when one of them refuses (`refusing`), add up numbers and
parts of a loss (`Collectives`, `Total`), and read rows of other ranks by a mask (`Reads`, `Gathered`, `Halo`). `cpattn_hf` is built
from these names and the other public ones alone.

Every function here is a call of all ranks of the group, in the same order, except `digest`, `content`, `bands_of` and the types.
"""

from .agree import Total, compare, compare_names, compare_settings, content, digest, digests, refusing
from .dtypes import DTYPES
from .gather import Gathered, Halo, Reads, bands_of
from .gloo import Collectives, Members
from .reads import Runs
from .weights import same_weights

__all__ = [
    "DTYPES",
    "Collectives",
    "Gathered",
    "Halo",
    "Members",
    "Reads",
    "Runs",
    "Total",
    "bands_of",
    "compare",
    "compare_names",
    "compare_settings",
    "content",
    "digest",
    "digests",
    "refusing",
    "same_weights",
]
