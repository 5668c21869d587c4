// SPDX-License-Identifier: MIT OR Apache-2.0
//! What calls with dropout have of their own, on every device: kernels for `sm_80`, a forward and two for the gradients
//! of each side (`attention` launches them). They draw the mask from the tokens that rows are, so beside the lists of
//! other calls they read the token of the first row of each run.

use crate::call::{Attend, AttendBackward, Dropout, Range, Ranges, RawTensor};
use crate::error::Result;
use crate::kernel::cuda::abi::params::DropoutParams;
use crate::kernel::cuda::abi::shapes::Dropped;
use crate::kernel::cuda::memory::metadata::{self, TileRows};
use crate::kernel::cuda::memory::metadata_writer::{Writer, padded};
use crate::kernel::cuda::modules::Instance;

/// The kernels of these head dims.
pub(in crate::kernel::cuda) fn find(q: &RawTensor, v: &RawTensor) -> Result<(Instance, Dropped)> {
    let instance = Instance::find_dropped(q.dtype, q.dim, v.dim)?;
    Ok((instance, instance.shape().dropped.expect("as found")))
}

/// Rows of the tiles of a forward.
pub(in crate::kernel::cuda) fn forward_tiles(dropped: &Dropped) -> TileRows {
    TileRows { queries: dropped.forward.rows, keys: 0 }
}

/// Rows of the tiles of a backward.
pub(in crate::kernel::cuda) fn backward_tiles(call: &AttendBackward, dropped: &Dropped) -> TileRows {
    TileRows::of(call.gradients, dropped.queries.rows, dropped.keys.rows)
}

/// Bytes of the metadata of a forward.
pub(in crate::kernel::cuda) fn forward_bytes(call: &Attend) -> Result<usize> {
    let (_, dropped) = find(&call.q, &call.v)?;
    Ok(bytes(&call.ranges, forward_tiles(&dropped)))
}

/// Bytes of the metadata of a backward.
pub(in crate::kernel::cuda) fn backward_bytes(call: &AttendBackward) -> Result<usize> {
    let (_, dropped) = find(&call.q, &call.v)?;
    Ok(bytes(&call.ranges, backward_tiles(call, &dropped)))
}

fn bytes(ranges: &Ranges, tiles: TileRows) -> usize {
    metadata::bytes(ranges, tiles) + padded(ranges.q.len() * 4) + padded(ranges.k.len() * 4)
}

/// Writes the tokens of a checked call, and returns what its kernels draw from.
pub(in crate::kernel::cuda) fn write_tokens(
    writer: &mut Writer<'_>,
    ranges: &Ranges,
    dropout: &Dropout<'_>,
) -> DropoutParams {
    let mut tokens = |n, of: &mut dyn Iterator<Item = &Range>, bases: &[i64]| {
        let (list, at) = writer.array::<u32>(n);
        for (out, range) in list.iter_mut().zip(of) {
            // Ranges without rows may be of any document. Tokens fit (`check::dropout`).
            let base = bases.get(range.doc as usize).copied().unwrap_or(0);
            *out = base.wrapping_add(range.pos) as u32;
        }
        at
    };
    DropoutParams {
        q_tokens: tokens(ranges.q.len(), &mut ranges.q.iter().map(|q| &q.range), dropout.q_tokens),
        k_tokens: tokens(ranges.k.len(), &mut ranges.k.iter(), dropout.k_tokens),
        key: dropout.mask.key(),
        last_dropped: dropout.mask.last_dropped(),
        factor: dropout.mask.factor() as f32,
    }
}
