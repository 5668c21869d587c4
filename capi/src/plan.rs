// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans and their properties.

use core::ffi::c_char;

use super::{
    handle::{self, Handle, HandleKind},
    input::{array, array_mut, one_of, result, sized, text, write_sized, write_text},
    problem::{self, DTYPES, cpattn_options, cpattn_problem, layouts, read_problem},
};
use cpattn::{
    Error, Layout, Plan, Problem, Result, Side,
    plan::AttentionKind,
    schedule::{AllToAll, AllToAllDirection, Direction, Schedule},
};

pub type cpattn_plan = Handle<Plan>;

impl HandleKind for Plan {
    const NAME: &'static str = "plan";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatPLAN");
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct cpattn_plan_info {
    pub struct_size: usize,
    pub replicas: u32,
    pub ring: u32,
    pub ulysses: u32,
    pub layout: i32,
    pub layout_parameter: u32,
    pub ranks_per_node: u32,
    pub q_tokens: u64,
    pub k_tokens: u64,
    pub fingerprint: u64,
}

#[derive(Clone, Copy, Debug, Default)]
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
    cpattn_plan_info through fingerprint;
    cpattn_share through kv_head_end;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_ranks_per_node(nodes: *const u64, ranks: usize, ranks_per_node: *mut u32) -> i32 {
    boundary!({
        let (nodes, out) = given!(array("nodes", nodes, ranks), result("ranks_per_node", ranks_per_node));
        out.write(cpattn::plan::ranks_per_node(nodes)? as u32);
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_create(
    problem: *const cpattn_problem, options: *const cpattn_options, plan: *mut *mut cpattn_plan,
) -> i32 {
    boundary!({
        let (problem, options, out) =
            given!(read_problem("problem", problem, None), sized("options", options), result("plan", plan));
        out.write(handle::create(problem::plan(&problem, &options)?));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_with_tokens_of(
    base: *const cpattn_plan, problem: *const cpattn_problem, options: *const cpattn_options,
    plan: *mut *mut cpattn_plan,
) -> i32 {
    boundary!({
        let base = given!(handle::borrow(base));
        let problem = given!(read_problem("problem", problem, Some(base.problem().batch())));
        let options = if options.is_null() { None } else { Some(given!(sized("options", options))) };
        let out = given!(result("plan", plan));
        out.write(handle::create(problem::with_tokens_of(base, &problem, options.as_ref())?));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_auto_for(
    problems: *const *const cpattn_problem, layers: *const u64, kinds: usize, options: *const cpattn_options,
    plans: *mut *mut cpattn_plan,
) -> i32 {
    boundary!({
        let mut of_model: Vec<(Problem, usize)> = Vec::new();
        let (problems, layers) = given!(array("problems", problems, kinds), array("layers", layers, kinds));
        for (i, (&p, &n)) in problems.iter().zip(layers).enumerate() {
            let batch = of_model.first().map(|(first, _)| first.batch().clone());
            let problem = given!(read_problem(&format!("problems[{i}]"), p, batch.as_ref()));
            of_model.push((problem, usize::try_from(n).unwrap_or(usize::MAX)));
        }
        let (options, out) = given!(sized("options", options), array_mut("plans", plans, kinds));
        for (out, plan) in out.iter_mut().zip(problem::auto_for(&of_model, &options)?) {
            out.write(handle::create(plan));
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_create_on(
    problem: *const cpattn_problem, options: *const cpattn_options, machine: *const c_char, plan: *mut *mut cpattn_plan,
) -> i32 {
    boundary!({
        let (problem, options) = given!(read_problem("problem", problem, None), sized("options", options));
        let (machine, out) = given!(text("machine", machine), result("plan", plan));
        out.write(handle::create(problem::auto_on(&problem, &options, machine)?));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_distribution(plan: *const cpattn_plan, distribution: *mut u64) -> i32 {
    boundary!({
        let (plan, out) = given!(handle::borrow(plan), result("distribution", distribution));
        out.write(plan.distribution().id());
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_destroy(plan: *mut cpattn_plan) -> i32 {
    boundary!({ given!(handle::destroy(plan)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_describe(plan: *const cpattn_plan, info: *mut cpattn_plan_info) -> i32 {
    boundary!({
        let plan = given!(handle::borrow(plan));
        let layout_parameter = match plan.layout() {
            Layout::Striped { stripe: n } | Layout::Balanced { chunks: n } => n,
            _ => 0,
        };
        let Some(at) = layouts(layout_parameter).iter().position(|layout| *layout == plan.layout()) else {
            let (limit, hint) = ("the C interface has no number for it", "use a library whose header has it");
            return Err(Error::unsupported(format!("layout {}", plan.layout()), limit, hint).into());
        };
        let (mesh, batch) = (plan.mesh(), plan.problem().batch());
        let value = cpattn_plan_info {
            replicas: mesh.replicas as u32,
            ring: mesh.ring as u32,
            ulysses: mesh.ulysses as u32,
            layout: at as i32 + 1,
            layout_parameter,
            ranks_per_node: plan.options().ranks_per_node as u32,
            q_tokens: batch.tokens(Side::Q) as u64,
            k_tokens: batch.tokens(Side::K) as u64,
            fingerprint: plan.fingerprint(),
            ..Default::default()
        };
        given!(write_sized("info", info, value));
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
        let plan = given!(handle::borrow(plan));
        let rank = rank_of(plan, rank)?;
        let (at, heads) = (plan.mesh().coordinates(rank), plan.heads_of(rank));
        let value = cpattn_share {
            replica: at.replica as u32,
            ring: at.ring as u32,
            ulysses: at.ulysses as u32,
            q_tokens: plan.local_tokens(Side::Q, rank).len() as u64,
            k_tokens: plan.local_tokens(Side::K, rank).len() as u64,
            q_head_begin: heads.q.start,
            q_head_end: heads.q.end,
            kv_head_begin: heads.kv.start,
            kv_head_end: heads.kv.end,
            ..Default::default()
        };
        given!(write_sized("share", share, value));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_explain(
    plan: *const cpattn_plan, text: *mut c_char, capacity: usize, needed: *mut usize,
) -> i32 {
    boundary!({
        let (plan, text, needed) =
            given!(handle::borrow(plan), array_mut("text", text.cast::<u8>(), capacity), result("needed", needed));
        let mut said = plan.explain();
        said.retain(|c| c != '\0');
        write_text(&said, text, needed);
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_verify(plan: *const cpattn_plan) -> i32 {
    boundary!({
        let plan = given!(handle::borrow(plan));
        runs(plan)?;
        plan.verify()?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_verify_all_to_all(
    plan: *const cpattn_plan, side: i32, dim: u32, dtype: i32,
) -> i32 {
    boundary!({
        let plan = given!(handle::borrow(plan));
        let (side, dtype) = (self::side(side)?, one_of("dtype", dtype, &DTYPES)?);
        for way in BOTH {
            plan.verify_purpose(AllToAll { direction: way, side, dim, dtype })?;
        }
    })
}

const BOTH: [AllToAllDirection; 2] = [AllToAllDirection::ToHeads, AllToAllDirection::ToTokens];

pub(super) fn direction(value: i32) -> Result<Direction> {
    one_of("direction", value, &[("CPATTN_FORWARD", Direction::Forward), ("CPATTN_BACKWARD", Direction::Backward)])
}

pub(super) fn side(value: i32) -> Result<Side> {
    one_of("side", value, &[("CPATTN_Q", Side::Q), ("CPATTN_K", Side::K)])
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_workspace(
    plan: *const cpattn_plan, rank: u32, direction: i32, bytes: *mut u64,
) -> i32 {
    boundary!({
        let (plan, bytes) = given!(handle::borrow(plan), result("bytes", bytes));
        runs(plan)?;
        let rank = rank_of(plan, rank)?;
        bytes.write(Schedule::new(plan, rank, self::direction(direction)?)?.workspace_bytes());
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_all_to_all_workspace(
    plan: *const cpattn_plan, rank: u32, side: i32, dim: u32, dtype: i32, bytes: *mut u64,
) -> i32 {
    boundary!({
        let (plan, bytes) = given!(handle::borrow(plan), result("bytes", bytes));
        let (rank, side, dtype) = (rank_of(plan, rank)?, self::side(side)?, one_of("dtype", dtype, &DTYPES)?);
        let mut most = 0;
        for way in BOTH {
            most = most.max(
                Schedule::all_to_all(plan, rank, AllToAll { direction: way, side, dim, dtype })?.workspace_bytes(),
            );
        }
        bytes.write(most);
    })
}

/// Refuses plans that the library has no kernels for.
pub(super) fn runs(plan: &Plan) -> Result<()> {
    if plan.problem().kind() == AttentionKind::Softmax {
        return Ok(());
    }
    Err(Error::unsupported(
        "a plan of kind CPATTN_OTHER",
        "what mixes its tokens is the caller's own",
        "run that between cpattn_rank_to_heads and cpattn_rank_to_tokens, or plan CPATTN_SOFTMAX",
    ))
}
