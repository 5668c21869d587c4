// SPDX-License-Identifier: MIT OR Apache-2.0
//! The launches of calls with dropout, on every device by kernels of their own for `sm_80`: a forward, and two for the
//! gradients of each side. They draw the mask from the tokens that rows are, so beside the lists of other calls they
//! read the token of the first row of each run.

use super::Cuda;
use super::launch::{Launch, Launches, items};
use super::metadata::{self, Metadata, TileRows};
use super::metadata_buffer::{MetadataBuffer, Writer, padded};
use super::modules::{AttentionModule, Instance};
use super::params::{BackwardParams, DropoutParams, DroppedBackwardParams, DroppedForwardParams, ForwardParams};
use super::shapes::Dropped;
use crate::call::{Attend, AttendBackward, Dropout, Range, Ranges, RawTensor};
use crate::error::Result;

/// The kernels of these head dims.
fn find(q: &RawTensor, v: &RawTensor) -> Result<(Instance, Dropped)> {
    let instance = Instance::find_dropped(q.dtype, q.dim, v.dim)?;
    Ok((instance, instance.shape().dropped.expect("as found")))
}

fn forward_tiles(dropped: &Dropped) -> TileRows {
    TileRows { queries: dropped.forward.rows, keys: 0 }
}

fn backward_tiles(call: &AttendBackward, dropped: &Dropped) -> TileRows {
    TileRows::of(call.gradients, dropped.queries.rows, dropped.keys.rows)
}

/// Bytes of the metadata of a forward.
pub(super) fn forward_bytes(call: &Attend) -> Result<usize> {
    let (_, dropped) = find(&call.q, &call.v)?;
    Ok(bytes(&call.ranges, forward_tiles(&dropped)))
}

/// Bytes of the metadata of a backward.
pub(super) fn backward_bytes(call: &AttendBackward) -> Result<usize> {
    let (_, dropped) = find(&call.q, &call.v)?;
    Ok(bytes(&call.ranges, backward_tiles(call, &dropped)))
}

fn bytes(ranges: &Ranges, tiles: TileRows) -> usize {
    metadata::bytes(ranges, tiles) + padded(ranges.q.len() * 4) + padded(ranges.k.len() * 4)
}

/// Writes the tokens of a checked call, and returns what its kernels draw from.
fn write_dropout(writer: &mut Writer<'_>, ranges: &Ranges, dropout: &Dropout<'_>) -> DropoutParams {
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

impl Cuda {
    /// The launch of a checked forward; `params` have no metadata yet.
    pub(super) fn dropped_forward(
        &self,
        call: &Attend,
        dropout: &Dropout<'_>,
        mut params: ForwardParams,
        window: (i64, i64),
        buffer: &mut impl MetadataBuffer,
    ) -> Result<Launches> {
        let (instance, dropped) = find(&call.q, &call.v)?;
        let kernel = self.load(AttentionModule::DroppedForward, instance)?;
        let (mut writer, scratch) = buffer.begin(forward_bytes(call)?)?;
        let metadata = metadata::write(scratch, &mut writer, &call.ranges, forward_tiles(&dropped), window);
        params.heads.items = items(metadata.query_tiles, call.q.heads)?;
        if params.heads.items == 0 {
            return Ok(Launches::default());
        }
        (params.queries, params.keys) = (metadata.queries, metadata.keys);
        (params.partners, params.bands, params.work) = (metadata.keys_of, metadata.query_bands, metadata.query_work);
        let dropout = write_dropout(&mut writer, &call.ranges, dropout);
        let params = DroppedForwardParams { call: params, dropout };
        let launch = Launch::tiles(kernel, params.call.heads.items, false, &params);
        Ok(Launches::one(writer.part(), Some(launch)))
    }

    /// The launches of a checked backward; `params` have no metadata yet.
    pub(super) fn dropped_backward(
        &self,
        call: &AttendBackward,
        dropout: &Dropout<'_>,
        mut params: BackwardParams,
        window: (i64, i64),
        buffer: &mut impl MetadataBuffer,
    ) -> Result<Launches> {
        let (instance, dropped) = find(&call.q, &call.v)?;
        let [queries, keys, _] = self.load_all(AttentionModule::DroppedSides, instance)?;
        let (mut writer, scratch) = buffer.begin(backward_bytes(call)?)?;
        let tiles = backward_tiles(call, &dropped);
        let Metadata {
            query_tiles, key_tiles, keys_of, queries_of, query_bands, key_bands, query_work, key_work, ..
        } = {
            let metadata = metadata::write(scratch, &mut writer, &call.ranges, tiles, window);
            (params.queries, params.keys) = (metadata.queries, metadata.keys);
            metadata
        };
        let dropout = write_dropout(&mut writer, &call.ranges, dropout);
        let key_heads = if call.per_q_head { call.q.heads } else { call.k.heads };
        let of_queries = (keys_of, query_bands, query_work, items(query_tiles, call.q.heads)?);
        let of_keys = (queries_of, key_bands, key_work, items(key_tiles, key_heads)?);
        let list = [(queries, of_queries), (keys, of_keys), (None, of_keys)].map(|(kernel, of)| {
            (params.partners, params.bands, params.work, params.heads.items) = of;
            let params = DroppedBackwardParams { call: params, dropout };
            kernel.filter(|_| of.3 > 0).map(|kernel| Launch::tiles(kernel, of.3, false, &params))
        });
        Ok(Launches { part: writer.part(), list })
    }
}
