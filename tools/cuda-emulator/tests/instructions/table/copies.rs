// SPDX-License-Identifier: MIT OR Apache-2.0
//! `cp.async`: sizes, zero fill, ignored sources, groups.
//!
//! Each thread copies into its own 16 bytes of shared memory, which hold aa before, and reads them after the wait.

use super::case::Case;
use super::case::Ty::{B32, Pred};

const FAMILY: &str = "copies";

/// Word k of the source of thread t.
fn word(t: u64, k: u64) -> u64 {
    0x0101_0000 * (t + 1) + k
}

fn source() -> Vec<u8> {
    (0..32).flat_map(|t| (0..8).flat_map(move |k| (word(t, k) as u32).to_le_bytes())).collect()
}

/// `%w2` is the destination, `%q0` the source: 32 bytes a thread.
const REACH: &str = ".shared .align 16 .b8 s[1024]; mov.u32 %w3, s; shl.b32 %w2, %t, 5; add.u32 %w2, %w2, %w3;
                     mov.b32 %w4, 0xaaaaaaaa; st.shared.v4.b32 [%w2], {%w4, %w4, %w4, %w4};
                     st.shared.v4.b32 [%w2+16], {%w4, %w4, %w4, %w4}; mad.wide.u32 %q0, %t, 32, %mem;
                     ";
const READ: &str = "
                    ld.shared.v4.b32 {$d0, $d1, $d2, $d3}, [%w2];";

/// A case whose sixteen bytes are these four words afterwards.
fn copy(name: &str, body: &str, after: fn(u64) -> [u64; 4]) -> Case {
    let mut c = Case::new(FAMILY, name, 32).memory(source(), Vec::new());
    for k in 0..4 {
        c = c.gives(B32, move |t| after(t)[k]);
    }
    c.body(&format!("{REACH}{body}{READ}"))
}

pub fn cases() -> Vec<Case> {
    const A: u64 = 0xaaaa_aaaa;
    let wait = "cp.async.wait_all;";
    let mut cases = Vec::new();
    for (op, to, after) in [
        ("cp.async.ca.shared.global", "4, 4", (|t| [A, word(t, 0), A, A]) as fn(u64) -> [u64; 4]),
        ("cp.async.ca.shared.global", "8, 8", |t| [A, A, word(t, 0), word(t, 1)]),
        ("cp.async.ca.shared.global", "0, 16", |t| [word(t, 0), word(t, 1), word(t, 2), word(t, 3)]),
        ("cp.async.cg.shared.global", "0, 16", |t| [word(t, 0), word(t, 1), word(t, 2), word(t, 3)]),
        ("cp.async.cg.shared.global.L2::128B", "0, 16", |t| [word(t, 0), word(t, 1), word(t, 2), word(t, 3)]),
    ] {
        let (at, size) = to.split_once(", ").unwrap_or_default();
        cases.push(copy(op, &format!("{op} [%w2+{at}], [%q0], {size}; {wait}"), after));
    }
    // The rest is zeros.
    for (size, after) in [
        (0, (|_| [0; 4]) as fn(u64) -> [u64; 4]),
        (1, |_| [0; 4]),
        (3, |t| [word(t, 0) & 0xff_ffff, 0, 0, 0]),
        (4, |t| [word(t, 0), 0, 0, 0]),
        (12, |t| [word(t, 0), word(t, 1), word(t, 2), 0]),
        (16, |t| [word(t, 0), word(t, 1), word(t, 2), word(t, 3)]),
    ] {
        // The first byte of a source is 0.
        cases.push(copy(
            "cp.async zero fill",
            &format!("mov.u32 %w5, {size}; cp.async.cg.shared.global [%w2], [%q0], 16, %w5; {wait}"),
            after,
        ));
    }
    cases.push(copy(
        "cp.async zero fill",
        &format!("cp.async.ca.shared.global [%w2+8], [%q0+16], 8, 4; {wait}"),
        |t| [A, A, word(t, 4), 0],
    ));
    let by_lane = "and.b32 %w5, %t, 3; shl.b32 %w5, %w5, 2; cp.async.ca.shared.global [%w2], [%q0], 16, %w5;
                   ";
    cases.push(copy("cp.async zero fill", &format!("{by_lane}{wait}"), |t| {
        std::array::from_fn(|k| if (k as u64) < t % 4 { word(t, k as u64) } else { 0 })
    }));
    // A source that is ignored is not read: here it is nowhere.
    let mut c = copy(
        "cp.async ignore-src",
        &format!("selp.b64 %q0, 0, %q0, $0; cp.async.cg.shared.global [%w2], [%q0], 16, $0; {wait}"),
        |t| std::array::from_fn(|k| if t % 2 == 1 { 0 } else { word(t, k as u64) }),
    );
    c = c.takes(Pred, |t| t % 2);
    cases.push(c);
    groups(&mut cases);
    // Another thread's copy, after its wait and a barrier of the warp.
    let mut c = Case::new(FAMILY, "cp.async", 32).memory(source(), Vec::new());
    for k in 0..4 {
        c = c.gives(B32, move |t| word(t ^ 5, k));
    }
    cases.push(c.body(&format!(
        "{REACH}cp.async.cg.shared.global [%w2], [%q0], 16; {wait} bar.warp.sync -1; xor.b32 %w2, %t, 5;
         shl.b32 %w2, %w2, 5; add.u32 %w2, %w2, %w3;{READ}"
    )));
    cases
}

/// Two groups in flight: the first is there when one may still be missing.
fn groups(cases: &mut Vec<Case>) {
    let start = "cp.async.cg.shared.global [%w2], [%q0], 16; cp.async.commit_group;
                 cp.async.cg.shared.global [%w2+16], [%q0+16], 16; cp.async.commit_group;
                 ";
    let first = |t| [word(t, 0), word(t, 1), word(t, 2), word(t, 3)];
    let second = |t| [word(t, 4), word(t, 5), word(t, 6), word(t, 7)];
    cases.push(copy("cp.async.wait_group 1", &format!("{start}cp.async.wait_group 1;"), first));
    cases.push(copy("cp.async.wait_group 0", &format!("{start}cp.async.wait_group 0; add.u32 %w2, %w2, 16;"), second));
    // An empty group counts as one.
    let empty = format!("{start}cp.async.commit_group; cp.async.wait_group 1; add.u32 %w2, %w2, 16;");
    cases.push(copy("cp.async.commit_group", &empty, second));
    // What is in no group is waited for by wait_all alone.
    let loose = "cp.async.ca.shared.global [%w2], [%q0+16], 16; cp.async.wait_all;";
    cases.push(copy("cp.async.wait_all", loose, second));
}
