// SPDX-License-Identifier: MIT OR Apache-2.0
//! From which ranks rows arrive, against lists written by hand.

use alloc::{vec, vec::Vec};

use super::RangeScratch;
use crate::{
    Batch, Dtype, Layout, Mask, Mesh, Options, Plan, Problem,
    plan::Circulate,
    schedule::{Direction, Schedule},
};

/// The ring ranks whose rows arrive at each rank, its own included.
fn sources(plan: &Plan) -> Vec<Vec<usize>> {
    (0..plan.mesh().ring)
        .map(|me| {
            let s = Schedule::new(plan, me, Direction::Forward).unwrap();
            let ring_steps = s.keys.as_ref().unwrap();
            let mut scratch = RangeScratch::default();
            let mut from = vec![me];
            for i in 1..ring_steps.list().len() {
                ring_steps.incoming(i, &mut scratch);
                from.extend(scratch.fragments.iter().map(|f| f.peer as usize));
            }
            from.sort_unstable();
            from.dedup();
            from
        })
        .collect()
}

/// Three documents of 120, 1,128 and 2,984 tokens over eight ranks of 529: which rank needs which, written by hand from
/// where documents begin (ranks 0, 0 and 2).
#[test]
fn steps_that_nobody_needs_are_left_out() {
    let batch = Batch::new(&[0, 120, 1248, 4232]).unwrap();
    let problem = Problem::new(batch, 2, 1, 8, Dtype::Bf16);
    let plan = Plan::new(&problem, Mesh::ring(8).unwrap(), Layout::Contiguous).unwrap();
    let want: [&[usize]; 8] =
        [&[0], &[0, 1], &[0, 1, 2], &[2, 3], &[2, 3, 4], &[2, 3, 4, 5], &[2, 3, 4, 5, 6], &[2, 3, 4, 5, 6, 7]];
    assert_eq!(sources(&plan), want);
    let (forward, _) = plan.verify().unwrap();
    // Rank 1 takes document 1's 409 tokens of rank 0; rank 2 takes the same and all of rank 1; ranks 3 to 7 take
    // document 2's 339 tokens of rank 2 and all of the ranks between.
    let rows = [0, 409, 409 + 529, 339, 339 + 529, 339 + 2 * 529, 339 + 3 * 529, 339 + 4 * 529];
    let token = 2 * 8 * 2;
    let bytes: Vec<u64> = forward.ranks.iter().map(|r| r.bytes_in("fetch")).collect();
    assert_eq!(bytes, rows.map(|n| n * token));
}

/// A window of 128 tokens over 64 ranks of 1,024: each rank but the first takes 127 tokens of one neighbour and sends
/// their gradients straight home.
#[test]
fn a_window_is_a_halo() {
    let batch = Batch::from_lengths(&[64 * 1024]).unwrap();
    let problem = Problem::new(batch, 1, 1, 64, Dtype::Bf16).with_mask(Mask::sliding(128));
    let options = Options::new().circulate(Circulate::Keys);
    let plan = Plan::builder(&problem)
        .mesh(Mesh::ring(64).unwrap())
        .layout(Layout::Contiguous)
        .options(options)
        .build()
        .unwrap();
    let (forward, backward) = plan.verify().unwrap();
    let sources = sources(&plan);
    assert_eq!(sources[0], [0]);
    for (rank, from) in sources.iter().enumerate().skip(1) {
        assert_eq!(*from, [rank - 1, rank]);
        let (f, b) = (&forward.ranks[rank], &backward.ranks[rank]);
        let kv = 127 * 2 * 64;
        assert_eq!((f.bytes_in("fetch"), b.bytes_in("fetch")), (kv * 2, kv * 2));
        assert_eq!((b.bytes_out("return"), f.exchanges), (kv * 4, 1));
        assert_eq!(b.traffic.iter().find(|t| t.kind == "return").map(|t| t.messages_out), Some(2));
    }
    assert_eq!(forward.ranks[0].bytes_in("fetch"), 0);
    assert_eq!(forward.bytes("fetch"), 63 * 127 * 2 * 64 * 2);
}
