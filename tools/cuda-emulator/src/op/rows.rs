// SPDX-License-Identifier: MIT OR Apache-2.0
//! Arithmetic on rows: one closure per opcode, lifted over the 32 lanes of a warp.
//!
//! A closure such as `|a: u32, b: u32| a.wrapping_add(b)` carries its operand types, so the table of opcodes is the
//! decoder as well: the types say how wide each row must be. Every opcode is compiled twice, once plainly and once for
//! AVX2 and FMA; which of the two is used is decided when a module is loaded. Without FMA, `fma.rn.f32` is a library
//! call and matrix products take ten times as long.
//!
//! Rows are either the same or disjoint, so a chunk is read whole before it is written.

use super::{Cx, Flow, Ins, OpFn};

/// What a lane holds, for the decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    B16,
    B32,
    B64,
    F32,
    F64,
}

impl Kind {
    /// Whether lanes take 64-bit slots.
    pub(crate) fn wide(self) -> bool {
        matches!(self, Kind::B64 | Kind::F64)
    }
}

/// A type that lanes can hold.
pub(crate) trait Lane: Copy {
    type Slot: Copy + Default;
    const KIND: Kind;
    fn from_slot(s: Self::Slot) -> Self;
    fn to_slot(self) -> Self::Slot;
}

macro_rules! lane {
    ($($t:ty, $slot:ty, $kind:ident, $from:expr, $to:expr;)*) => {$(
        impl Lane for $t {
            type Slot = $slot;
            const KIND: Kind = Kind::$kind;
            #[inline(always)]
            fn from_slot(s: $slot) -> Self {
                let f: fn($slot) -> $t = $from;
                f(s)
            }
            #[inline(always)]
            fn to_slot(self) -> $slot {
                let f: fn($t) -> $slot = $to;
                f(self)
            }
        }
    )*};
}

/// f16 bits in a 16-bit register.
#[derive(Clone, Copy)]
pub(crate) struct F16(pub(crate) u16);
/// bf16 bits in a 16-bit register.
#[derive(Clone, Copy)]
pub(crate) struct Bf16(pub(crate) u16);

lane! {
    u16, u32, B16, |s| s as u16, |v| u32::from(v);
    i16, u32, B16, |s| s as i16, |v| i32::from(v) as u32;
    u8, u32, B16, |s| s as u8, |v| u32::from(v);
    i8, u32, B16, |s| s as i8, |v| i32::from(v) as u32;
    F16, u32, B16, |s| F16(s as u16), |v| u32::from(v.0);
    Bf16, u32, B16, |s| Bf16(s as u16), |v| u32::from(v.0);
    u32, u32, B32, |s| s, |v| v;
    i32, u32, B32, |s| s as i32, |v| v as u32;
    f32, u32, F32, f32::from_bits, f32::to_bits;
    u64, u64, B64, |s| s, |v| v;
    i64, u64, B64, |s| s as i64, |v| v as u64;
    f64, u64, F64, f64::from_bits, f64::to_bits;
}

const CHUNK: usize = 8;

/// Conjures the closure back from its type: it captures nothing.
#[inline(always)]
fn closure<F: Copy>() -> F {
    const { assert!(size_of::<F>() == 0, "an opcode's closure must not capture") };
    // SAFETY: a value without bytes is read from a dangling, aligned, non-null pointer; the type was inhabited when
    // the table was built from a value of it.
    unsafe { std::ptr::NonNull::<F>::dangling().as_ptr().read() }
}

#[inline(always)]
unsafe fn chunk<T: Lane>(row: *const u32, k: usize) -> [T::Slot; CHUNK] {
    // SAFETY: the caller passes a row of 32 slots of this width and k ≤ 32 − CHUNK.
    unsafe { row.cast::<T::Slot>().add(k).cast::<[T::Slot; CHUNK]>().read_unaligned() }
}

#[inline(always)]
unsafe fn lane<T: Lane>(row: *const u32, l: usize) -> T {
    // SAFETY: as `chunk`, for one slot.
    T::from_slot(unsafe { row.cast::<T::Slot>().add(l).read_unaligned() })
}

#[inline(always)]
unsafe fn set<T: Lane>(row: *mut u32, l: usize, v: T) {
    // SAFETY: as `chunk`, for one slot.
    unsafe { row.cast::<T::Slot>().add(l).write_unaligned(v.to_slot()) }
}

