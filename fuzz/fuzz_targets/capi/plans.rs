// SPDX-License-Identifier: MIT OR Apache-2.0
//! Plans: made of anything, asked everything, and the rows they deal moved to shards and back.

use std::ptr::{null, null_mut};

use cpattn_capi::*;

use crate::{
    bytes::{Bytes, called, size},
    world::World,
};

fn a_slice(b: &mut Bytes) -> cpattn_slice {
    let mut token = |most| if b.rarely() { b.word() as i32 } else { b.below(most) as i32 };
    let [q_begin, k_begin] = [token(48), token(48)];
    let (q_end, k_end) = (q_begin.saturating_add(token(32)), k_begin.saturating_add(token(32)));
    let mut limit = |none| if b.byte() & 3 == 0 { none } else { b.number(40) };
    cpattn_slice { q_begin, q_end, k_begin, k_end, q_start: limit(0), low: limit(i64::MIN), high: limit(i64::MAX) }
}

pub fn create_plan(w: &mut World, b: &mut Bytes) {
    let documents = b.below(5) as usize;
    let mut cu = vec![0i32];
    for _ in 0..documents {
        let last = *cu.last().unwrap();
        cu.push(if b.rarely() { b.word() as i32 } else { last.saturating_add(b.below(48) as i32) });
    }
    let form = b.byte();
    let cross = form & 3 == 3;
    let mut cu_k = vec![0i32];
    let mut starts = vec![];
    for _ in 0..documents {
        cu_k.push(cu_k.last().unwrap() + b.below(32) as i32);
        starts.push(b.number(16));
    }
    // Few, so that most of them do not allow the same pair.
    let slices: Vec<cpattn_slice> =
        if form & 0x30 == 0x30 { (0..b.below(4)).map(|_| a_slice(b)).collect() } else { vec![] };
    let heads = if b.rarely() { b.word() as u32 } else { b.below(9) as u32 };
    let slopes: Vec<f32> = (0..heads.min(64) as usize * documents.max(1)).map(|_| f32::from(b.byte()) / 16.0).collect();
    let problem = cpattn_problem {
        struct_size: size::<cpattn_problem>(b),
        cu_seqlens_q: if b.rarely() { null() } else { cu.as_ptr() },
        cu_seqlens_k: if cross { cu_k.as_ptr() } else { null() },
        q_start: if cross && b.byte() & 1 == 1 { starts.as_ptr() } else { null() },
        documents: if b.rarely() { usize::MAX } else { documents },
        heads,
        kv_heads: b.below(5) as u32,
        head_dim: if b.rarely() { b.word() as u32 } else { b.below(24) as u32 },
        value_dim: b.below(24) as u32,
        dtype: b.number(4) as i32,
        kind: i32::from(b.byte() == 3),
        window_left: if b.byte() & 1 == 0 { i64::MAX } else { b.number(40) },
        window_right: if b.byte() & 1 == 0 { 0 } else { b.number(40) },
        scale: if b.byte() & 1 == 0 { 0.0 } else { b.f64() },
        softcap: if b.byte() & 3 == 0 { b.f64() } else { 0.0 },
        alibi_slopes: if b.byte() & 7 == 7 && heads <= 64 { slopes.as_ptr() } else { null() },
        sinks: i32::from(b.byte() & 3 == 3),
        alibi_rows: [0, documents as i32, 0, b.byte().into()][b.below(4) as usize],
        slices: if slices.is_empty() { null() } else { slices.as_ptr() },
        slice_count: slices.len(),
        dropout: if b.byte() & 7 == 7 { b.f64() } else { 0.0 },
    };
    let options = cpattn_options {
        struct_size: size::<cpattn_options>(b),
        world: 1 + b.below(8) as u32,
        ulysses: b.below(4) as u32,
        ring: b.below(4) as u32,
        layout: b.number(6) as i32,
        layout_parameter: b.below(8) as u32,
        passes: b.below(4) as u32,
        circulate: b.number(3) as i32,
        wire: b.number(2) as i32,
        gather: b.number(4) as i32,
        reproducible: b.number(2) as i32,
        pack_inputs: b.number(2) as i32,
        ranks_per_node: b.below(5) as u32,
        circulate_forward: b.number(3) as i32,
        key_rows: b.number(3) as i32,
    };
    let mut options = options;
    if b.byte() & 1 == 0 {
        // One rank: these run.
        (options.world, options.ulysses, options.ring) = (1, 1, 1);
    }
    let mut plan = null_mut();
    let base = w.plans.last().copied().unwrap_or(null_mut());
    if called(unsafe { cpattn_plan_with_tokens_of(base, &problem, &options, &mut plan) }) == 0 {
        let of = |plan| {
            let mut name = 0;
            assert_eq!(called(unsafe { cpattn_plan_distribution(plan, &mut name) }), CPATTN_OK);
            name
        };
        assert_eq!(of(plan), of(base), "other tokens than those of the base");
        called(unsafe { cpattn_plan_destroy(plan) });
    }
    if called(unsafe { cpattn_plan_create(&problem, &options, &mut plan) }) == 0 {
        w.plans.push(plan);
    }
}

