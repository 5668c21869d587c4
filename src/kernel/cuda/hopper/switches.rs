// SPDX-License-Identifier: MIT OR Apache-2.0
//! Switches of the kernels for `sm_90a` that the host follows: alternatives of `ptx/HARDWARE.md` whose tensor maps or
//! tiles are not those of the embedded kernels.

use crate::kernel::cuda::replaced::switched;
use std::sync::OnceLock;

/// Whether the kernels in use were compiled with each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Switches {
    /// `WRAPPED_MAPS`: maps begin at the tensor and have a fifth dimension.
    pub wrapped_maps: bool,
    /// `SMALL_TILES`: 64 keys to a tile at head dims 192 and 256.
    pub small_tiles: bool,
}

/// Those of the kernels in use. They are read once: kernels hold for all devices of the program.
pub(super) fn switches() -> Switches {
    static READ: OnceLock<Switches> = OnceLock::new();
    *READ.get_or_init(|| Switches { wrapped_maps: switched("WRAPPED_MAPS"), small_tiles: switched("SMALL_TILES") })
}
