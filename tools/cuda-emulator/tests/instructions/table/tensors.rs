// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tensor copies: boxes of one to five dimensions, over every edge of their tensors, with every swizzle.
//!
//! The number of an element names its place in memory, so that a box in shared memory shows what was copied where. What
//! is expected is worked out element by element: its place in the box, that place in the tensor, whether there is such
//! an element; and for a swizzle, which piece of 16 bytes of its row the manual exchanges it with.

use super::case::Ty::B32;
use super::case::{Case, Float, Map, Want};
use super::rows::f;

const FAMILY: &str = "tensors";

/// `%w3` is a box in shared memory, `%w5` a barrier of one arrival, `%q2` the map, `%p0` thread 0.
fn start(bytes: u32) -> String {
    format!(
        ".shared .align 1024 .b8 s[{bytes}]; .shared .align 8 .b8 bar[8]; mov.u32 %w3, s; mov.u32 %w5, bar; mov.b64 %q2, map;
         cvta.param.u64 %q2, %q2; setp.eq.u32 %p0, %t, 0; @%p0 mbarrier.init.shared.b64 [%w5], 1; bar.sync 0;
         "
    )
}

fn list(at: &[i32]) -> String {
    format!("{{{}}}", at.iter().map(|c| c.to_string()).collect::<Vec<_>>().join(", "))
}

/// Coordinates of element k of a box of this shape.
fn place(k: u64, shape: &[u32]) -> Vec<i64> {
    let mut rest = k;
    let mut out = Vec::new();
    for &n in shape {
        out.push((rest % u64::from(n)) as i64);
        rest /= u64::from(n);
    }
    out
}

/// The byte in memory of the element that a box at these coordinates has at k; `None` outside of the tensor.
fn source(map: &Map, at: &[i32], k: u64, bytes: u64) -> Option<u64> {
    let mut byte = 0;
    for (d, inside) in place(k, &map.shape).into_iter().enumerate() {
        let c = inside + i64::from(at[d]);
        if c < 0 || c >= map.dims[d] as i64 {
            return None;
        }
        byte += c as u64 * if d == 0 { bytes } else { map.strides[d - 1] };
    }
    Some(byte)
}

/// A tensor of f32 with a box of 32 words, for each rank: dimensions, strides in bytes, box.
fn of_rank(rank: usize) -> Map {
    let (dims, strides, shape): (&[u64], &[u64], &[u32]) = match rank {
        1 => (&[50], &[], &[32]),
        2 => (&[11, 6], &[48], &[8, 4]),
        3 => (&[7, 5, 3], &[32, 160], &[4, 4, 2]),
        4 => (&[6, 3, 4, 2], &[32, 96, 400], &[4, 2, 2, 2]),
        _ => (&[5, 3, 2, 3, 2], &[32, 96, 208, 640], &[4, 2, 2, 1, 2]),
    };
    Map {
        element: 7,
        dims: dims.to_vec(),
        strides: strides.to_vec(),
        shape: shape.to_vec(),
        swizzle: 0,
        fill_nan: false,
    }
}

/// Boxes inside of the tensor, over its end, before its beginning, and outside altogether.
fn corners(map: &Map) -> Vec<Vec<i32>> {
    let rank = map.dims.len();
    let inside = vec![1; rank];
    let mut out = vec![vec![0; rank], inside.clone()];
    for d in 0..rank {
        let mut at = inside.clone();
        at[d] = map.dims[d] as i32 - 1;
        out.push(at.clone());
        at[d] = 1 - map.shape[d] as i32;
        out.push(at.clone());
        at[d] = map.dims[d] as i32 + 3;
        out.push(at);
    }
    let mut seen = Vec::new();
    out.retain(|at| {
        !seen.contains(at) && {
            seen.push(at.clone());
            true
        }
    });
    out
}

const WORDS: u32 = 600;

/// Word k of memory is k + 1.
fn memory() -> Vec<u8> {
    (1..=WORDS).flat_map(u32::to_le_bytes).collect()
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for rank in 1..=5 {
        loads(&mut cases, rank);
        stores(&mut cases, rank);
    }
    for swizzle in 0..=3 {
        swizzles(&mut cases, swizzle);
    }
    cases
}

fn loads(cases: &mut Vec<Case>, rank: usize) {
    let op = format!("cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes");
    let tiled = op.replace(".global.", ".global.tile.");
    for (k, at) in corners(&of_rank(rank)).into_iter().enumerate() {
        let map = Map { fill_nan: k % 3 == 2, ..of_rank(rank) };
        let want = |t: u64| match source(&map, &at, t, 4) {
            Some(byte) => Want::Bits(byte / 4 + 1),
            None if map.fill_nan => Want::Nan(Float::F32),
            None => Want::Bits(0),
        };
        let copy = match k % 3 {
            0 => format!("@%p0 {op} [%w3], [%q2, {}], [%w5];", list(&at)),
            1 => format!(
                "createpolicy.fractional.L2::evict_first.b64 %q1, 1.0; @%p0 {op}.L2::cache_hint [%w3], [%q2, {}], [%w5], %q1;",
                list(&at)
            ),
            _ => format!(
                "@%p0 prefetch.tensormap [%q2]; @%p0 cp.async.bulk.prefetch.tensor.{rank}d.L2.global [%q2, {0}]; @%p0 {tiled} [%w3], [%q2, {0}], [%w5];",
                list(&at)
            ),
        };
        // The whole box is announced, whatever part of it there is.
        let text = format!(
            "{}@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%w5], 128; {copy}
             WAIT:
             mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0; @!%p1 bra WAIT;
             mad.lo.u32 %w2, %t, 4, %w3; ld.shared.u32 $d, [%w2];",
            start(128)
        );
        let case = Case::new(FAMILY, &format!("{op} {at:?}"), 32).sm(90).memory(memory(), Vec::new());
        cases.push(case.map("map", map.clone()).gives(B32, want).body(&text));
    }
}

