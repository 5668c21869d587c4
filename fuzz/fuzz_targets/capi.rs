// SPDX-License-Identifier: MIT OR Apache-2.0
//! The C calls with arbitrary bytes, sizes and handles.
//!
//! Each input is a program: bytes choose a call and its arguments. What C cannot promise away is left to chance: flags,
//! enums, sizes, strides, offsets, types, null, handles that are dead, of another kind or no handles at all. What only
//! the caller can know is kept: memory behind a tensor is as long as its shape and strides reach, arrays as long as
//! their counts. Handles are destroyed at the end, so a leak is a leak of the library.
//!
//! Every so often the number of calls so far is printed.
#![no_main]

use std::{
    ffi::{CStr, c_void},
    ptr::{null, null_mut},
    sync::atomic::{AtomicU64, Ordering},
};

use cpattn::ffi::*;
use libfuzzer_sys::fuzz_target;

static CALLS: AtomicU64 = AtomicU64::new(0);
const CPU: cpattn_dl_device = cpattn_dl_device { device_type: 1, device_id: 0 };

/// Input bytes; zeros when they run out.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    fn below(&mut self, n: u64) -> u64 {
        u64::from(self.byte()) % n
    }

    /// Mostly small, sometimes anything.
    fn number(&mut self, small: u64) -> i64 {
        match self.byte() {
            0 => self.word() as i64,
            1 => -1,
            b => (u64::from(b) % small) as i64,
        }
    }

    fn rarely(&mut self) -> bool {
        self.byte() == 255
    }

    fn f64(&mut self) -> f64 {
        match self.byte() {
            0 => f64::from_bits(self.word()),
            b => f64::from(b) / 64.0,
        }
    }
}

/// Memory of a run: everything that tensors may point to, in one block whose ends AddressSanitizer watches.
struct World {
    memory: Vec<u64>,
    plans: Vec<*mut cpattn_plan>,
    ranks: Vec<*mut cpattn_rank>,
    scratches: Vec<*mut cpattn_scratch>,
    dead: Vec<*mut c_void>,
    used: usize,
}

/// A tensor with what its pointers point to.
struct Owned {
    shape: Box<[i64]>,
    strides: Option<Box<[i64]>>,
    t: cpattn_tensor,
}

impl Owned {
    fn as_ptr(&mut self) -> *const cpattn_tensor {
        self.t.shape = self.shape.as_mut_ptr();
        self.t.strides = self.strides.as_mut().map_or(null_mut(), |s| s.as_mut_ptr());
        &raw const self.t
    }
}

impl World {
    fn handle<T>(list: &[*mut T], others: [*mut c_void; 2], b: &mut Bytes) -> *mut T {
        match b.byte() {
            0 => null_mut(),
            1 => others[0].cast(),
            2 => others[1].cast(),
            3 => std::ptr::without_provenance_mut(b.word() as usize),
            n => list.get(n as usize % list.len().max(1)).copied().unwrap_or(null_mut()),
        }
    }

    fn strange(&self, b: &mut Bytes) -> [*mut c_void; 2] {
        let dead = self.dead.get(b.byte() as usize % self.dead.len().max(1)).copied().unwrap_or(null_mut());
        let other = match b.below(3) {
            0 => self.plans.last().map_or(null_mut(), |p| p.cast()),
            1 => self.ranks.last().map_or(null_mut(), |p| p.cast()),
            _ => self.scratches.last().map_or(null_mut(), |p| p.cast()),
        };
        [dead, other]
    }

    fn plan(&mut self, b: &mut Bytes) -> *mut cpattn_plan {
        let others = self.strange(b);
        Self::handle(&self.plans, others, b)
    }

    fn rank(&mut self, b: &mut Bytes) -> *mut cpattn_rank {
        let others = self.strange(b);
        Self::handle(&self.ranks, others, b)
    }

    fn scratch(&mut self, b: &mut Bytes) -> *mut cpattn_scratch {
        let others = self.strange(b);
        Self::handle(&self.scratches, others, b)
    }

