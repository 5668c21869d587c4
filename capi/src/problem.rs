// SPDX-License-Identifier: MIT OR Apache-2.0
//! The problem and the options of a plan.

use super::input::{array, flag, one_of, reserved, sized};
use cpattn::{
    Batch, Dtype, Error, Layout, Machine, Mask, Mesh, Options, Plan, Problem, Result,
    plan::{AttentionKind, Choice, Circulate, Gather, Wire},
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
    pub ranks_per_node: u32,
    pub circulate_forward: i32,
    pub reserved: i32,
}

versioned! {
    cpattn_problem through reserved;
    cpattn_options through ranks_per_node;
}

pub(super) const DTYPES: [Dtype; 4] = [Dtype::F16, Dtype::Bf16, Dtype::F32, Dtype::F64];

/// In the order of the header.
const CIRCULATE: [Circulate; 3] = [Circulate::Auto, Circulate::Keys, Circulate::Queries];

pub(super) fn window(name: &'static str, limit: i64) -> Result<Option<u32>> {
    if limit == UNLIMITED {
        return Ok(None);
    }
    u32::try_from(limit)
        .map(Some)
        .map_err(|_| Error::invalid(name, limit, format!("0 to {}, or CPATTN_UNLIMITED", u32::MAX)))
}

/// # Safety
/// The pointers of `p` are null or as long as the header says.
unsafe fn batch(p: &cpattn_problem) -> Result<Batch> {
    let entries = p
        .documents
        .checked_add(1)
        .filter(|&n| n <= i32::MAX as usize)
        .ok_or_else(|| Error::invalid("problem.documents", p.documents, format!("below {}", i32::MAX)))?;
    let cu_q = given!(array("problem.cu_seqlens_q", p.cu_seqlens_q, entries));
    if p.cu_seqlens_k.is_null() {
        if !p.q_start.is_null() {
            return Err(Error::invalid("problem.q_start", "given", "NULL without cu_seqlens_k"));
        }
        return Batch::new(cu_q);
    }
    let starts =
        if p.q_start.is_null() { None } else { Some(given!(array("problem.q_start", p.q_start, p.documents))) };
    Batch::cross(cu_q, given!(array("problem.cu_seqlens_k", p.cu_seqlens_k, entries)), starts)
}

/// The problem of a struct, with the batch `base` if the struct gives none.
///
/// # Safety
/// `given` is as [`sized`] needs it, and its pointers are null or as long as the header says.
pub(super) unsafe fn read_problem(
    name: &'static str, given: *const cpattn_problem, base: Option<&Batch>,
) -> Result<Problem> {
    let p = &given!(sized(name, given));
    reserved("problem.reserved", p.reserved == 0)?;
    let none = p.cu_seqlens_q.is_null() && p.cu_seqlens_k.is_null() && p.q_start.is_null() && p.documents == 0;
    let batch = match base {
        Some(base) if none => base.clone(),
        _ => given!(batch(p)),
    };
    let dtype = one_of("problem.dtype", p.dtype, &DTYPES)?;
    let kind = one_of("problem.kind", p.kind, &[AttentionKind::Softmax, AttentionKind::Other])?;
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
    // 0 stands for the default. `check` refuses a NaN.
    if p.scale != 0.0 {
        out = out.with_scale(p.scale);
    }
    if p.softcap != 0.0 {
        out = out.with_softcap(p.softcap);
    }
    out.check()?;
    if !p.alibi_slopes.is_null() {
        // `heads` was checked.
        out = out.with_alibi_slopes(given!(array("problem.alibi_slopes", p.alibi_slopes, p.heads as usize)));
        out.check()?;
    }
    Ok(out)
}

/// The layouts from 1 on, in the order of the header.
pub(super) fn layouts(parameter: u32) -> [Layout; 5] {
    let (striped, balanced) = (Layout::Striped { stripe: parameter }, Layout::Balanced { chunks: parameter });
    [Layout::Contiguous, Layout::Zigzag, Layout::ZigzagPack, striped, balanced]
}

