# SPDX-License-Identifier: MIT OR Apache-2.0
"""Stand-ins for kernels that need a GPU: they have the signatures of the packages, check what they are given, and compute by `plain`."""