    /// A tensor of about `shape` (or of any), whose elements lie in the world's memory, or nowhere.
    fn tensor(&mut self, shape: &[i64], bits: u8, b: &mut Bytes) -> Owned {
        let odd = b.byte();
        let mut shape: Box<[i64]> = shape.into();
        if odd & 7 == 7 {
            let at = b.byte() as usize % shape.len();
            shape[at] = b.number(9);
        }
        let mut dtype = cpattn_dl_dtype { code: 2, bits, lanes: 1 };
        if odd & 24 == 24 {
            dtype = cpattn_dl_dtype { code: b.below(6) as u8, bits: b.byte(), lanes: 1 + u16::from(b.rarely()) };
        }
        let mut strides: Option<Box<[i64]>> = None;
        if odd & 96 == 96 {
            strides = Some(shape.iter().map(|_| b.number(64)).collect());
        }
        let mut byte_offset = 0;
        if odd & 128 == 128 {
            byte_offset = b.number(64) as u64;
        }
        let ndim = if b.rarely() { b.byte() as i32 - 2 } else { shape.len() as i32 };
        // The arrays are as long as ndim says.
        let n = ndim.clamp(1, 64) as usize;
        let mut long = shape.to_vec();
        long.resize(n, 2);
        shape = long.into();
        strides = strides.map(|s| {
            let mut long = s.to_vec();
            long.resize(n, 1);
            long.into()
        });
        // How far the elements reach, in bytes.
        let (mut reach, mut compact, mut empty, mut legal) = (0i128, 1i128, false, true);
        for d in (0..n).rev() {
            let s = strides.as_ref().map_or(compact, |s| i128::from(s[d]));
            empty |= shape[d] == 0;
            legal &= shape[d] >= 0 && s >= 0;
            reach = reach.saturating_add(i128::from(shape[d] - i64::from(shape[d] > 0)).saturating_mul(s));
            compact = compact.saturating_mul(i128::from(shape[d].max(1)));
        }
        let size = i128::from(dtype.bits / 8).max(1);
        let bytes = reach.saturating_add(1).saturating_mul(size).saturating_add(i128::from(byte_offset));
        let room = (self.memory.len() * 8) as i128;
        let device = if b.rarely() { cpattn_dl_device { device_type: b.byte().into(), device_id: b.byte().into() } } else { CPU };
        let base = self.memory.as_mut_ptr().cast::<u8>();
        let data = if b.rarely() {
            null_mut()
        } else if empty || !legal {
            base
        } else if bytes <= room {
            // Side by side as long as there is room, so that most tensors share nothing.
            let mut at = self.used.next_multiple_of(8);
            if at as i128 + bytes > room || b.rarely() {
                at = (b.byte() as usize * 8) % (room - bytes + 1) as usize;
            }
            self.used = at + bytes as usize;
            base.wrapping_add(at)
        } else if bytes > isize::MAX as i128 {
            // Must be refused for its reach.
            base
        } else {
            null_mut()
        };
        let t = cpattn_tensor {
            data: data.cast(),
            device,
            ndim,
            dtype,
            shape: null_mut(),
            strides: null_mut(),
            byte_offset,
        };
        Owned { shape, strides, t }
    }
}

fn size<T>(b: &mut Bytes) -> usize {
    // A longer struct would be read beyond its end: sizes beyond ours are left to the unit tests.
    if b.rarely() { b.byte() as usize % size_of::<T>() } else { size_of::<T>() }
}

fn called(status: i32) -> i32 {
    assert!((0..=8).contains(&status), "status {status}: {:?}", unsafe { CStr::from_ptr(cpattn_last_error()) });
    let n = CALLS.fetch_add(1, Ordering::Relaxed) + 1;
    if n % (1 << 20) == 0 {
        eprintln!("calls: {n}");
    }
    status
}

fn create_plan(w: &mut World, b: &mut Bytes) {
    let documents = b.below(5) as usize;
    let mut cu = vec![0i32];
    for _ in 0..documents {
        let last = *cu.last().unwrap();
        cu.push(if b.rarely() { b.word() as i32 } else { last.saturating_add(b.below(48) as i32) });
    }
    let cross = b.byte() & 3 == 3;
    let mut cu_k = vec![0i32];
    let mut starts = vec![];
    for _ in 0..documents {
        cu_k.push(cu_k.last().unwrap() + b.below(32) as i32);
        starts.push(b.number(16));
    }
    let heads = if b.rarely() { b.word() as u32 } else { b.below(9) as u32 };
    let slopes: Vec<f32> = (0..heads.min(64)).map(|_| f32::from(b.byte()) / 16.0).collect();
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
        reserved: i32::from(b.rarely()),
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
        gather: b.number(2) as i32,
        reproducible: b.number(2) as i32,
        pack_inputs: b.number(2) as i32,
        reserved: 0,
    };
    let mut options = options;
    if b.byte() & 1 == 0 {
        // One rank: these run.
        (options.world, options.ulysses, options.ring) = (1, 1, 1);
    }
    let mut plan = null_mut();
    if called(unsafe { cpattn_plan_create(&problem, &options, &mut plan) }) == 0 {
        w.plans.push(plan);
    }
}

