// SPDX-License-Identifier: MIT OR Apache-2.0
//! The problem and the options of a plan.

use super::input::{array, flag, member, not_one_of, one_of, renamed_by, sized};
pub use cpattn::Slice as cpattn_slice;
use cpattn::{
    Batch, Dtype, Error, Layout, Machine, Mask, Mesh, Options, Plan, Problem, Result,
    plan::{AttentionKind, Circulate, Gather, KeyRows, Wire},
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
    pub alibi_rows: i32,
    pub slices: *const cpattn_slice,
    pub slice_count: usize,
    pub dropout: f64,
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
    pub key_rows: i32,
}

versioned! {
    cpattn_problem through alibi_rows;
    cpattn_options through ranks_per_node;
}

pub(super) const DTYPES: [(&str, Dtype); 4] =
    [("CPATTN_F16", Dtype::F16), ("CPATTN_BF16", Dtype::Bf16), ("CPATTN_F32", Dtype::F32), ("CPATTN_F64", Dtype::F64)];

const KINDS: [(&str, AttentionKind); 2] =
    [("CPATTN_SOFTMAX", AttentionKind::Softmax), ("CPATTN_OTHER", AttentionKind::Other)];

const CIRCULATE: [(&str, Circulate); 3] = [
    ("CPATTN_CIRCULATE_AUTO", Circulate::Auto),
    ("CPATTN_CIRCULATE_KEYS", Circulate::Keys),
    ("CPATTN_CIRCULATE_QUERIES", Circulate::Queries),
];

const GATHER: [(&str, Gather); 4] = [
    ("CPATTN_GATHER_AUTO", Gather::Auto),
    ("CPATTN_GATHER_OTHERS", Gather::Others),
    ("CPATTN_GATHER_STEPS", Gather::Steps),
    ("CPATTN_GATHER_TOGETHER", Gather::Together),
];

const KEY_ROWS: [(&str, KeyRows); 3] = [
    ("CPATTN_KEY_ROWS_AUTO", KeyRows::Auto),
    ("CPATTN_KEY_ROWS_LISTED", KeyRows::Listed),
    ("CPATTN_KEY_ROWS_ALLOWED", KeyRows::Allowed),
];

const WIRE: [(&str, Wire); 2] = [("CPATTN_WIRE_FULL", Wire::Full), ("CPATTN_WIRE_BF16", Wire::Bf16)];

const LAYOUTS: [&str; 6] = [
    "CPATTN_LAYOUT_AUTO",
    "CPATTN_LAYOUT_CONTIGUOUS",
    "CPATTN_LAYOUT_ZIGZAG",
    "CPATTN_LAYOUT_ZIGZAG_PACK",
    "CPATTN_LAYOUT_STRIPED",
    "CPATTN_LAYOUT_BALANCED",
];

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
        .ok_or_else(|| Error::invalid("documents", p.documents, format!("below {}", i32::MAX)))?;
    let cu_q = given!(array("cu_seqlens_q", p.cu_seqlens_q, entries));
    if p.cu_seqlens_k.is_null() {
        if !p.q_start.is_null() {
            return Err(Error::invalid("q_start", "given", "NULL without cu_seqlens_k"));
        }
        // The header has no cu_seqlens; of two lists the error names cu_seqlens_q.
        return Batch::new(cu_q).or_else(|_| Batch::cross(cu_q, cu_q, None));
    }
    let starts = if p.q_start.is_null() { None } else { Some(given!(array("q_start", p.q_start, p.documents))) };
    Batch::cross(cu_q, given!(array("cu_seqlens_k", p.cu_seqlens_k, entries)), starts)
}

/// The problem of a struct, with the batch `base` if the struct gives none.
///
/// # Safety
/// `given` is as [`sized`] needs it, and its pointers are null or as long as the header says.
pub(super) unsafe fn read_problem(name: &str, given: *const cpattn_problem, base: Option<&Batch>) -> Result<Problem> {
    let p = given!(sized(name, given));
    // SAFETY: the pointers of the struct are part of this function's contract.
    unsafe { members(&p, base) }.map_err(|error| member(error, name))
}

