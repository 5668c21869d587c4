// SPDX-License-Identifier: MIT OR Apache-2.0
//! Forward and backward attention: from a call to one launch per kernel.

use crate::call::{Attend, AttendBackward, Gradients, HeadMap, RawTensor};
use crate::element::Dtype;
use crate::error::{Error, Result};
use crate::kernel::cuda::abi::params::{
    BackwardParams, DroppedBackwardParams, DroppedForwardParams, ForwardParams, HeadParams, PagedForwardParams,
    SCORE_GENERAL, SCORE_SOFTCAP, ScoreParams, Tensor,
};
use crate::kernel::cuda::launch::check::{self, Checker, TensorSpec};
use crate::kernel::cuda::launch::recorded::LaunchRecorder;
use crate::kernel::cuda::launch::{Launch, Launches, items};
use crate::kernel::cuda::memory::metadata::{self, Metadata, TileRows};
use crate::kernel::cuda::modules::{AttentionModule, Instance};
use crate::kernel::cuda::{Cuda, hopper::clusters, hopper::hopper_calls, launch::dropped, launch::paged};
use alloc::format;
use core::f64::consts::LOG2_E;

impl Cuda {
    /// The most bytes of metadata of [`Cuda::attend_launches`]. The call may be one that will be refused.
    pub(in crate::kernel::cuda) fn attend_bytes(&self, call: &Attend) -> Result<usize> {
        if call.dropout.is_some() {
            return dropped::forward_bytes(call);
        }
        let instance = Instance::find(call.q.dtype, call.q.dim, call.v.dim)?;
        let (at, rows) = (instance.index, instance.shape().forward.rows);
        let other = if self.hopper_shape(at).is_some() { hopper_calls::work_bytes(call, at, rows) } else { 0 };
        let tiles = TileRows { queries: rows, keys: 0 };
        Ok(metadata::bytes(&call.ranges, tiles) + other)
    }

    /// The most bytes of metadata and words of [`Cuda::attend_backward_launches`].
    pub(in crate::kernel::cuda) fn attend_backward_bytes(&self, call: &AttendBackward) -> Result<usize> {
        if call.dropout.is_some() {
            return dropped::backward_bytes(call);
        }
        let instance = Instance::find(call.q.dtype, call.q.dim, call.v.dim)?;
        Ok(match self.fused(instance.shape()).filter(|_| call.gradients == Gradients::All) {
            Some(fused) => self.fused_bytes(call, instance.index, fused),
            None => metadata::bytes(&call.ranges, backward_tiles(call.gradients, instance.shape())),
        })
    }