fn ask_plan(w: &mut World, b: &mut Bytes) {
    let plan = w.plan(b);
    let rank = b.number(8) as u32;
    let mut info = cpattn_plan_info {
        struct_size: size::<cpattn_plan_info>(b),
        replicas: 0,
        ring: 0,
        ulysses: 0,
        layout: 0,
        layout_parameter: 0,
        reserved: 0,
        q_tokens: u64::MAX,
        k_tokens: u64::MAX,
        fingerprint: 0,
    };
    unsafe {
        let known = called(cpattn_plan_describe(plan, &mut info)) == 0;
        let small = known && info.q_tokens < 400 && info.k_tokens < 400;
        match b.below(6) {
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
            n => {
                let mut list = vec![0i64; b.byte() as usize];
                let side = b.number(2) as i32;
                let call = if n & 1 == 0 { cpattn_plan_tokens } else { cpattn_plan_positions };
                called(call(plan, side, rank, list.as_mut_ptr(), list.len()));
            }
        }
    }
}

/// Rows of a plan's rank 0, and its shape, if the plan lives.
fn share_of(plan: *const cpattn_plan, b: &mut Bytes) -> Option<(i64, i64)> {
    let mut s = cpattn_share {
        struct_size: size::<cpattn_share>(b),
        replica: 0,
        ring: 0,
        ulysses: 0,
        reserved: 0,
        q_tokens: 0,
        k_tokens: 0,
        q_head_begin: 0,
        q_head_end: 0,
        kv_head_begin: 0,
        kv_head_end: 0,
    };
    let ok = called(unsafe { cpattn_plan_share(plan, 0, &mut s) }) == 0;
    (ok && s.q_tokens < 4000 && s.k_tokens < 4000).then_some((s.q_tokens as i64, s.k_tokens as i64))
}

