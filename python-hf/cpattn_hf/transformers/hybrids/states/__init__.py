# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recurrent layers on each rank's own tokens, with their states passed on."""