/// Refuses a causal mask, which is the initial value, where it would leave out pairs of a slice.
fn not_cut(batch: &Batch, mask: Mask) -> Result<()> {
    let cut = |s: &cpattn_slice| {
        let [q, k] = [(s.q_begin, s.q_end), (s.k_begin, s.k_end)].map(|(begin, end)| i64::from(end) - i64::from(begin));
        let (least, most) = (1 - q - s.q_start, s.high.min(k - 1 - s.q_start));
        (q > 0 && k > 0 && most > 0 && most >= least && most >= s.low).then_some(most)
    };
    let mut slices = batch.slices().unwrap_or_default().iter().enumerate();
    match slices.find_map(|(i, s)| Some((i, cut(s)?))).filter(|_| mask.right == Some(0)) {
        Some((i, most)) => {
            let expected = format!("CPATTN_UNLIMITED: slices[{i}] has keys up to {most} positions after a query");
            Err(Error::invalid("window_right", "0 (causal)", expected)
                .hint("the window applies inside slices; if it is to cut this one, set high of the slice to 0 instead"))
        }
        None => Ok(()),
    }
}

/// As [`read_problem`]; errors name the member alone.
///
/// # Safety
/// The pointers of `p` are null or as long as the header says.
unsafe fn members(p: &cpattn_problem, base: Option<&Batch>) -> Result<Problem> {
    let none = p.cu_seqlens_q.is_null() && p.cu_seqlens_k.is_null() && p.q_start.is_null() && p.documents == 0;
    let mut batch = match base {
        Some(base) if none => base.clone(),
        _ => given!(batch(p)),
    };
    if !p.slices.is_null() && p.slice_count == 0 {
        let expected = "at least 1, or slices NULL for none";
        return Err(Error::invalid("slice_count", 0, expected)
            .hint("if nothing attends to anything, give one slice that allows no pair"));
    }
    if p.slice_count > 0 {
        batch = batch.with_slices(given!(array("slices", p.slices, p.slice_count)))?;
    }
    let dtype = one_of("dtype", p.dtype, &DTYPES)?;
    let kind = one_of("kind", p.kind, &KINDS)?;
    let or = |n: u32, default: u32| if n == 0 { default as usize } else { n as usize };
    let mask = Mask { left: window("window_left", p.window_left)?, right: window("window_right", p.window_right)? };
    not_cut(&batch, mask)?;
    let mut out = Problem::new(batch, p.heads as usize, or(p.kv_heads, p.heads), p.head_dim as usize, dtype)
        .with_value_dim(or(p.value_dim, p.head_dim))
        .with_mask(mask)
        .with_sinks_per_head(
            usize::try_from(p.sinks)
                .map_err(|_| Error::invalid("sinks", p.sinks, format!("0 to {}", Problem::MAX_SINKS)))?,
        )
        .with_kind(kind);
    // 0 stands for the default, and for none. `check` refuses a NaN.
    if p.dropout != 0.0 {
        out = out.with_dropout(p.dropout);
    }
    if p.scale != 0.0 {
        out = out.with_scale(p.scale);
    }
    if p.softcap != 0.0 {
        out = out.with_softcap(p.softcap);
    }
    out.check()?;
    let (heads, documents) = (p.heads as usize, out.batch().documents());
    match p.alibi_rows {
        0 if p.alibi_slopes.is_null() => return Ok(out),
        rows if p.alibi_slopes.is_null() => {
            return Err(Error::invalid("alibi_rows", rows, "0 if alibi_slopes is NULL"));
        }
        // `heads` was checked.
        0 => out = out.with_alibi_slopes(given!(array("alibi_slopes", p.alibi_slopes, heads))),
        rows if usize::try_from(rows) == Ok(documents) => {
            let all = given!(array("alibi_slopes", p.alibi_slopes, documents * heads));
            out = out.with_alibi_slopes_per_document(all);
        }
        rows => {
            let found = format!("of {rows} rows of {heads} (alibi_rows)");
            let expected = format!("{documents} rows, one for each document, or 0 for {heads} slopes of all documents");
            return Err(Error::invalid("alibi_slopes", found, expected));
        }
    }
    out.check()?;
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
        (other, _) => Err(not_one_of("options.layout", other, LAYOUTS.into_iter())),
    }
}