    /// The launches of a forward, their metadata written into `recorder`.
    pub(crate) fn attend_launches(&self, call: &Attend<'_>, recorder: &mut LaunchRecorder) -> Result<Launches> {
        let instance = Instance::find(call.q.dtype, call.q.dim, call.v.dim)?;
        let (shape, s) = (instance.index, instance.shape());
        refuse_aligned(call.aligned)?;
        check::dropout(&call.dropout, &call.ranges)?;
        check::one_row_of_slopes(call.alibi_slopes.tokens)?;
        let checker = recorder.checker(self);
        let inputs = Inputs::check(checker, &call.q, &call.k, &call.v, &call.heads)?;
        let window = check::score(&call.score)?;
        check::ranges(&call.ranges, call.q.tokens, call.k.tokens.min(call.v.tokens), !call.alibi_slopes.is_none())?;
        call.ranges.one_writer(true, false)?;
        let q_heads = call.q.heads;
        let f32s = TensorSpec { heads: q_heads, dim: 1, dtype: Dtype::F32, align: 4 };
        let running = TensorSpec { heads: q_heads, dim: call.v.dim, dtype: Dtype::F32, align: 16 };
        let o = TensorSpec { dtype: call.q.dtype, ..running };
        let running_lse = TensorSpec { dim: lse_words(&call.running_lse), ..f32s };
        let (mut needs_running, mut needs_o) = (false, false);
        for q in call.ranges.q.iter().filter(|q| q.range.len > 0) {
            needs_running |= q.mode.continues() || !q.mode.finishes();
            needs_o |= q.mode.finishes();
        }
        let mut params = ForwardParams {
            q: inputs.q,
            k: inputs.k,
            v: inputs.v,
            running: require(needs_running, checker, "running", &call.running, running)?,
            running_lse: require(needs_running, checker, "running_lse", &call.running_lse, running_lse)?,
            o: require(needs_o, checker, "o", &call.o, o)?,
            lse: require(needs_o, checker, "lse", &call.lse, f32s)?,
            alibi_slopes: checker.per_head("alibi_slopes", &call.alibi_slopes, q_heads)?,
            sinks: checker.sinks(&call.sinks, q_heads)?,
            max_logit: checker.per_head("max_logit", &call.max_logit, q_heads)?,
            queries: 0,
            keys: 0,
            partners: 0,
            bands: 0,
            work: 0,
            score: score(&call.score, !call.alibi_slopes.is_none()),
            heads: inputs.heads,
            running_lse_words: running_lse.dim,
            sink_count: if call.sinks.is_none() { 0 } else { call.sinks.dim },
        };
        let of_queries =
            [("running", &call.running), ("running_lse", &call.running_lse), ("o", &call.o), ("lse", &call.lse)];
        for (name, t) in of_queries {
            rows_fit(name, t, call.q.tokens, call.ranges.q.iter().map(|q| &q.range))?;
        }

        let dropout = match &call.dropout {
            Some(dropout) => Some((dropout, dropped::find(&call.q, &call.v)?)),
            None => None,
        };
        let pages = match recorder.pages() {
            Some(held) => Some((held, dropped::find(&call.q, &call.v)?)),
            None => None,
        };
        // A call without keys only finishes merged results; there are no keys for a tensor map to describe.
        let has_map = dropout.is_none() && pages.is_none() && !call.ranges.k.is_empty();
        let hopper = match self.hopper_shape(shape).filter(|_| has_map) {
            Some(_) => {
                let cluster = match self.has_clusters(shape) && clusters::are_pairs(call) {
                    true => Some(self.load(AttentionModule::HopperCluster, instance)?),
                    false => None,
                };
                Some((self.load(AttentionModule::HopperForward, instance)?, cluster))
            }
            None => None,
        };
        let tiles = match (&dropout, &pages) {
            (Some((_, (_, kernels))), _) | (None, Some((_, (_, kernels)))) => dropped::forward_tiles(kernels),
            (None, None) => TileRows { queries: s.forward.rows, keys: 0 },
        };
        let tile_counter = if hopper.is_some() { recorder.counter()? } else { 0 };
        let bytes = if pages.is_some() { paged::forward_bytes(call) } else { self.attend_bytes(call) }?;
        let (mut writer, scratch) = recorder.begin(bytes)?;
        let metadata = metadata::write(scratch, &mut writer, &call.ranges, tiles, window);
        params.heads.items = items(metadata.query_tiles, q_heads)?;
        if params.heads.items == 0 {
            return Ok(Launches::default());
        }
        (params.queries, params.keys) = (metadata.queries, metadata.keys);
        (params.partners, params.bands) = (metadata.keys_of, metadata.query_bands);
        params.work = metadata.query_work;
        let launch = match (hopper, dropout, pages) {
            (_, _, Some((held, (instance, _)))) => {
                let kernel = self.load(AttentionModule::PagedForward, instance)?;
                let pages = paged::write_runs(&mut writer, &call.ranges, &held);
                Launch::tiles(kernel, params.heads.items, false, &PagedForwardParams { call: params, pages })
            }
            (_, Some((dropout, (instance, _))), None) => {
                let kernel = self.load(AttentionModule::DroppedForward, instance)?;
                let dropout = dropped::write_tokens(&mut writer, &call.ranges, dropout);
                Launch::tiles(kernel, params.heads.items, false, &DroppedForwardParams { call: params, dropout })
            }
            (None, None, None) => {
                let kernel = self.load(AttentionModule::Forward, instance)?;
                Launch::tiles(kernel, params.heads.items, false, &params)
            }
            (Some(hopper), None, None) => {
                let same = (metadata.query_work, metadata.query_tiles, s.forward.rows);
                let bands = metadata.of_queries;
                let split = hopper_calls::split(call, shape, same, scratch, &mut writer, bands);
                let (params, hopper) = self.hopper_params(call, hopper, instance, params, split, tile_counter);
                Launch::hopper_or_other(hopper, &params)
            }
        };
        Ok(Launches::one(writer.part(), Some(launch)))
    }

