// SPDX-License-Identifier: MIT OR Apache-2.0
//! What the host and the kernels agree on: parameters, shapes of tiles, and symbols for addresses.

pub(crate) mod base_addresses;
pub(super) mod params;
pub(super) mod shapes;