pub fn ask_plan(w: &mut World, b: &mut Bytes) {
    let plan = w.plan(b);
    let rank = b.number(8) as u32;
    let mut info = cpattn_plan_info {
        struct_size: size::<cpattn_plan_info>(b),
        q_tokens: u64::MAX,
        k_tokens: u64::MAX,
        ..Default::default()
    };
    unsafe {
        let known = called(cpattn_plan_describe(plan, &mut info)) == 0;
        let small = known && info.q_tokens < 400 && info.k_tokens < 400;
        match b.below(7) {
            0 if small || !known => {
                let mut text = vec![0u8; b.byte() as usize * 16];
                let mut needed = 0;
                called(cpattn_plan_explain(plan, text.as_mut_ptr().cast(), text.len(), &mut needed));
            }
            1 if small && info.ring * info.ulysses <= 4 => {
                // What the caller mixes with a kernel of its own has no schedule of attention to verify.
                let status = called(cpattn_plan_verify(plan));
                assert!(matches!(status, CPATTN_OK | CPATTN_UNSUPPORTED), "a plan that does not verify: {status}");
            }
            2 if small || !known => {
                let mut bytes = 0;
                called(cpattn_plan_workspace(plan, rank, b.number(2) as i32, &mut bytes));
            }
            3 if small || !known => walk_schedule(plan, rank, b),
            n => {
                let mut list = vec![0i64; b.byte() as usize];
                let side = b.number(2) as i32;
                let call = if n & 1 == 0 { cpattn_plan_tokens } else { cpattn_plan_positions };
                called(call(plan, side, rank, list.as_mut_ptr(), list.len()));
            }
        }
    }
}

/// Lists a schedule, and reads all that it points to.
fn walk_schedule(plan: *const cpattn_plan, rank: u32, b: &mut Bytes) {
    let (mut schedule, direction) = (null_mut(), b.number(4) as i32);
    let status = if direction < 2 {
        called(unsafe { cpattn_schedule_create(plan, rank, direction, &mut schedule) })
    } else {
        let (side, dim, dtype) = (b.number(2) as i32, b.number(70) as u32, b.number(4) as i32);
        called(unsafe { cpattn_schedule_create_all_to_all(plan, rank, direction, side, dim, dtype, &mut schedule) })
    };
    if status != CPATTN_OK {
        return;
    }
    unsafe {
        let mut info: cpattn_schedule_info = std::mem::zeroed();
        info.struct_size = size::<cpattn_schedule_info>(b);
        if called(cpattn_schedule_describe(schedule, &mut info)) == CPATTN_OK {
            let buffers = list(info.buffers, info.buffer_count);
            for at in 0..info.op_count {
                let mut op: cpattn_op = std::mem::zeroed();
                op.struct_size = size_of::<cpattn_op>();
                assert_eq!(called(cpattn_schedule_op(schedule, at, &mut op)), CPATTN_OK);
                assert!(op.after < at as i64);
                let sums = list(op.sums, op.sum_count).iter().map(|s| s.dst);
                for v in list(op.messages, op.message_count).iter().map(|m| m.view).chain(sums) {
                    let buffer = &buffers[v.buffer as usize];
                    assert!(v.row + v.rows <= buffer.rows && v.head + v.heads <= buffer.heads);
                }
            }
        }
        called(cpattn_schedule_op(schedule, b.word() as usize, null_mut()));
        assert_eq!(called(cpattn_schedule_destroy(schedule)), CPATTN_OK);
    }
}

/// # Safety
/// An array of the library's.
unsafe fn list<'a, T>(first: *const T, count: usize) -> &'a [T] {
    if count == 0 { &[] } else { unsafe { std::slice::from_raw_parts(first, count) } }
}

/// Rows of a plan's rank 0, and its shape, if the plan lives.
pub fn share_of(plan: *const cpattn_plan, b: &mut Bytes) -> Option<(i64, i64)> {
    let mut s = cpattn_share { struct_size: size::<cpattn_share>(b), ..Default::default() };
    let ok = called(unsafe { cpattn_plan_share(plan, 0, &mut s) }) == 0;
    (ok && s.q_tokens < 4000 && s.k_tokens < 4000).then_some((s.q_tokens as i64, s.k_tokens as i64))
}

pub fn move_rows(w: &mut World, b: &mut Bytes) {
    let plan = w.plan(b);
    let Some((nq, nk)) = share_of(plan, b) else { return };
    let (side, n) = if b.byte() & 1 == 0 { (0, nq) } else { (1, nk) };
    let bits = [8, 16, 32, 64][b.below(4) as usize];
    let inner: Vec<i64> = (0..b.below(3)).map(|_| b.below(5) as i64).collect();
    let shape: Vec<i64> = std::iter::once(n).chain(inner).collect();
    let (mut whole, mut local) = (w.tensor(&shape, bits, b), w.tensor(&shape, bits, b));
    let fill = 0u64;
    unsafe {
        called(match b.below(3) {
            0 => cpattn_plan_shard(plan, side, 0, whole.as_ptr(), local.as_ptr()),
            1 => cpattn_plan_unshard(plan, side, 0, local.as_ptr(), whole.as_ptr()),
            _ => cpattn_plan_shift(plan, 0, b.number(9), (&raw const fill).cast(), whole.as_ptr(), local.as_ptr()),
        });
    }
}