/// The options that do not change which rank holds which tokens.
fn options(o: &cpattn_options) -> Result<Options> {
    Ok(Options::new()
        .gather(one_of("options.gather", o.gather, &GATHER)?)
        .passes(o.passes as usize)
        .circulate(one_of("options.circulate", o.circulate, &CIRCULATE)?)
        .circulate_forward(one_of("options.circulate_forward", o.circulate_forward, &CIRCULATE)?)
        .key_rows(one_of("options.key_rows", o.key_rows, &KEY_ROWS)?)
        .wire(one_of("options.wire", o.wire, &WIRE)?)
        .reproducible(flag("options.reproducible", o.reproducible)?)
        .pack_inputs(flag("options.pack_inputs", o.pack_inputs)?)
        .ranks_per_node(o.ranks_per_node as usize))
}

/// The error of a plan, with the header's names of the arguments. `problem` is the one with the documents.
fn named(error: Error, problem: &str) -> Error {
    renamed_by(error, |argument| match argument {
        "world" => "options.world".into(),
        "mesh.ulysses" => "options.ulysses".into(),
        "layout.stripe" | "layout.chunks" => "options.layout_parameter".into(),
        _ if ["cu_seqlens_", "q_start"].iter().any(|list| argument.starts_with(list)) => {
            format!("{problem}.{argument}")
        }
        _ => argument.into(),
    })
}

/// A plan for `problem` with the distribution of tokens of `base`, and without `o` also with the options of `base`.
pub(super) fn with_tokens_of(base: &Plan, problem: &Problem, o: Option<&cpattn_options>) -> Result<Plan> {
    let Some(o) = o else {
        return Plan::builder(problem)
            .tokens_of(base)
            .options(base.options())
            .build()
            .map_err(|error| named(error, "problem"));
    };
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
        _ => Plan::builder(problem).tokens_of(base).options(options).build().map_err(|error| named(error, "problem")),
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
    Plan::builder(problem)
        .world(o.world as usize)
        .options(options(o)?)
        .build_on(&Machine::parse(machine)?)
        .map_err(|error| named(error, "problem"))
}

pub(super) fn auto_for(kinds: &[(Problem, usize)], o: &cpattn_options) -> Result<Vec<Plan>> {
    let hint = "for a given one make a plan of one kind, and the others with cpattn_plan_with_tokens_of";
    nothing_given(o, "0: it is chosen for all kinds", hint)?;
    Plan::auto_for(kinds, o.world as usize, options(o)?).map_err(|error| named(error, "problems[…]"))
}

pub(super) fn plan(problem: &Problem, o: &cpattn_options) -> Result<Plan> {
    given_or_chosen(problem, o).map_err(|error| named(error, "problem"))
}

fn given_or_chosen(problem: &Problem, o: &cpattn_options) -> Result<Plan> {
    let options = options(o)?;
    let layout = layout_of(o)?;
    let (world, ulysses, ring) = (o.world as usize, o.ulysses as usize, o.ring as usize);
    let mesh = match (ulysses, ring) {
        (0, 0) => None,
        (0, n) | (n, 0) => {
            if world == 0 || !world.is_multiple_of(n) {
                let name = if ring == 0 { "options.ulysses" } else { "options.ring" };
                return Err(Error::invalid(name, n, format!("a divisor of the world of {world}")));
            }
            Some(if ring == 0 {
                Mesh { replicas: 1, ring: world / n, ulysses: n }.in_world(world)?
            } else {
                Mesh { replicas: 1, ring: n, ulysses: world / n }.in_world(world)?
            })
        }
        (u, r) => Some(Mesh { replicas: 1, ring: r, ulysses: u }.in_world(world)?),
    };
    let plan = Plan::builder(problem).world(world).options(options);
    let plan = mesh.map_or(plan, |mesh| plan.mesh(mesh));
    layout.map_or(plan, |layout| plan.layout(layout)).build()
}
