# SPDX-License-Identifier: MIT OR Apache-2.0
"""cpattn: exact context-parallel attention, over the C interface (`include/cpattn.h`).

A `Plan` says what is computed and which rank holds which tokens. A `Rank` runs plans on tensors of NumPy, PyTorch, JAX or any
other library with DLPack. A `Transport` is your own communicator. `cpattn.torch` is for PyTorch, `cpattn.jax` for JAX.
"""

from . import _header, schedule, slices
from ._header import UNLIMITED
from ._library import library_features, library_version
from .dropout import dropout_mask
from .engine import Engine, EngineTransport
from .errors import (
    Busy,
    DeviceError,
    Disagreement,
    Error,
    InvalidArgument,
    InvalidHandle,
    LibraryDefect,
    LibraryError,
    PeerError,
    ScheduleError,
    Unsupported,
    WrongCall,
)
from .groups import plan_groups
from .options import (
    AllToAll,
    Circulate,
    CombineTo,
    Direction,
    Dtype,
    Gather,
    KeyRows,
    Kind,
    Layout,
    LseBase,
    PlanOptions,
    ScanForm,
    Side,
    Wire,
    ranks_per_node,
)
from .plan import Plan
from .rank import Isa, Rank, check_ring, local_group, nccl_group, nccl_unique_id, on_all, peer_group
from .ring import Link
from .slices import Slice
from .tensors import Array, Memory, SupportsDLPack
from .trace import Event, chrome_trace, clock, timeline_svg
from .transport import FAILED_BEFORE, RAISED, Message, Transport

# Of this package; the library's is `library_version()`.
__version__ = f"{_header.VERSION_MAJOR}.{_header.VERSION_MINOR}.{_header.VERSION_PATCH}"

__all__ = [
    "FAILED_BEFORE",
    "RAISED",
    "UNLIMITED",
    "AllToAll",
    "CombineTo",
    "Array",
    "Busy",
    "Circulate",
    "DeviceError",
    "Direction",
    "Disagreement",
    "Engine",
    "EngineTransport",
    "Dtype",
    "Error",
    "Event",
    "Gather",
    "KeyRows",
    "InvalidArgument",
    "InvalidHandle",
    "Isa",
    "Kind",
    "Layout",
    "LibraryDefect",
    "LibraryError",
    "Link",
    "LseBase",
    "Memory",
    "Message",
    "PeerError",
    "Plan",
    "PlanOptions",
    "Rank",
    "ScanForm",
    "ScheduleError",
    "Side",
    "Slice",
    "SupportsDLPack",
    "Transport",
    "Unsupported",
    "Wire",
    "WrongCall",
    "check_ring",
    "chrome_trace",
    "clock",
    "dropout_mask",
    "library_features",
    "library_version",
    "local_group",
    "nccl_group",
    "nccl_unique_id",
    "on_all",
    "peer_group",
    "plan_groups",
    "ranks_per_node",
    "schedule",
    "slices",
    "timeline_svg",
]
