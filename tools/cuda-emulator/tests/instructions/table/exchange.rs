// SPDX-License-Identifier: MIT OR Apache-2.0
//! What lanes of a warp tell each other: shuffles, votes, matches, reductions, elections.

use super::case::Case;
use super::case::Ty::{B32, B64, Pred};

const FAMILY: &str = "exchange";

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    shuffles(&mut cases);
    votes(&mut cases);
    matches(&mut cases);
    reductions(&mut cases);
    let text = "activemask.b32 $d;";
    cases.push(new("activemask.b32").gives(B32, |_| 0xffff_ffff).body(text));
    // Which member leads is not said: there is one, and all know which.
    let text = "elect.sync %w2|%p0, -1; selp.b32 %w3, 1, 0, %p0; redux.sync.add.s32 $d0, %w3, -1;
                set.eq.u32.u32 %w4, %w2, %t; add.u32 $d1, %w3, %w4;";
    cases.push(new("elect.sync").sm(90).gives(B32, |_| 1).gives(B32, |_| 0).body(text));
    cases
}

fn new(name: &str) -> Case {
    Case::new(FAMILY, name, 32)
}

/// A shuffle of 1000 + lane: the instruction's last operands, the lane each lane reads, and whether it is in reach.
type Shuffle = (&'static str, &'static str, fn(u64) -> u64, fn(u64) -> bool);

fn shuffles(cases: &mut Vec<Case>) {
    let table: [Shuffle; 17] = [
        ("up", "1, 0", |t| if t >= 1 { t - 1 } else { t }, |t| t >= 1),
        ("up", "31, 0", |t| if t == 31 { 0 } else { t }, |t| t == 31),
        ("up", "0, 0", |t| t, |_| true),
        // Segments of 8 lanes: the mask's upper part is 24.
        ("up", "3, 0x1800", |t| if t % 8 >= 3 { t - 3 } else { t }, |t| t % 8 >= 3),
        ("up", "2, 4", |t| if t >= 6 { t - 2 } else { t }, |t| t >= 6),
        ("down", "1, 31", |t| if t < 31 { t + 1 } else { t }, |t| t < 31),
        ("down", "16, 31", |t| if t < 16 { t + 16 } else { t }, |t| t < 16),
        ("down", "2, 0x181f", |t| if t % 8 < 6 { t + 2 } else { t }, |t| t % 8 < 6),
        ("down", "2, 20", |t| if t <= 18 { t + 2 } else { t }, |t| t <= 18),
        ("bfly", "1, 31", |t| t ^ 1, |_| true),
        ("bfly", "21, 31", |t| t ^ 21, |_| true),
        ("bfly", "4, 0x1c1f", |t| if t % 8 < 4 { t } else { t - 4 }, |t| t % 8 >= 4),
        ("bfly", "2, 0x1c1f", |t| t ^ 2, |_| true),
        ("idx", "7, 31", |_| 7, |_| true),
        ("idx", "7, 0x181f", |t| t / 8 * 8 + 7, |_| true),
        ("idx", "20, 15", |t| t, |_| false),
        ("idx", "37, 31", |_| 5, |_| true), // five bits count
    ];
    for (mode, operands, from, reached) in table {
        let text = format!(
            "shfl.sync.{mode}.b32 $d0|$d1, $0, {operands}, -1; shfl.sync.{mode}.b32 $d2, $0, {operands}, 0xffffffff;"
        );
        cases.push(
            new(&format!("shfl.sync.{mode}.b32"))
                .takes(B32, |t| 1000 + t)
                .gives(B32, move |t| 1000 + from(t))
                .gives(Pred, move |t| u64::from(reached(t)))
                .gives(B32, move |t| 1000 + from(t))
                .body(&text),
        );
    }
    // Each lane asks for another; the result replaces the source.
    let text = "shfl.sync.idx.b32 $d, $0, $1, 31, -1;";
    cases.push(
        new("shfl.sync.idx.b32")
            .takes(B32, |t| 1000 + t)
            .takes(B32, |t| 7 * t + 3)
            .gives(B32, |t| 1000 + (7 * t + 3) % 32)
            .body(text),
    );
    let text = "mov.b32 $d, $0; shfl.sync.bfly.b32 $d, $d, 16, 31, -1;";
    cases.push(new("shfl.sync.bfly.b32").takes(B32, |t| t).gives(B32, |t| t ^ 16).body(text));
    // The two halves of a warp at different instructions.
    let text = "setp.lt.u32 %p0, %t, 16; @%p0 bra LOW; shfl.sync.bfly.b32 $d, $0, 1, 31, 0xffff0000; bra DONE;
                LOW:
                shfl.sync.down.b32 $d, $0, 1, 15, 0x0000ffff;
                DONE:";
    cases.push(
        new("shfl.sync")
            .takes(B32, |t| t)
            .gives(B32, |t| {
                if t < 15 {
                    t + 1
                } else if t == 15 {
                    15
                } else {
                    t ^ 1
                }
            })
            .body(text),
    );
}