fn stores(cases: &mut Vec<Case>, rank: usize) {
    let op = format!("cp.async.bulk.tensor.{rank}d.global.shared::cta.bulk_group");
    let add = format!("cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.bulk_group");
    for (k, at) in corners(&of_rank(rank)).into_iter().enumerate() {
        let (map, adds) = (of_rank(rank), k % 2 == 1);
        // Memory holds 1000 everywhere, the box 1, 2, …, 32.
        let before = |_: u32| 1000f32.to_bits();
        let mut after: Vec<Want> = (0..WORDS).map(|k| Want::Bits(before(k).into())).collect();
        for e in 0..32u64 {
            if let Some(byte) = source(&map, &at, e, 4) {
                let x = (e + 1) as f32 + if adds { 1000.0 } else { 0.0 };
                after[byte as usize / 4] = Want::Bits(f(x));
            }
        }
        let op = if adds { &add } else { &op };
        let (hint, policy) = if k % 4 == 3 { (".L2::cache_hint", ", %q1") } else { ("", "") };
        let text = format!(
            "{}mad.lo.u32 %w2, %t, 4, %w3; st.shared.u32 [%w2], $0; fence.proxy.async.shared::cta; bar.sync 0;
             createpolicy.fractional.L2::evict_last.b64 %q1, 1.0; @%p0 {op}{hint} [%q2, {}], [%w3]{policy};
             cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;",
            start(128),
            list(&at)
        );
        let memory = (0..WORDS).flat_map(|k| before(k).to_le_bytes()).collect();
        let case = Case::new(FAMILY, &format!("{op} {at:?}"), 32).sm(90).memory(memory, after);
        cases.push(case.map("map", map).takes(B32, |t| f((t + 1) as f32)).body(&text));
    }
}

/// 16 rows of 16-bit elements, as wide as the swizzle, from a tensor that the box leaves on two sides.
fn swizzles(cases: &mut Vec<Case>, swizzle: u32) {
    let width = 16 << swizzle;
    let columns = u64::from(width) / 2;
    let map = Map {
        element: 1,
        dims: vec![columns + 8, 20],
        strides: vec![u64::from(width) + 32],
        shape: vec![columns as u32, 16],
        swizzle,
        fill_nan: false,
    };
    let at = [16, 7];
    let halves = 20 * (u64::from(width) + 32) / 2;
    let number = |byte: u64| byte / 2 % 60000 + 1;
    // In rows of 128 bytes, piece p of row r lies at p exclusive-or r; narrower rows share those of 128 bytes.
    let stored = |e: u64| {
        let (r, c) = (e / columns, e % columns * 2);
        let row = r * u64::from(width) / 128;
        let piece = if swizzle == 0 { c / 16 } else { (c / 16) ^ (row % (u64::from(width) / 16)) };
        r * u64::from(width) + 16 * piece + c % 16
    };
    let mut want = vec![0u64; 4 * width as usize];
    for e in 0..16 * columns {
        let v = source(&map, &at, e, 2).map_or(0, number);
        want[stored(e) as usize / 4] |= v << (stored(e) % 4 * 8);
    }
    let bytes = 16 * width;
    let memory: Vec<u8> = (0..halves).flat_map(|k| (number(2 * k) as u16).to_le_bytes()).collect();
    let text = format!(
        "{}@%p0 mbarrier.arrive.expect_tx.shared.b64 _, [%w5], {bytes};
         @%p0 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%w3], [%q2, {}], [%w5];
         WAIT:
         mbarrier.try_wait.parity.shared.b64 %p1, [%w5], 0; @!%p1 bra WAIT;
         mad.lo.u32 %w2, %t, 4, %w3; ld.shared.u32 $d, [%w2];",
        start(bytes),
        list(&at)
    );
    let case = Case::new(FAMILY, &format!("cp.async.bulk.tensor swizzle {width}"), bytes / 4).sm(90);
    let case = case.memory(memory.clone(), Vec::new()).map("map", map.clone());
    cases.push(case.gives(B32, |t| want[t as usize]).body(&text));
    // And back: what lies there is taken apart again, and only what is in the tensor is written.
    let mut after = vec![0u8; memory.len()];
    for e in 0..16 * columns {
        if let Some(byte) = source(&map, &at, e, 2) {
            let v = (stored(e) / 2 + 1) as u16;
            after[byte as usize..byte as usize + 2].copy_from_slice(&v.to_le_bytes());
        }
    }
    let word = |w: &[u8]| Want::Bits(u32::from_le_bytes([w[0], w[1], w[2], w[3]]).into());
    let text = format!(
        "{}mad.lo.u32 %w2, %t, 4, %w3; st.shared.u32 [%w2], $0; fence.proxy.async.shared::cta; bar.sync 0;
         @%p0 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%q2, {}], [%w3];
         cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;",
        start(bytes),
        list(&at)
    );
    let case = Case::new(FAMILY, &format!("cp.async.bulk.tensor swizzle {width}, back"), bytes / 4).sm(90);
    let case = case.memory(vec![0; memory.len()], after.chunks_exact(4).map(word).collect()).map("map", map);
    cases.push(case.takes(B32, |t| (2 * t + 1) | (2 * t + 2) << 16).body(&text));
}