fn move_rows(w: &mut World, b: &mut Bytes) {
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

fn create_rank(w: &mut World, b: &mut Bytes) {
    let world = 1 + b.below(3) as u32;
    let mut transports = vec![null_mut(); world as usize];
    let asked = if b.rarely() { 0 } else { world };
    if called(unsafe { cpattn_local_group(asked, b.below(3), transports.as_mut_ptr()) }) != 0 {
        return;
    }
    for t in transports {
        let options = cpattn_rank_options {
            struct_size: size::<cpattn_rank_options>(b),
            workers: b.below(3) as u32,
            device_type: if b.rarely() { 2 } else { 1 },
            device_id: 0,
            reserved: 0,
        };
        let mut rank = null_mut();
        let options = if b.byte() & 1 == 0 { null() } else { &raw const options };
        let ok = called(unsafe { cpattn_rank_create(t, options, &mut rank) }) == 0;
        w.dead.push(t.cast());
        if ok {
            w.ranks.push(rank);
        } else {
            called(unsafe { cpattn_transport_destroy(t) });
        }
        called(unsafe { cpattn_transport_destroy(t) });
    }
}

unsafe extern "C" fn fails(_: *mut c_void, _: u32, _: u32, _: u64, _: *mut u64, blame: *mut i64) -> i32 {
    unsafe { *blame = 7 };
    3
}
unsafe extern "C" fn nothing(_: *mut c_void, _: *const std::ffi::c_char, _: u32, _: *const cpattn_message, _: usize, _: *const cpattn_message, _: usize, _: *mut c_void, _: *mut i64) -> i32 {
    0
}
unsafe extern "C" fn fine(_: *mut c_void, _: *mut i64) -> i32 {
    0
}
unsafe extern "C" fn ends(_: *mut c_void) {}

fn create_transport(w: &mut World, b: &mut Bytes) {
    let table = cpattn_transport_table {
        struct_size: size::<cpattn_transport_table>(b),
        context: null_mut(),
        rank: b.below(4) as u32,
        world: b.number(6) as u32 & 0xffff,
        agree: if b.rarely() { None } else { Some(fails) },
        exchange: if b.rarely() { None } else { Some(nothing) },
        poll: if b.rarely() { None } else { Some(fine) },
        abort: if b.rarely() { None } else { Some(ends) },
        release: if b.byte() & 1 == 0 { None } else { Some(ends) },
    };
    let (mut transport, mut rank) = (null_mut(), null_mut());
    if called(unsafe { cpattn_transport_create(&table, &mut transport) }) == 0 {
        w.dead.push(transport.cast());
        if called(unsafe { cpattn_rank_create(transport, null(), &mut rank) }) == 0 {
            w.ranks.push(rank);
        }
    }
}

fn run(w: &mut World, b: &mut Bytes) {
    let (rank, plan) = (w.rank(b), w.plan(b));
    if b.rarely() {
        let (at, bytes) = (b.byte() as usize, b.byte() as usize * 8);
        let memory = w.memory.as_mut_ptr().cast::<u8>().wrapping_add(at);
        called(unsafe { cpattn_rank_lend_workspace(rank, memory.cast(), if b.rarely() { usize::MAX } else { bytes }) });
        // Tensors may lie there too: lend no more.
        if let Some(at) = w.ranks.iter().position(|&r| r == rank) {
            let rank = w.ranks.swap_remove(at);
            called(unsafe { cpattn_rank_destroy(rank) });
            w.dead.push(rank.cast());
        }
        return;
    }
    let Some((nq, nk)) = share_of(plan, b) else { return };
    let mut share = [0u32; 0];
    let _ = &mut share;
    let (h, hk, d, dv) = (1 + b.below(8) as i64, 1 + b.below(4) as i64, 1 + b.below(16) as i64, 1 + b.below(16) as i64);
    let bits = [16, 32, 32, 64][b.below(4) as usize];
    let acc = if bits == 64 { 64 } else { 32 };
    w.used = 0;
    let mut t: Vec<Owned> = [
        (&[nq, h, d][..], bits),
        (&[nk, hk, d], bits),
        (&[nk, hk, dv], bits),
        (&[h], 32),
        (&[nq, h, dv], bits),
        (&[h, nq], acc),
        (&[nq, h, dv], bits),
        (&[nq, h, d], bits),
        (&[nk, hk, d], bits),
        (&[nk, hk, dv], bits),
        (&[h], acc),
    ]
    .into_iter()
    .map(|(shape, bits)| w.tensor(shape, bits, b))
    .collect();
    let p: Vec<*const cpattn_tensor> = t.iter_mut().map(Owned::as_ptr).collect();
    let sinks = b.byte() & 3 == 3;
    let optional = |i: usize| if sinks { p[i] } else { null() };
    unsafe {
        if b.byte() & 1 == 0 {
            let args = cpattn_forward_args {
                struct_size: size::<cpattn_forward_args>(b),
                q: p[0],
                k: p[1],
                v: p[2],
                sinks: optional(3),
                o: p[4],
                lse: p[5],
                stream: if b.rarely() { p[0].cast_mut().cast() } else { null_mut() },
            };
            called(cpattn_forward(rank, plan, &args));
        } else {
            let args = cpattn_backward_args {
                struct_size: size::<cpattn_backward_args>(b),
                q: p[0],
                k: p[1],
                v: p[2],
                sinks: optional(3),
                o: p[4],
                lse: p[5],
                d_o: p[6],
                dq: p[7],
                dk: p[8],
                dv: p[9],
                dsinks: optional(10),
                stream: null_mut(),
            };
            called(cpattn_backward(rank, plan, &args));
        }
        called(cpattn_rank_poll(rank));
        if b.rarely() {
            called(cpattn_rank_abort(rank));
        }
        if b.rarely() {
            called(cpattn_rank_prepare(rank, plan, b.number(2) as i32));
        }
    }
}

fn a_range(b: &mut Bytes) -> cpattn_range {
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

fn pieces(w: &mut World, b: &mut Bytes) {
    let scratch = w.scratch(b);
    let (n, h, group, d, dv) =
        (b.below(17) as i64, 1 + b.below(4) as i64, 1 + b.below(2) as i64, 1 + b.below(20) as i64, 1 + b.below(20) as i64);
    let hq = h * group;
    let bits = [16, 32, 32, 64][b.below(4) as usize];
    let acc = if bits == 64 { 64 } else { 32 };
    w.used = 0;
    let k: Vec<cpattn_range> = (0..b.below(4)).map(|_| a_range(b)).collect();
    let pairs: Vec<u32> = (0..b.below(5)).map(|_| b.below(k.len().max(1) as u64) as u32 + u32::from(b.rarely())).collect();
    let q: Vec<cpattn_q_range> = (0..b.below(3))
        .map(|_| cpattn_q_range {
            range: a_range(b),
            keys_begin: b.below(2) as u32,
            keys_end: b.below(pairs.len() as u64 + 2) as u32,
            mode: b.below(5) as u8,
            reserved: [u8::from(b.rarely()); 7],
        })
        .collect();
    let ranges = cpattn_ranges {
        q: q.as_ptr(),
        q_count: q.len(),
        k: k.as_ptr(),
        k_count: k.len(),
        pairs: pairs.as_ptr(),
        pair_count: pairs.len(),
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
    let mut t: Vec<Owned> = [
        (&[n, hq, d][..], bits),
        (&[n, h, d], bits),
        (&[n, h, dv], bits),
        (&[n, hq, dv], acc),
        (&[n, hq, dv], bits),
        (&[hq, n], acc),
        (&[hq], 32),
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
                let args = cpattn_attend_args {
                    struct_size: size::<cpattn_attend_args>(b),
                    q: p[0],
                    k: p[1],
                    v: p[2],
                    running: maybe(3, b),
                    o: maybe(4, b),
                    lse: p[5],
                    slopes: maybe(6, b),
                    sinks: maybe(7, b),
                    heads,
                    aligned,
                    score,
                    ranges,
                    stream: null_mut(),
                };
                called(cpattn_attend_lists(scratch, &args, &mut lists));
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
                    slopes: maybe(6, b),
                    heads,
                    accumulate_keys: b.number(2) as i32,
                    per_q_head: i32::from(group == 1 && b.byte() & 1 == 1),
                    gradients,
                    aligned,
                    reserved: 0,
                    score,
                    ranges,
                    stream: null_mut(),
                };
                called(cpattn_attend_backward_lists(scratch, &args, &mut lists));
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
                called(cpattn_merge(perhaps, p[3], p[5], p[12], p[8], null_mut()));
            }
            _ => {
                let count = b.below(4) as usize;
                let list = [p[4], p[3], p[12], p[4]];
                called(cpattn_transform(perhaps, p[12 - 9 * (count & 1)], list.as_ptr(), if b.rarely() { 65 } else { count }, null_mut()));
            }
        }
    }
}

