// SPDX-License-Identifier: MIT OR Apache-2.0
//! Problem × options → plan, and what can be asked of a plan.

use core::ffi::c_char;
use std::format;

use super::{
    handle::{self, Handle, HandleKind},
    input::{array, array_mut, flag, one_of, reserved, result, sized, versioned, write_sized},
    status::boundary,
};
use crate::{
    batch::{Batch, Side},
    element::Dtype,
    error::{Error, Result},
    layout::Layout,
    mask::Mask,
    mesh::Mesh,
    plan::{self, Circulate, Options, Plan, Problem, Wire},
    schedule::{AllToAll, Direction, Schedule, Way},
};

/// For windows: no limit.
const UNLIMITED: i64 = i64::MAX;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_problem {
    pub struct_size: usize,
    pub cu_seqlens_q: *const i32,
    pub cu_seqlens_k: *const i32,
    pub q_start: *const i64,
    pub documents: usize,
    pub heads: u32,
    pub kv_heads: u32,
    pub head_dim: u32,
    pub value_dim: u32,
    pub dtype: i32,
    pub kind: i32,
    pub window_left: i64,
    pub window_right: i64,
    pub scale: f64,
    pub softcap: f64,
    pub alibi_slopes: *const f32,
    pub sinks: i32,
    pub reserved: i32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_options {
    pub struct_size: usize,
    pub world: u32,
    pub ulysses: u32,
    pub ring: u32,
    pub layout: i32,
    pub layout_parameter: u32,
    pub passes: u32,
    pub circulate: i32,
    pub wire: i32,
    pub gather: i32,
    pub reproducible: i32,
    pub pack_inputs: i32,
    pub reserved: i32,
}

pub type cpattn_plan = Handle<Plan>;

impl HandleKind for Plan {
    const NAME: &'static str = "plan";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatPLAN");
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_plan_info {
    pub struct_size: usize,
    pub replicas: u32,
    pub ring: u32,
    pub ulysses: u32,
    pub layout: i32,
    pub layout_parameter: u32,
    pub reserved: u32,
    pub q_tokens: u64,
    pub k_tokens: u64,
    pub fingerprint: u64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_share {
    pub struct_size: usize,
    pub replica: u32,
    pub ring: u32,
    pub ulysses: u32,
    pub reserved: u32,
    pub q_tokens: u64,
    pub k_tokens: u64,
    pub q_head_begin: u32,
    pub q_head_end: u32,
    pub kv_head_begin: u32,
    pub kv_head_end: u32,
}

versioned! {
    cpattn_problem through reserved;
    cpattn_options through reserved;
    cpattn_plan_info through fingerprint;
    cpattn_share through kv_head_end;
}

pub(super) const DTYPES: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

fn window(name: &'static str, limit: i64) -> Result<Option<u32>> {
    if limit == UNLIMITED {
        return Ok(None);
    }
    u32::try_from(limit)
        .map(Some)
        .map_err(|_| Error::invalid(name, limit, format!("0 to {}, or CPATTN_UNLIMITED", u32::MAX)))
}

/// # Safety
/// The pointers of `p` are null or as long as the header says.
pub(super) unsafe fn problem(p: &cpattn_problem) -> Result<Problem> {
    reserved("problem.reserved", p.reserved == 0)?;
    let entries = p
        .documents
        .checked_add(1)
        .filter(|&n| n <= i32::MAX as usize)
        .ok_or_else(|| Error::invalid("problem.documents", p.documents, format!("below {}", i32::MAX)))?;
    // SAFETY: null, or as long as the header says (promised), here and below.
    let cu_q = unsafe { array("problem.cu_seqlens_q", p.cu_seqlens_q, entries) }?;
    let batch = if p.cu_seqlens_k.is_null() {
        if !p.q_start.is_null() {
            return Err(Error::invalid("problem.q_start", "given", "NULL without cu_seqlens_k"));
        }
        Batch::new(cu_q)?
    } else {
        // SAFETY: null, or as long as the header says (promised), here and below.
        let (cu_k, starts) = unsafe {
            let starts =
                if p.q_start.is_null() { None } else { Some(array("problem.q_start", p.q_start, p.documents)?) };
            (array("problem.cu_seqlens_k", p.cu_seqlens_k, entries)?, starts)
        };
        Batch::cross(cu_q, cu_k, starts)?
    };
    let dtype = one_of("problem.dtype", p.dtype, &DTYPES)?;
    let kind = one_of("problem.kind", p.kind, &[plan::AttentionKind::Softmax, plan::AttentionKind::Other])?;
    let or = |n: u32, default: u32| if n == 0 { default as usize } else { n as usize };
    let mask = Mask {
        left: window("problem.window_left", p.window_left)?,
        right: window("problem.window_right", p.window_right)?,
    };
    let mut out = Problem::new(batch, p.heads as usize, or(p.kv_heads, p.heads), p.head_dim as usize, dtype)
        .with_value_dim(or(p.value_dim, p.head_dim))
        .with_mask(mask)
        .with_sinks(flag("problem.sinks", p.sinks)?)
        .with_kind(kind);
    // What cannot be said with 0 as "default" is refused by `check` (a NaN) or meant as the default (±0).
    if p.scale != 0.0 {
        out = out.with_scale(p.scale);
    }
    if p.softcap != 0.0 {
        out = out.with_softcap(p.softcap);
    }
    out.check()?;
    if !p.alibi_slopes.is_null() {
        // SAFETY: null, or as long as the header says (promised); heads was checked.
        out = out.with_alibi_slopes(unsafe { array("problem.alibi_slopes", p.alibi_slopes, p.heads as usize) }?);
        out.check()?;
    }
    Ok(out)
}

fn layout_of(o: &cpattn_options) -> Result<Option<Layout>> {
    let parameter = |used: bool| match (used, o.layout_parameter) {
        (true, 0) => Err(Error::invalid("options.layout_parameter", 0, "at least 1, for this layout")),
        (false, 1..) => Err(Error::invalid("options.layout_parameter", o.layout_parameter, "0: the layout has none")),
        _ => Ok(()),
    };
    parameter(matches!(o.layout, 4 | 5))?;
    Ok(match o.layout {
        0 => None,
        1 => Some(Layout::Contiguous),
        2 => Some(Layout::Zigzag),
        3 => Some(Layout::ZigzagPack),
        4 => Some(Layout::Striped { stripe: o.layout_parameter }),
        5 => Some(Layout::Balanced { chunks: o.layout_parameter }),
        other => return Err(Error::invalid("options.layout", other, "one of CPATTN_LAYOUT_…, 0 to 5")),
    })
}

fn plan(problem: &Problem, o: &cpattn_options) -> Result<Plan> {
    reserved("options.reserved", o.reserved == 0)?;
    let options = Options::new()
        .gather(flag("options.gather", o.gather)?)
        .passes(o.passes as usize)
        .circulate(one_of("options.circulate", o.circulate, &[Circulate::Auto, Circulate::Keys, Circulate::Queries])?)
        .wire(one_of("options.wire", o.wire, &[Wire::Full, Wire::Bf16])?)
        .reproducible(flag("options.reproducible", o.reproducible)?)
        .pack_inputs(flag("options.pack_inputs", o.pack_inputs)?);
    let layout = layout_of(o)?;
    let (world, ulysses, ring) = (o.world as usize, o.ulysses as usize, o.ring as usize);
    let mesh = match (ulysses, ring) {
        (0, 0) => Mesh::auto(world, problem)?,
        (0, n) | (n, 0) => {
            if world == 0 || !world.is_multiple_of(n) {
                let name = if ring == 0 { "options.ulysses" } else { "options.ring" };
                return Err(Error::invalid(name, n, format!("a divisor of the world of {world}")));
            }
            if ring == 0 { Mesh::explicit(world, n, world / n)? } else { Mesh::explicit(world, world / n, n)? }
        }
        (u, r) => Mesh::explicit(world, u, r)?,
    };
    let layout = match layout {
        Some(layout) => layout,
        None => plan::auto_layout(problem, mesh.ring)?,
    };
    Plan::with_options(problem, mesh, layout, options)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_create(
    problem: *const cpattn_problem,
    options: *const cpattn_options,
    plan: *mut *mut cpattn_plan,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about structs, arrays and results.
        let (problem, options, out) = unsafe {
            let p = sized("problem", problem)?;
            (self::problem(&p)?, sized("options", options)?, result("plan", plan)?)
        };
        out.write(handle::create(self::plan(&problem, &options)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_destroy(plan: *mut cpattn_plan) -> i32 {
    // SAFETY: the header's promise about handles.
    boundary!({ unsafe { handle::destroy(plan) } })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_describe(plan: *const cpattn_plan, info: *mut cpattn_plan_info) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        let plan = unsafe { handle::borrow(plan) }?;
        let (layout, layout_parameter) = match plan.layout() {
            Layout::Contiguous => (1, 0),
            Layout::Zigzag => (2, 0),
            Layout::ZigzagPack => (3, 0),
            Layout::Striped { stripe } => (4, stripe),
            Layout::Balanced { chunks } => (5, chunks),
        };
        let (mesh, batch) = (plan.mesh(), plan.problem().batch());
        let value = cpattn_plan_info {
            struct_size: 0,
            replicas: mesh.replicas as u32,
            ring: mesh.ring as u32,
            ulysses: mesh.ulysses as u32,
            layout,
            layout_parameter,
            reserved: 0,
            q_tokens: batch.tokens(Side::Q) as u64,
            k_tokens: batch.tokens(Side::K) as u64,
            fingerprint: plan.fingerprint(),
        };
        // SAFETY: the header's promise about structs.
        Ok(unsafe { write_sized("info", info, value) }?)
    })
}

/// A rank of the plan's world.
pub(super) fn rank_of(plan: &Plan, rank: u32) -> Result<usize> {
    let world = plan.mesh().world();
    if rank as usize >= world {
        return Err(Error::invalid("rank", rank, format!("below the world of {world}")));
    }
    Ok(rank as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_share(plan: *const cpattn_plan, rank: u32, share: *mut cpattn_share) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        let plan = unsafe { handle::borrow(plan) }?;
        let rank = rank_of(plan, rank)?;
        let (at, heads) = (plan.mesh().coordinates(rank), plan.heads_of(rank));
        let value = cpattn_share {
            struct_size: 0,
            replica: at.replica as u32,
            ring: at.ring as u32,
            ulysses: at.ulysses as u32,
            reserved: 0,
            q_tokens: plan.local_tokens(Side::Q, rank) as u64,
            k_tokens: plan.local_tokens(Side::K, rank) as u64,
            q_head_begin: heads.q.start,
            q_head_end: heads.q.end,
            kv_head_begin: heads.kv.start,
            kv_head_end: heads.kv.end,
        };
        // SAFETY: the header's promise about structs.
        Ok(unsafe { write_sized("share", share, value) }?)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_explain(
    plan: *const cpattn_plan,
    text: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles, arrays and results.
        let (plan, text, needed) = unsafe {
            (handle::borrow(plan)?, array_mut("text", text.cast::<u8>(), capacity)?, result("needed", needed)?)
        };
        let mut said = plan.explain();
        said.retain(|c| c != '\0');
        needed.write(said.len() + 1);
        if let Some(room) = text.len().checked_sub(1) {
            // Cut where a character ends.
            let mut n = room.min(said.len());
            while !said.is_char_boundary(n) {
                n -= 1;
            }
            for (to, &from) in text.iter_mut().zip(&said.as_bytes()[..n]) {
                to.write(from);
            }
            text[n].write(0);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_verify(plan: *const cpattn_plan) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        let plan = unsafe { handle::borrow(plan) }?;
        runs(plan)?;
        plan.verify()?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_verify_all_to_all(
    plan: *const cpattn_plan,
    side: i32,
    dim: u32,
    dtype: i32,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        let plan = unsafe { handle::borrow(plan) }?;
        let (side, dtype) = (self::side(side)?, one_of("dtype", dtype, &DTYPES)?);
        for way in [Way::ToHeads, Way::ToTokens] {
            plan.verify_all_to_all(AllToAll { way, side, dim, dtype })?;
        }
        Ok(())
    })
}

pub(super) fn direction(value: i32) -> Result<Direction> {
    one_of("direction", value, &[Direction::Forward, Direction::Backward])
}

pub(super) fn side(value: i32) -> Result<Side> {
    one_of("side", value, &[Side::Q, Side::K])
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_workspace(
    plan: *const cpattn_plan,
    rank: u32,
    direction: i32,
    bytes: *mut u64,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles and results.
        let (plan, bytes) = unsafe { (handle::borrow(plan)?, result("bytes", bytes)?) };
        runs(plan)?;
        let rank = rank_of(plan, rank)?;
        bytes.write(Schedule::new(plan, rank, self::direction(direction)?)?.workspace);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_all_to_all_workspace(
    plan: *const cpattn_plan,
    rank: u32,
    side: i32,
    dim: u32,
    dtype: i32,
    bytes: *mut u64,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles and results.
        let (plan, bytes) = unsafe { (handle::borrow(plan)?, result("bytes", bytes)?) };
        let (rank, side, dtype) = (rank_of(plan, rank)?, self::side(side)?, one_of("dtype", dtype, &DTYPES)?);
        let mut most = 0;
        for way in [Way::ToHeads, Way::ToTokens] {
            most = most.max(Schedule::all_to_all(plan, rank, AllToAll { way, side, dim, dtype })?.workspace);
        }
        bytes.write(most);
        Ok(())
    })
}

/// Refuses what the library has no kernels for.
pub(super) fn runs(plan: &Plan) -> Result<()> {
    if plan.problem().kind == plan::AttentionKind::Softmax {
        return Ok(());
    }
    Err(Error::unsupported(
        "a plan of kind CPATTN_OTHER",
        "what mixes its tokens is the caller's own",
        "run that between cpattn_rank_to_heads and cpattn_rank_to_tokens, or plan CPATTN_SOFTMAX",
    ))
}
