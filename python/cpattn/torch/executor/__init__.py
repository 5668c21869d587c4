# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs plans with PyTorch alone: its operators, its communicator, and a kernel of `cpattn.torch.kernels`. The library only plans.

Data flows one way: `rows` and `partials` (tables, and the numbers in them), then `moves`, `attention` and `messages` (one class for
each kind of operation of a schedule), then `program` (a schedule as steps on streams), then `rank` (a rank that runs plans). `explain` lists the calls.
"""

from .explain import explain
from .messages import Network
from .rank import Executor

__all__ = ["Executor", "Network", "explain"]