    /// The launches of a backward, their metadata written into `recorder`.
    pub(crate) fn attend_backward_launches(
        &self,
        call: &AttendBackward<'_>,
        recorder: &mut LaunchRecorder,
    ) -> Result<Launches> {
        let instance = Instance::find(call.q.dtype, call.q.dim, call.v.dim)?;
        let s = instance.shape();
        refuse_aligned(call.aligned)?;
        check::dropout(&call.dropout, &call.ranges)?;
        check::one_row_of_slopes(call.alibi_slopes.tokens)?;
        let checker = recorder.checker(self);
        let inputs = Inputs::check(checker, &call.q, &call.k, &call.v, &call.heads)?;
        let window = check::score(&call.score)?;
        check::ranges(&call.ranges, call.q.tokens, call.k.tokens.min(call.v.tokens), !call.alibi_slopes.is_none())?;
        call.ranges.one_writer(call.gradients != Gradients::Keys, call.gradients != Gradients::Queries)?;
        let f32s = TensorSpec { heads: call.q.heads, dim: 1, dtype: Dtype::F32, align: 4 };
        let dq = TensorSpec { heads: call.q.heads, dim: call.q.dim, dtype: Dtype::F32, align: 16 };
        let key_heads = if call.per_q_head { call.q.heads } else { call.k.heads };
        let dk = TensorSpec { heads: key_heads, ..dq };
        let dv = TensorSpec { dim: call.v.dim, ..dk };
        let d_o = TensorSpec { dim: call.v.dim, dtype: call.q.dtype, ..dq };
        let wants_queries = call.gradients != Gradients::Keys && call.ranges.q.iter().any(|q| q.range.len > 0);
        let wants_keys = call.gradients != Gradients::Queries && call.ranges.k.iter().any(|k| k.len > 0);
        let reads = wants_queries || call.ranges.q.iter().any(|q| q.range.len > 0);
        let mut params = BackwardParams {
            q: inputs.q,
            k: inputs.k,
            v: inputs.v,
            d_o: require(reads, checker, "d_o", &call.d_o, d_o)?,
            lse: require(reads, checker, "lse", &call.lse, f32s)?,
            delta: require(reads, checker, "delta", &call.delta, f32s)?,
            dq: require(wants_queries, checker, "dq", &call.dq, dq)?,
            dk: require(wants_keys, checker, "dk", &call.dk, dk)?,
            dv: require(wants_keys, checker, "dv", &call.dv, dv)?,
            alibi_slopes: checker.per_head("alibi_slopes", &call.alibi_slopes, call.q.heads)?,
            queries: 0,
            keys: 0,
            partners: 0,
            bands: 0,
            work: 0,
            score: score(&call.score, !call.alibi_slopes.is_none()),
            heads: inputs.heads,
            per_q_head: u32::from(call.per_q_head),
            accumulate: u32::from(call.accumulate_keys),
        };
        let of_queries = [("d_o", &call.d_o), ("lse", &call.lse), ("delta", &call.delta), ("dq", &call.dq)];
        for (name, t) in of_queries {
            rows_fit(name, t, call.q.tokens, call.ranges.q.iter().map(|q| &q.range))?;
        }
        for (name, t) in [("dk", &call.dk), ("dv", &call.dv)] {
            rows_fit(name, t, call.k.tokens, call.ranges.k.iter())?;
        }

        let fused = self.fused(s).filter(|_| call.gradients == Gradients::All && call.dropout.is_none());
        if let Some(fused) = fused {
            return self.fused_launches(call, instance, fused, params, window, recorder);
        }
        let (module, instance, tiles) = match &call.dropout {
            Some(_) => {
                let (instance, kernels) = dropped::find(&call.q, &call.v)?;
                (AttentionModule::DroppedSides, instance, dropped::backward_tiles(call, &kernels))
            }
            None => (AttentionModule::Sides, instance, backward_tiles(call.gradients, s)),
        };
        let [queries, keys, values] = self.load_all(module, instance)?;
        let (mut writer, scratch) = recorder.begin(self.attend_backward_bytes(call)?)?;
        let Metadata {
            query_tiles,
            key_tiles,
            keys_of,
            queries_of,
            query_bands,
            key_bands,
            of_queries: _,
            query_work,
            key_work,
            queries: q_runs,
            keys: k_runs,
        } = metadata::write(scratch, &mut writer, &call.ranges, tiles, window);
        let (query_items, key_items) = (items(query_tiles, call.q.heads)?, items(key_tiles, key_heads)?);
        (params.queries, params.keys) = (q_runs, k_runs);
        let of_queries = (keys_of, query_bands, query_work, query_items);
        let of_keys = (queries_of, key_bands, key_work, key_items);
        let dropout = call.dropout.as_ref().map(|dropout| dropped::write_tokens(&mut writer, &call.ranges, dropout));
        let list = [(queries, of_queries), (keys, of_keys), (values, of_keys)].map(|(kernel, of)| {
            (params.partners, params.bands, params.work, params.heads.items) = of;
            kernel.filter(|_| of.3 > 0).map(|kernel| match dropout {
                Some(dropout) => Launch::tiles(kernel, of.3, false, &DroppedBackwardParams { call: params, dropout }),
                None => Launch::tiles(kernel, of.3, false, &params),
            })
        });
        Ok(Launches { part: writer.part(), list })
    }
}

