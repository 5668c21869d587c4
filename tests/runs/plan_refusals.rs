// SPDX-License-Identifier: MIT OR Apache-2.0
//! Bad documents, problems, meshes and options: a typed error that names the argument and both values.

use crate::refusals::{batch, problem, ring};
use crate::refused::refused;
use cpattn::{
    Batch, Dtype, Layout, Mesh, Options, Plan, Problem, Rank,
    plan::{AttentionKind, Circulate, Gather, Wire},
    schedule::{Direction, Schedule},
    transport::local,
};
use std::time::Duration;

#[test]
fn documents() {
    refused(Batch::new(&[]), &["cu_seqlens is empty"]);
    refused(Batch::new(&[3, 5]), &["cu_seqlens[0] is 3, expected 0"]);
    refused(Batch::new(&[0, 5, 2]), &["cu_seqlens[2] is 2", "cu_seqlens[1] = 5"]);
    refused(Batch::new(&[0, -5]), &["cu_seqlens[1] is -5", "cu_seqlens[0] = 0"]);
    refused(Batch::cross(&[1], &[0], None), &["cu_seqlens_q[0] is 1"]);
    refused(Batch::cross(&[0, 1], &[0, 3, 2], None), &["cu_seqlens_k[2] is 2"]);
    refused(
        Batch::cross(&[0, 1], &[0, 3, 4], None),
        &["cu_seqlens_k is of length 3, expected 2, the length of cu_seqlens_q"],
    );
    refused(Batch::cross(&[0, 1], &[0, 1], Some(&[])), &["q_start is of length 0, expected 1: one for each document"]);
    refused(Batch::cross(&[0, 1], &[0, 1], Some(&[i64::MIN])), &["q_start[0]", "2^40"]);
    refused(Batch::from_lengths(&[usize::MAX]), &["lengths[0]", "2147483647"]);
}

#[test]
fn problems() {
    let p = |heads, kv, dim| Problem::new(batch(), heads, kv, dim, Dtype::F32).check();
    refused(p(7, 3, 8), &["heads is 7", "multiple of kv_heads = 3"]);
    refused(p(0, 3, 8), &["heads is 0"]);
    refused(p(6, 0, 8), &["kv_heads is 0"]);
    refused(p(6, 3, 0), &["head_dim is 0, expected 1 to 576"]);
    refused(p(6, 3, 577), &["head_dim is 577, expected 1 to 576"]);
    refused(problem().with_value_dim(0).check(), &["value_dim is 0"]);
    refused(problem().with_scale(f64::NAN).check(), &["scale is NaN, expected a finite number"]);
    refused(problem().with_scale(f64::INFINITY).check(), &["scale is inf"]);
    refused(problem().with_softcap(-1.0).check(), &["softcap is -1", "above 0"]);
    refused(problem().with_softcap(f64::NAN).check(), &["softcap is NaN"]);
    refused(
        problem().with_alibi_slopes(&[0.5; 5]).check(),
        &["alibi_slopes is of length 5, expected 6: one for each q head"],
    );
    refused(problem().with_alibi_slopes(&[0.5, f32::NAN, 0., 0., 0., 0.]).check(), &["alibi_slopes[1] is NaN"]);
    refused(problem().with_sinks_per_head(4097).check(), &["sinks is 4097, expected 0 to 4096 for each head"]);
    problem().with_sinks_per_head(4096).check().unwrap();
    // Planning asks the same.
    refused(Plan::new(&problem().with_sinks_per_head(usize::MAX), ring(2), Layout::Contiguous), &["0 to 4096"]);
    refused(Plan::new(&problem().with_scale(f64::NAN), ring(2), Layout::Contiguous), &["scale is NaN"]);
}

