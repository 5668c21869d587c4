// SPDX-License-Identifier: MIT OR Apache-2.0
//! Branches, loops, ends, guards: lanes that part and meet again.

use super::case::Case;
use super::case::Ty::B32;

const FAMILY: &str = "control";

fn new(name: &str) -> Case {
    Case::new(FAMILY, name, 32)
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Both sides, and what comes after them.
    let text = "setp.lt.u32 %p0, %t, 10; @%p0 bra LOW; add.u32 $d, %t, 100; bra.uni DONE;
                LOW:
                add.u32 $d, %t, 200;
                DONE:
                add.u32 $d, $d, 1;";
    cases.push(new("bra").gives(B32, |t| t + if t < 10 { 201 } else { 101 }).body(text));
    // Nested, with an exchange of all lanes after they have met.
    let text = "and.b32 %w2, %t, 1; setp.eq.u32 %p0, %w2, 0; and.b32 %w2, %t, 2; setp.eq.u32 %p1, %w2, 0;
                @%p0 bra EVEN; @%p1 bra A; mov.u32 %w3, 3; bra DONE;
                A:
                mov.u32 %w3, 1; bra DONE;
                EVEN:
                @!%p1 bra B; mov.u32 %w3, 0; bra DONE;
                B:
                mov.u32 %w3, 2;
                DONE:
                bar.warp.sync -1; shfl.sync.bfly.b32 $d, %w3, 3, 31, -1;";
    cases.push(new("bra nested").gives(B32, |t| 3 - t % 4).body(text));
    // A loop of as many turns as the lane's number: 0 + 1 + … + t.
    let text = "mov.u32 %w2, 0; mov.u32 %w3, 0;
                LOOP:
                add.u32 %w3, %w3, %w2; add.u32 %w2, %w2, 1; setp.le.u32 %p0, %w2, %t; @%p0 bra LOOP; bar.warp.sync -1;
                shfl.sync.idx.b32 %w4, %w3, 31, 31, -1; add.u32 $d, %w3, %w4;";
    cases.push(new("bra loop").gives(B32, |t| t * (t + 1) / 2 + 496).body(text));
    // A loop inside a loop, left from the middle.
    let text = "mov.u32 %w2, 0; mov.u32 $d, 0;
                OUTER:
                mov.u32 %w3, 0;
                INNER:
                add.u32 $d, $d, 1; setp.eq.u32 %p0, %w3, %t; @%p0 bra NEXT; add.u32 %w3, %w3, 1;
                setp.lt.u32 %p0, %w3, 5; @%p0 bra INNER;
                NEXT:
                add.u32 %w2, %w2, 1; setp.lt.u32 %p0, %w2, 3; @%p0 bra OUTER;";
    cases.push(new("bra loops").gives(B32, |t| 3 * (t + 1).min(5)).body(text));
    // A name that is used again in a scope of its own.
    let text = "mov.u32 $d, 1; { .reg .b32 %w2; mov.u32 %w2, 5; bra SKIP; mov.u32 %w2, 6;
                SKIP:
                add.u32 $d, $d, %w2; } { .reg .b32 %w2; mov.u32 %w2, 50; bra SKIP; mov.u32 %w2, 60;
                SKIP:
                add.u32 $d, $d, %w2; }";
    cases.push(new("scopes").gives(B32, |_| 56).body(text));
    // Guards: both senses, a predicate that changes, results that stay where the guard says no.
    let text = "mov.u32 $d, 7; setp.lt.u32 %p0, %t, 8; @%p0 mov.u32 $d, 70; setp.gt.u32 %p0, %t, 20;
                @%p0 add.u32 $d, $d, 1; @!%p0 add.u32 $d, $d, 2;";
    cases.push(
        new("guards")
            .gives(B32, |t| {
                if t < 8 {
                    72
                } else if t > 20 {
                    8
                } else {
                    9
                }
            })
            .body(text),
    );
    // Results stored before the end stay; what follows is not done.
    for end in ["exit", "ret", "ret.uni"] {
        let guard = if end == "ret.uni" { "" } else { "@%p0 " };
        let text = format!(
            "mad.wide.u32 %q0, %t, 4, %mem; st.global.u32 [%q0], 1; setp.ge.u32 %p0, %t, 12; {guard}{end};
             st.global.u32 [%q0], 2; bar.warp.sync 0x00000fff; shfl.sync.bfly.b32 %w2, %t, 1, 31, 0xfff;
             st.global.u32 [%q0], %w2;"
        );
        let after = (0..32u64).map(|t| if t < 12 && end != "ret.uni" { (t ^ 1).into() } else { 1.into() }).collect();
        cases.push(new(end).memory(vec![0; 128], after).body(&text));
    }
    // The last, partial warp: lanes that do not exist are in no lane's way.
    let text = ".shared .align 4 .b8 s[256]; mov.u32 %w3, s; mad.lo.u32 %w2, %t, 4, %w3; st.shared.u32 [%w2], %t;
                bar.sync 0; sub.u32 %w4, 39, %t; mad.lo.u32 %w2, %w4, 4, %w3; ld.shared.u32 $d, [%w2];";
    cases.push(Case::new(FAMILY, "partial warp", 40).gives(B32, |t| 39 - t).body(text));
    tables(&mut cases);
    // Lanes of one warp that wait for each other: the even ones for what the odd ones write.
    let text = "and.b32 %w2, %t, 1; setp.eq.u32 %p0, %w2, 1; mov.u32 $d, 1; @%p0 bra WRITE;
                WAIT:
                nanosleep.u32 20; ld.volatile.global.u32 %w3, [%mem]; setp.eq.u32 %p1, %w3, 0; @%p1 bra WAIT;
                bra DONE;
                WRITE:
                st.volatile.global.u32 [%mem], 1;
                DONE:";
    cases.push(new("nanosleep").gives(B32, |_| 1).memory(vec![0; 4], vec![1.into()]).body(text));
    cases
}