fn votes(cases: &mut Vec<Case>) {
    // Which lanes say yes, and what all, any, uni and ballot make of it.
    for (mask, all, any, uni) in
        [(0u64, 0, 0, 1), (0xffff_ffff, 1, 1, 1), (0x8000_0001, 0, 1, 0), (0xffff_fffe, 0, 1, 0)]
    {
        let text = "vote.sync.all.pred $d0, $0, -1; vote.sync.any.pred $d1, $0, -1; vote.sync.uni.pred $d2, $0, -1;
                    vote.sync.ballot.b32 $d3, $0, -1; vote.sync.all.pred $d4, !$0, -1;
                    vote.sync.ballot.b32 $d5, !$0, -1;";
        cases.push(
            new("vote.sync")
                .takes(Pred, move |t| mask >> t & 1)
                .gives(Pred, move |_| all)
                .gives(Pred, move |_| any)
                .gives(Pred, move |_| uni)
                .gives(B32, move |_| mask)
                .gives(Pred, move |_| u64::from(mask == 0))
                .gives(B32, move |_| 0xffff_ffff - mask)
                .body(text),
        );
    }
    // Only members count: lanes 16 to 31 all say yes.
    let text = "setp.lt.u32 %p0, %t, 16; mov.b32 $d, 5; @%p0 bra DONE; vote.sync.all.pred %p1, $0, 0xffff0000;
                vote.sync.ballot.b32 %w2, $0, 0xffff0000; selp.b32 $d, %w2, 0, %p1;
                DONE:";
    cases.push(
        new("vote.sync")
            .takes(Pred, |t| u64::from(t >= 16))
            .gives(B32, |t| if t < 16 { 5 } else { 0xffff_0000 })
            .body(text),
    );
}

fn matches(cases: &mut Vec<Case>) {
    // Values t mod 3: lanes 0, 3, …, 30 are 0x49249249.
    let thirds = |t: u64| [0x4924_9249, 0x9249_2492, 0x2492_4924][t as usize % 3];
    let text = "match.any.sync.b32 $d, $0, -1;";
    cases.push(new("match.any.sync.b32").takes(B32, |t| t % 3).gives(B32, thirds).body(text));
    let text = "match.any.sync.b64 $d, $0, -1;";
    cases.push(new("match.any.sync.b64").takes(B64, |t| (t % 3) << 40).gives(B32, thirds).body(text));
    for (odd, mask) in [(0, 0xffff_ffff), (1, 0)] {
        let text =
            "match.all.sync.b32 $d0|$d1, $0, -1; match.all.sync.b64 $d2|$d3, $1, -1; match.all.sync.b32 $d4, $0, -1;";
        let yes = u64::from(mask != 0);
        cases.push(
            new("match.all.sync")
                .takes(B32, move |t| 7 + if t == 9 { odd } else { 0 })
                .takes(B64, move |t| 7 + if t == 9 { odd << 40 } else { 0 })
                .gives(B32, move |_| mask)
                .gives(Pred, move |_| yes)
                .gives(B32, move |_| mask)
                .gives(Pred, move |_| yes)
                .gives(B32, move |_| mask)
                .body(text),
        );
    }
}

fn reductions(cases: &mut Vec<Case>) {
    // Lane t gives t − 4: 0 + … + 31 − 4 · 32 = 368.
    for (op, result) in [
        ("add.s32", 368),
        ("add.u32", 368),
        ("min.s32", 0xffff_fffc),
        ("max.s32", 27),
        ("min.u32", 0),
        ("max.u32", 0xffff_ffff),
        ("and.b32", 0),
        ("or.b32", 0xffff_ffff),
        // Lanes 4 to 31 give 0 to 27, whose xor is 27 ^ 26 ^ 25 ^ 24 = 0; −4 to −1 cancel as well.
        ("xor.b32", 0),
    ] {
        let text = format!("redux.sync.{op} $d, $0, -1;");
        cases.push(
            new(&format!("redux.sync.{op}"))
                .takes(B32, |t| t.wrapping_sub(4) & 0xffff_ffff)
                .gives(B32, move |_| result)
                .body(&text),
        );
    }
    let text = "redux.sync.and.b32 $d0, $0, -1; redux.sync.xor.b32 $d1, $1, -1;";
    cases.push(
        new("redux.sync")
            .takes(B32, |t| 0xf0f0_0000 | t)
            .takes(B32, |t| 1 << t)
            .gives(B32, |_| 0xf0f0_0000)
            .gives(B32, |_| 0xffff_ffff)
            .body(text),
    );
    // Of the upper half only: 16 + … + 31 = 376.
    let text = "mov.b32 $d, 1; setp.lt.u32 %p0, %t, 16; @!%p0 redux.sync.add.u32 $d, $0, 0xffff0000;";
    cases.push(new("redux.sync.add.u32").takes(B32, |t| t).gives(B32, |t| if t < 16 { 1 } else { 376 }).body(text));
}