fuzz_target!(|data: &[u8]| {
    let mut b = Bytes(data);
    let seed = b.byte();
    let mut w = World {
        memory: (0..6000u64).map(|i| (i ^ u64::from(seed)).wrapping_mul(0x3f80_0000_9e37_79b9)).collect(),
        plans: vec![],
        ranks: vec![],
        scratches: vec![],
        dead: vec![],
        used: 0,
    };
    while !b.0.is_empty() {
        match b.below(12) {
            0 | 1 if w.plans.len() < 6 => create_plan(&mut w, &mut b),
            2 => ask_plan(&mut w, &mut b),
            3 => move_rows(&mut w, &mut b),
            4 if w.ranks.len() < 4 => create_rank(&mut w, &mut b),
            5 if w.ranks.len() < 4 => create_transport(&mut w, &mut b),
            6 if w.scratches.len() < 3 => {
                let mut scratch = null_mut();
                if called(unsafe { cpattn_scratch_create(b.below(3) as u32, &mut scratch) }) == 0 {
                    w.scratches.push(scratch);
                    called(unsafe { cpattn_scratch_reserve(scratch, b.number(4) as i32, b.number(32) as u32, b.number(32) as u32) });
                }
            }
            7 | 8 => run(&mut w, &mut b),
            9 if b.byte() & 7 == 7 => {
                // An early end.
                if let Some(p) = w.plans.pop() {
                    called(unsafe { cpattn_plan_destroy(p) });
                    w.dead.push(p.cast());
                }
                if let Some(s) = w.scratches.pop() {
                    called(unsafe { cpattn_scratch_destroy(s) });
                    w.dead.push(s.cast());
                }
            }
            10 => {
                let others = w.strange(&mut b);
                // Dead, or of another kind: refused by all but the right function, which is not called on live ones.
                called(unsafe { cpattn_transport_destroy(others[usize::from(b.byte() & 1)].cast()) });
                let name = unsafe { CStr::from_ptr(cpattn_status_name(b.number(12) as i32)) };
                assert!(!name.is_empty() && !cpattn_last_error().is_null());
            }
            _ => pieces(&mut w, &mut b),
        }
    }
    for p in w.plans {
        assert_eq!(called(unsafe { cpattn_plan_destroy(p) }), 0);
    }
    for r in w.ranks {
        assert_eq!(called(unsafe { cpattn_rank_destroy(r) }), 0);
    }
    for s in w.scratches {
        assert_eq!(called(unsafe { cpattn_scratch_destroy(s) }), 0);
    }
});
