// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention over ranges of one's own, its backward, and the small calls around them.

use std::ptr::{null, null_mut};

use cpattn_capi::*;

use crate::{
    bytes::{Bytes, called, size},
    world::{Owned, World},
};

pub fn a_range(b: &mut Bytes) -> cpattn_range {
    let stripe = b.below(4) as u32;
    cpattn_range {
        row: b.number(8),
        pos: b.number(32),
        len: if b.rarely() { b.word() as u32 } else { b.below(9) as u32 },
        block: if b.rarely() { 0 } else { 1 + stripe },
        period: if b.rarely() { b.word() as u32 } else { 1 + stripe + b.below(4) as u32 },
        doc: u32::from(b.byte() & 15 == 15),
    }
}

pub fn single_calls(w: &mut World, b: &mut Bytes) {
    let scratch = w.scratch(b);
    let (n, h, group, d, dv) = (
        b.below(17) as i64,
        1 + b.below(4) as i64,
        1 + b.below(2) as i64,
        1 + b.below(20) as i64,
        1 + b.below(20) as i64,
    );
    let hq = h * group;
    let bits = [16, 32, 32, 64][b.below(4) as usize];
    let acc = if bits == 64 { 64 } else { 32 };
    w.used = 0;
    let k: Vec<cpattn_range> = (0..b.below(4)).map(|_| a_range(b)).collect();
    let mut pairs: Vec<cpattn_pair> = (0..b.below(5))
        .map(|_| cpattn_pair { k: b.below(k.len().max(1) as u64) as u32 + u32::from(b.rarely()), band: 0 })
        .collect();
    let q: Vec<cpattn_q_range> = (0..b.below(3))
        .map(|_| {
            let range = a_range(b);
            cpattn_q_range {
                range,
                // Draws nothing, so that the inputs that are kept mean what they meant.
                document: if range.pos & 3 == 3 { [8, 8 >> (range.pos & 4)] } else { [0; 2] },
                keys_begin: b.below(2) as u32,
                keys_end: b.below(pairs.len() as u64 + 2) as u32,
                mode: b.below(5) as u8,
                reserved: [u8::from(b.rarely()); 7],
            }
        })
        .collect();
    // Bands of the numbers that are drawn for ranges, so that the inputs that are kept mean what they meant.
    let whole = cpattn_band {
        q_begin: i64::MIN,
        q_end: i64::MAX,
        k_begin: i64::MIN,
        k_end: i64::MAX,
        low: i64::MIN,
        high: i64::MAX,
        shift: 0,
    };
    let mut bands = vec![whole];
    for r in k.iter().filter(|r| r.pos & 1 == 1) {
        let (pos, len) = (r.pos, i64::from(r.len));
        bands.push(match r.period & 3 {
            0 => cpattn_band { high: pos, ..whole },
            1 => cpattn_band { low: -len, high: len, shift: pos, ..whole },
            2 => cpattn_band { q_begin: 1, k_end: 5, shift: pos.wrapping_mul(pos), ..whole },
            _ => cpattn_band { q_end: pos, k_begin: 2, low: pos, ..whole },
        });
    }
    for (i, pair) in pairs.iter_mut().enumerate().filter(|(i, _)| i & 1 == 1) {
        pair.band = (i % bands.len()) as u32;
    }
    let ranges = cpattn_ranges {
        q: q.as_ptr(),
        q_count: q.len(),
        k: k.as_ptr(),
        k_count: k.len(),
        pairs: pairs.as_ptr(),
        pair_count: pairs.len(),
        bands: bands.as_ptr(),
        band_count: bands.len(),
    };
    let heads = cpattn_head_map {
        q_offset: if b.rarely() { b.word() as u32 } else { 0 },
        kv_offset: if b.rarely() { b.word() as u32 } else { 0 },
        group: if b.rarely() { b.word() as u32 } else { group as u32 },
    };
    let score = cpattn_score {
        scale: b.f64(),
        softcap: if b.byte() & 3 == 3 { b.f64() } else { 0.0 },
        window_left: if b.byte() & 1 == 0 { i64::MAX } else { b.number(16) },
        window_right: if b.byte() & 1 == 0 { 0 } else { b.number(16) },
    };
    let slopes = [[2, hq].as_slice(), &[hq]][usize::from(b.byte() & 1 == 0)].to_vec();
    let mut t: Vec<Owned> = [
        (&[n, hq, d][..], bits),
        (&[n, h, d], bits),
        (&[n, h, dv], bits),
        (&[n, hq, dv], acc),
        (&[n, hq, dv], bits),
        (&[hq, n], acc),
        (&slopes, 32),
        (&[hq], 32),
        (&[hq, n], acc),
        (&[n, hq, d], acc),
        (&[n, h, d], acc),
        (&[n, h, dv], acc),
        (&[n, hq, dv], acc),
        (&[hq], acc),
    ]
    .into_iter()
    .map(|(shape, bits)| w.tensor(shape, bits, b))
    .collect();
    let p: Vec<*const cpattn_tensor> = t.iter_mut().map(Owned::as_ptr).collect();
    let maybe = |i: usize, b: &mut Bytes| if b.byte() & 1 == 0 { null() } else { p[i] };
    let aligned = b.number(2) as i32;
    let perhaps = if b.byte() & 1 == 0 { null_mut() } else { scratch };
    let mut lists = 0;
    unsafe {
        match b.below(8) {
            0 | 1 => {
                let mut words = w.tensor(&[hq, n, 2], acc, b);
                let args = cpattn_attend_args {
                    struct_size: size::<cpattn_attend_args>(b),
                    q: p[0],
                    k: p[1],
                    v: p[2],
                    running: maybe(3, b),
                    o: maybe(4, b),
                    lse: p[5],
                    alibi_slopes: maybe(6, b),
                    sinks: maybe(7, b),
                    heads,
                    aligned,
                    score,
                    ranges,
                    stream: null_mut(),
                    running_lse: if b.byte() & 1 == 0 { null() } else { words.as_ptr() },
                    q_range_size: b.below(2) as usize * core::mem::size_of::<cpattn_q_range>(),
                    pair_size: b.below(2) as usize * core::mem::size_of::<u32>(),
                    max_logit: if b.rarely() { p[5] } else { core::ptr::null() },
                };
                called(cpattn_attend_metadata(scratch, &args, &mut lists));
                called(cpattn_attend(scratch, &args));
            }
            2 | 3 => {
                let gradients = b.number(3) as i32;
                let (dq, dkv) = (gradients != 2, gradients != 1);
                let args = cpattn_attend_backward_args {
                    struct_size: size::<cpattn_attend_backward_args>(b),
                    q: p[0],
                    k: p[1],
                    v: p[2],
                    d_o: p[4],
                    lse: p[5],
                    delta: p[8],
                    dq: if dq { p[9] } else { null() },
                    dk: if dkv { p[10] } else { null() },
                    dv: if dkv { p[11] } else { null() },
                    alibi_slopes: maybe(6, b),
                    heads,
                    accumulate_keys: b.number(2) as i32,
                    per_q_head: i32::from(group == 1 && b.byte() & 1 == 1),
                    gradients,
                    aligned,
                    reserved: 0,
                    score,
                    ranges,
                    stream: null_mut(),
                    q_range_size: 0,
                    pair_size: 0,
                };
                called(cpattn_attend_backward_metadata(scratch, &args, &mut lists));
                called(cpattn_attend_backward(scratch, &args));
            }
            4 => {
                called(cpattn_delta(perhaps, p[4], if b.byte() & 1 == 0 { p[4] } else { p[3] }, p[8], null_mut()));
            }
            5 => {
                called(cpattn_finish(perhaps, p[4], p[5], maybe(7, b), k.as_ptr(), k.len(), null_mut()));
            }
            6 => {
                called(cpattn_sink_gradient(perhaps, p[5], p[8], p[7], p[13], null_mut()));
                called(cpattn_sink_total(p[13], p[7]));
                called(cpattn_merge(perhaps, p[3], p[5], p[12], p[8], null_mut()));
            }
            _ => {
                let count = b.below(4) as usize;
                let list = [p[4], p[3], p[12], p[4]];
                called(cpattn_transform(
                    perhaps,
                    p[12 - 9 * (count & 1)],
                    list.as_ptr(),
                    if b.rarely() { 65 } else { count },
                    null_mut(),
                ));
            }
        }
    }
}