fn backward_tiles(gradients: Gradients, shape: &crate::kernel::cuda::Shape) -> TileRows {
    TileRows::of(gradients, shape.queries.rows, shape.keys.rows)
}

/// Words of a running lse: see [`Attend::running_lse`].
pub(in crate::kernel::cuda) fn lse_words(t: &RawTensor) -> u32 {
    if t.dim == 1 { 1 } else { 2 }
}

fn refuse_aligned(aligned: bool) -> Result<()> {
    if aligned {
        return Err(Error::unsupported(
            "aligned key tiles",
            "the CUDA kernels break tiles where a range begins",
            "plan without the same bits for any rank count, or use the CPU kernels",
        ));
    }
    Ok(())
}

fn require(needed: bool, checker: Checker, name: &str, t: &RawTensor, expected: TensorSpec) -> Result<Tensor> {
    if needed && t.is_none() {
        return Err(Error::invalid(name, "none", "a tensor: a mode or gradient of this call needs it"));
    }
    checker.optional(name, t, expected)
}

/// Checks the rows of ranges below `tokens` in a tensor, which may have fewer.
fn rows_fit<'a>(
    name: &str,
    t: &RawTensor,
    tokens: u64,
    ranges: impl Iterator<Item = &'a crate::call::Range>,
) -> Result<()> {
    if t.is_none() || t.tokens >= tokens {
        return Ok(());
    }
    for r in ranges.filter(|r| r.len > 0) {
        let end = r.row + i64::from(r.len);
        if end as u64 > t.tokens {
            return Err(Error::invalid(format!("{name}.tokens"), t.tokens, format!("at least {end}")));
        }
    }
    Ok(())
}

fn score(s: &crate::call::Score, slopes: bool) -> ScoreParams {
    let capped = s.softcap > 0.0;
    let scale_log2 = s.scale * LOG2_E;
    // The plain score multiplies a masked -inf by the scale, so the scale must not round to 0 in f32.
    let general = capped || slopes || scale_log2 < f64::from(f32::MIN_POSITIVE);
    ScoreParams {
        exp_scale: if general { 1.0 } else { scale_log2 as f32 },
        scale_log2: scale_log2 as f32,
        cap_in: if capped { (2.0 * scale_log2 / s.softcap) as f32 } else { 0.0 },
        cap_log2: (s.softcap * LOG2_E) as f32,
        scale: s.scale as f32,
        flags: if general { SCORE_GENERAL } else { 0 } | if capped { SCORE_SOFTCAP } else { 0 },
    }
}

/// The checked inputs that forward and backward share.
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    heads: HeadParams,
}

impl Inputs {
    fn check(checker: Checker, q: &RawTensor, k: &RawTensor, v: &RawTensor, map: &HeadMap) -> Result<Self> {
        check::heads(map, q.heads, k.heads)?;
        let of_q = TensorSpec { heads: q.heads, dim: q.dim, dtype: q.dtype, align: 16 };
        let of_k = TensorSpec { heads: k.heads, ..of_q };
        Ok(Self {
            q: checker.needed("q", q, of_q)?,
            k: checker.needed("k", k, of_k)?,
            v: checker.needed("v", v, TensorSpec { dim: v.dim, ..of_k })?,
            heads: HeadParams {
                q_heads: q.heads,
                kv_heads: k.heads,
                q_offset: map.q_offset,
                kv_offset: map.kv_offset,
                group: map.group,
                dim: q.dim,
                value: v.dim,
                items: 0,
            },
        })
    }
}