#[test]
fn meshes_and_layouts() {
    refused(Mesh { replicas: 1, ring: 2, ulysses: 3 }.in_world(8), &["ulysses 3 × ring 2 = 6", "world of 8"]);
    refused(Mesh { replicas: 1, ring: 2, ulysses: 0 }.in_world(8), &["ulysses 0 × ring 2"]);
    refused(Mesh { replicas: 1, ring: 2, ulysses: usize::MAX }.in_world(8), &["mesh"]);
    refused(Mesh::ring(0), &["world is 0"]);
    let on = |mesh, layout| Plan::new(&problem(), mesh, layout);
    refused(on(Mesh::ulysses(7).unwrap(), Layout::Zigzag), &["mesh.ulysses is 7", "heads = 6", "ring"]);
    refused(on(Mesh { replicas: 1, ring: 0, ulysses: 1 }, Layout::Zigzag), &["mesh", "at least 1"]);
    refused(on(ring(2), Layout::Striped { stripe: 0 }), &["layout.stripe is 0"]);
    refused(on(ring(2), Layout::Balanced { chunks: 0 }), &["layout.chunks is 0"]);
    refused(on(ring(2), Layout::Balanced { chunks: u32::MAX }), &["layout.chunks is 4294967295"]);
    let plan = on(ring(2), Layout::Zigzag).unwrap();
    refused(Schedule::new(&plan, 2, Direction::Forward), &["rank is 2", "world of 2"]);
    let mut rank = Rank::new(local::group(3, Duration::from_secs(9)).unwrap().remove(0));
    refused(rank.prepare(&plan, Direction::Forward), &["mesh", "= 2 ranks", "world of 3"]);
    refused(rank.workspace().bytes(&plan, Direction::Backward), &["world of 3"]);
}

#[test]
fn options_that_contradict_each_other() {
    let o = Options::new;
    let plan = |options| Plan::builder(&problem()).mesh(ring(2)).layout(Layout::Zigzag).options(options).build();
    refused(plan(o().passes(0)), &["options.passes is 0", "kv_heads = 3"]);
    refused(plan(o().passes(4)), &["options.passes is 4", "kv_heads = 3"]);
    refused(plan(o().reproducible(true).wire(Wire::Bf16)), &["wire bf16 with reproducible", "leave"]);
    refused(plan(o().reproducible(true).passes(2)), &["passes with reproducible", "leave"]);
    refused(plan(o().reproducible(true).gather(Gather::Steps)), &["gather steps with reproducible", "leave"]);
    refused(plan(o().reproducible(true).circulate(Circulate::Keys)), &["circulate with reproducible", "leave"]);
    refused(plan(o().reproducible(true).circulate(Circulate::Queries)), &["circulate with reproducible"]);
    refused(plan(o().circulate(Circulate::Queries).passes(2)), &["passes with circulate queries", "leave"]);
    let queries = o().circulate_forward(Circulate::Queries);
    refused(plan(queries.reproducible(true)), &["circulate_forward with reproducible", "leave"]);
    refused(
        plan(o().reproducible(true).circulate_forward(Circulate::Keys)),
        &["circulate_forward with reproducible", "leave"],
    );
    refused(plan(queries.passes(2)), &["passes with circulate_forward queries", "leave"]);
    refused(plan(queries.gather(true)), &["gather with circulate_forward queries", "leave"]);
    refused(plan(queries.gather(Gather::Together)), &["gather with circulate_forward queries", "leave"]);
    let other = problem().with_kind(AttentionKind::Other);
    refused(Plan::new(&other, ring(2), Layout::Zigzag), &["kind other on a ring", "2 ranks", "with ring 1"]);
    let plan = Plan::new(&other, Mesh::ulysses(2).unwrap(), Layout::Contiguous).unwrap();
    refused(Schedule::new(&plan, 0, Direction::Forward), &["attention of kind other", "two all-to-alls"]);
}

/// The way out of too many passes, and which of several kinds of layers has them.
#[test]
fn passes_of_a_kind() {
    let of = |kv_heads| Problem::new(Batch::from_lengths(&[40, 9]).unwrap(), 4, kv_heads, 8, Dtype::F32);
    let passes = Options::new().passes(2);
    let wanted = ["options.passes is 2, expected 1 to kv_heads = 1", "use fewer passes"];
    refused(Plan::builder(&of(1)).mesh(ring(2)).layout(Layout::Zigzag).options(passes).build(), &wanted);
    refused(Plan::auto_for(&[(of(1), 1)], 2, passes), &wanted);
    let wanted = ["options.passes of kinds[1] is 2, expected 1 to kv_heads = 1", "use fewer passes"];
    refused(Plan::auto_for(&[(of(4), 3), (of(1), 1)], 2, passes), &wanted);
    let odd = Problem::new(Batch::from_lengths(&[40, 9]).unwrap(), 4, 3, 8, Dtype::F32);
    refused(Plan::auto_for(&[(of(4), 3), (odd, 1)], 2, Options::new()), &["of kinds[1]"]);
}