macro_rules! lifted {
    ($body:ident, $v3:ident, $plain:ident, $pick:ident, $rare:ident, $rare_pick:ident; $($arg:ident $field:ident $ty:ident),*) => {
        #[inline(always)]
        unsafe fn $body<$($ty: Lane,)* R: Lane, F: Fn($($ty),*) -> R + Copy>(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
            let f = closure::<F>();
            let d = cx.row(i.dst);
            $(let $arg = cx.row(i.$field);)*
            if m == !0 {
                for k in (0..32).step_by(CHUNK) {
                    // SAFETY: the decoder gave each operand a row of the width its type needs.
                    $(let $arg = unsafe { chunk::<$ty>($arg, k) };)*
                    let mut out = [R::Slot::default(); CHUNK];
                    for j in 0..CHUNK {
                        out[j] = f($($ty::from_slot($arg[j])),*).to_slot();
                    }
                    // SAFETY: as above.
                    unsafe { d.cast::<R::Slot>().add(k).cast::<[R::Slot; CHUNK]>().write_unaligned(out) };
                }
            } else {
                let mut rest = m;
                while rest != 0 {
                    let l = rest.trailing_zeros() as usize;
                    rest &= rest - 1;
                    // SAFETY: as above; l is below 32.
                    unsafe { set::<R>(d, l, f($(lane::<$ty>($arg, l)),*)) };
                }
            }
            Flow::Next
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
        unsafe fn $v3<$($ty: Lane,)* R: Lane, F: Fn($($ty),*) -> R + Copy>(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
            // SAFETY: passed on.
            unsafe { $body::<$($ty,)* R, F>(cx, i, m) }
        }

        unsafe fn $plain<$($ty: Lane,)* R: Lane, F: Fn($($ty),*) -> R + Copy>(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
            // SAFETY: passed on.
            unsafe { $body::<$($ty,)* R, F>(cx, i, m) }
        }

        /// The closure lifted over a warp, for the machine this runs on.
        pub(crate) fn $pick<$($ty: Lane,)* R: Lane, F: Fn($($ty),*) -> R + Copy>(_: F) -> OpFn {
            #[cfg(target_arch = "x86_64")]
            if fast() {
                return $v3::<$($ty,)* R, F>;
            }
            $plain::<$($ty,)* R, F>
        }

        unsafe fn $rare<$($ty: Lane,)* R: Lane, F: Fn($($ty),*) -> R + Copy>(cx: &mut Cx, i: &Ins, m: u32) -> Flow {
            let f = closure::<F>();
            let d = cx.row(i.dst);
            $(let $arg = cx.row(i.$field);)*
            for l in super::lanes(m) {
                // SAFETY: the decoder gave each operand a row of the width its type needs; l is below 32.
                unsafe { set::<R>(d, l, f($(lane::<$ty>($arg, l)),*)) };
            }
            Flow::Next
        }

        /// The closure lifted over a warp, lane by lane: for opcodes that are too rare to compile them twice.
        pub(crate) fn $rare_pick<$($ty: Lane,)* R: Lane, F: Fn($($ty),*) -> R + Copy>(_: F) -> OpFn {
            $rare::<$($ty,)* R, F>
        }
    };
}

lifted!(un_body, un_v3, un_plain, un, un_lanes, rare_un; a a A);
lifted!(bin_body, bin_v3, bin_plain, bin, bin_lanes, rare_bin; a a A, b b B);
lifted!(tri_body, tri_v3, tri_plain, tri, tri_lanes, rare_tri; a a A, b b B, c c C);

unsafe fn quad_lanes<A: Lane, B: Lane, C: Lane, E: Lane, R: Lane, F: Fn(A, B, C, E) -> R + Copy>(
    cx: &mut Cx,
    i: &Ins,
    m: u32,
) -> Flow {
    let f = closure::<F>();
    let (d, a, b, c, e) = (cx.row(i.dst), cx.row(i.a), cx.row(i.b), cx.row(i.c), cx.row(i.e));
    for l in super::lanes(m) {
        // SAFETY: the decoder gave each operand a row of the width its type needs; l is below 32.
        unsafe { set::<R>(d, l, f(lane::<A>(a, l), lane::<B>(b, l), lane::<C>(c, l), lane::<E>(e, l))) };
    }
    Flow::Next
}

/// A closure of four operands, lane by lane.
pub(crate) fn rare_quad<A: Lane, B: Lane, C: Lane, E: Lane, R: Lane, F: Fn(A, B, C, E) -> R + Copy>(_: F) -> OpFn {
    quad_lanes::<A, B, C, E, R, F>
}

/// Whether this machine has AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
pub(crate) fn fast() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("bmi1")
        && std::arch::is_x86_feature_detected!("bmi2")
        && std::arch::is_x86_feature_detected!("lzcnt")
        && std::arch::is_x86_feature_detected!("popcnt")
}

macro_rules! compared {
    ($body:ident, $v3:ident, $plain:ident, $pick:ident) => {
        #[inline(always)]
        unsafe fn $body<A: Lane, F: Fn(A, A) -> bool + Copy>(cx: &mut Cx, i: &Ins) -> u32 {
            let f = closure::<F>();
            let (a, b) = (cx.row(i.a), cx.row(i.b));
            let mut out = 0u32;
            for k in (0..32).step_by(CHUNK) {
                // SAFETY: the decoder gave each operand a row of the width its type needs.
                let (x, y) = unsafe { (chunk::<A>(a, k), chunk::<A>(b, k)) };
                for j in 0..CHUNK {
                    out |= u32::from(f(A::from_slot(x[j]), A::from_slot(y[j]))) << (k + j);
                }
            }
            out
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,bmi1,bmi2,lzcnt,popcnt")]
        unsafe fn $v3<A: Lane, F: Fn(A, A) -> bool + Copy>(cx: &mut Cx, i: &Ins) -> u32 {
            // SAFETY: passed on.
            unsafe { $body::<A, F>(cx, i) }
        }
        unsafe fn $plain<A: Lane, F: Fn(A, A) -> bool + Copy>(cx: &mut Cx, i: &Ins) -> u32 {
            // SAFETY: passed on.
            unsafe { $body::<A, F>(cx, i) }
        }
        /// The comparison lifted over a warp: a bit per lane, whatever the mask.
        pub(crate) fn $pick<A: Lane, F: Fn(A, A) -> bool + Copy>(_: F) -> CompareFn {
            #[cfg(target_arch = "x86_64")]
            if fast() {
                return $v3::<A, F>;
            }
            $plain::<A, F>
        }
    };
}

/// A comparison of rows `a` and `b` of an instruction.
pub(crate) type CompareFn = unsafe fn(&mut Cx, &Ins) -> u32;
compared!(compare_body, compare_v3, compare_plain, compare);