fn layout_of(o: &cpattn_options) -> Result<Option<Layout>> {
    let parameter = |expected| Err(Error::invalid("options.layout_parameter", o.layout_parameter, expected));
    match (o.layout, o.layout_parameter) {
        (4, 0) => parameter("at least 1: the tokens of a stripe"),
        (5, 0) => parameter("at least 1: the chunks of a ring rank"),
        (0..=3, 1..) => parameter("0: the layout has none"),
        (0, _) => Ok(None),
        (n @ 1..=5, parameter) => Ok(Some(layouts(parameter)[n as usize - 1])),
        (other, _) => Err(Error::invalid("options.layout", other, "one of CPATTN_LAYOUT_…, 0 to 5")),
    }
}

/// The options that do not change which rank holds which tokens.
fn options(o: &cpattn_options) -> Result<Options> {
    reserved("options.reserved", o.reserved == 0)?;
    let gathers = [Gather::Auto, Gather::Others, Gather::Steps, Gather::Together];
    Ok(Options::new()
        .gather(one_of("options.gather", o.gather, &gathers)?)
        .passes(o.passes as usize)
        .circulate(one_of("options.circulate", o.circulate, &CIRCULATE)?)
        .circulate_forward(one_of("options.circulate_forward", o.circulate_forward, &CIRCULATE)?)
        .wire(one_of("options.wire", o.wire, &[Wire::Full, Wire::Bf16])?)
        .reproducible(flag("options.reproducible", o.reproducible)?)
        .pack_inputs(flag("options.pack_inputs", o.pack_inputs)?)
        .ranks_per_node(o.ranks_per_node as usize))
}

/// A plan for `problem` with the distribution of tokens of `base`, and without `o` also with the options of `base`.
pub(super) fn with_tokens_of(base: &Plan, problem: &Problem, o: Option<&cpattn_options>) -> Result<Plan> {
    let Some(o) = o else { return Plan::with_tokens_of(base, problem, base.options()) };
    let options = options(o)?;
    let mesh = base.mesh();
    let given = [("world", o.world, mesh.world()), ("ulysses", o.ulysses, mesh.ulysses), ("ring", o.ring, mesh.ring)];
    for (name, found, expected) in given {
        if found != 0 && found as usize != expected {
            let expected = format!("0, or the base plan's {expected}");
            return Err(Error::invalid(format!("options.{name}"), found, expected));
        }
    }
    match layout_of(o)? {
        Some(layout) if layout != base.layout() => {
            let expected = format!("CPATTN_LAYOUT_AUTO, or the base plan's {}", base.layout());
            Err(Error::invalid("options.layout", layout, expected))
        }
        _ => Plan::with_tokens_of(base, problem, options),
    }
}

/// Refuses options that this call sets itself.
fn nothing_given(o: &cpattn_options, expected: &str, hint: &'static str) -> Result<()> {
    for (name, found) in [("ulysses", i64::from(o.ulysses)), ("ring", o.ring.into()), ("layout", o.layout.into())] {
        if found != 0 {
            return Err(Error::invalid(format!("options.{name}"), found, expected).hint(hint));
        }
    }
    layout_of(o).map(|_| ())
}

pub(super) fn auto_on(problem: &Problem, o: &cpattn_options, machine: &str) -> Result<Plan> {
    let hint = "make the plan with cpattn_plan_create, which takes a given one";
    nothing_given(o, "0: it is chosen for the machine", hint)?;
    Plan::auto_on(problem, o.world as usize, &Machine::parse(machine)?, options(o)?)
}

pub(super) fn auto_for(kinds: &[(Problem, usize)], o: &cpattn_options) -> Result<Vec<Plan>> {
    let hint = "for a given one make a plan of one kind, and the others with cpattn_plan_with_tokens_of";
    nothing_given(o, "0: it is chosen for all kinds", hint)?;
    Plan::auto_for(kinds, o.world as usize, options(o)?)
}

pub(super) fn plan(problem: &Problem, o: &cpattn_options) -> Result<Plan> {
    let options = options(o)?;
    let layout = layout_of(o)?;
    let (world, ulysses, ring) = (o.world as usize, o.ulysses as usize, o.ring as usize);
    let mesh = match (ulysses, ring) {
        (0, 0) => Choice::new(world, problem, Choice::BALANCE, options.ranks_per_node)?.mesh,
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
        None => Layout::auto(mesh.ring, problem)?,
    };
    Plan::with_options(problem, mesh, layout, options)
}