/// Jumps by a table, registers that change hands, and the order between launches.
fn tables(cases: &mut Vec<Case>) {
    // Four ways, in no order; two entries name the same label.
    let ways = |op: &str, index: &str| {
        format!(
            "{index}
             T: .branchtargets A, B, C, B;
             mov.u32 %w3, 1; {op} %w2, T;
             A: mov.u32 $d, 10; bra DONE;
             B: add.u32 $d, %w2, 20; bra DONE;
             C: mov.u32 $d, 30;
             DONE:
             add.u32 $d, $d, %w3; bar.warp.sync -1; shfl.sync.bfly.b32 $d, $d, 1, 31, -1;"
        )
    };
    let gives = |k: u64| [11, 22, 31, 24][k as usize];
    let case = new("brx.idx").gives(B32, move |t| gives((t ^ 1) % 7 % 4));
    cases.push(case.body(&ways("brx.idx", "rem.u32 %w2, %t, 7; and.b32 %w2, %w2, 3;")));
    for k in 0..4 {
        let case = new("brx.idx.uni").gives(B32, move |_| gives(k));
        cases.push(case.body(&ways("brx.idx.uni", &format!("mov.u32 %w2, {k};"))));
    }
    // Lanes that the guard keeps from jumping go on behind it.
    let text = "and.b32 %w2, %t, 1; setp.lt.u32 %p0, %t, 20; mov.u32 $d, 5;
                T: .branchtargets A, B;
                @%p0 brx.idx %w2, T;
                mov.u32 $d, 7; bra DONE;
                A: mov.u32 $d, 8;
                B: add.u32 $d, $d, 1;
                DONE:
                bar.warp.sync -1;";
    let given = |t: u64| match t {
        20.. => 7,
        t if t % 2 == 0 => 9,
        _ => 6,
    };
    cases.push(new("brx.idx guarded").gives(B32, given).body(text));
    // Nothing is launched together with these kernels.
    let text = "griddepcontrol.launch_dependents; griddepcontrol.wait; add.u32 $d, %t, 3;";
    cases.push(new("griddepcontrol").sm(90).gives(B32, |t| t + 3).body(text));
}
