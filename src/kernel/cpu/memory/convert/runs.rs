// SPDX-License-Identifier: MIT OR Apache-2.0
//! Copies and ordered sums of runs: contiguous elements, of any number, at any address.

use super::{Convert, Four, load, prefetch, store};
use crate::element::Dtype;

/// Adds four vectors to four.
///
/// # Safety
/// As [`Convert`].
#[inline(always)]
unsafe fn plus<V: Convert>(x: Four<V>, y: Four<V>) -> Four<V> {
    // SAFETY: the instruction set of V is present (the contract of this function).
    unsafe { [x[0].add(y[0]), x[1].add(y[1]), x[2].add(y[2]), x[3].add(y[3])] }
}

/// A run of elements: its address and its type, which is never f64.
pub(crate) type ElementRun = (*mut u8, Dtype);

/// `dst = Σ sources`, in their order, for `n` contiguous elements; zeros if there are no sources.
///
/// # Safety
/// As [`Convert`], with `n` elements in each run; `dst` overlaps no source, except that the first source may be `dst`
/// itself.
#[inline(always)]
pub(crate) unsafe fn sum<V: Convert>(
    dst: ElementRun,
    sources: impl Iterator<Item = ElementRun> + Clone,
    n: usize,
    stream: bool,
) {
    let unit = 4 * V::W;
    let (to, dtype) = dst;
    let mut done = 0;
    // SAFETY: all elements touched are below n.
    unsafe {
        if stream {
            // Up to the first aligned vector of results.
            let line = V::W * 4;
            let left = (line - to.addr() % line) % line / dtype.size();
            done = left.min(n);
            part::<V>(dst, sources.clone(), 0, done);
        }
        // Addresses that are not a multiple of the element's size never become aligned; the rows of this crate's
        // tensors do.
        let stream = stream && to.add(done * dtype.size()).addr() % (V::W * 4) == 0;
        while done + unit <= n {
            let mut x = [V::splat(0.0); 4];
            for (j, (from, dtype)) in sources.clone().enumerate() {
                let from = from.add(done * dtype.size());
                prefetch::<V>(from, unit * dtype.size());
                let y = load::<V>(dtype, from);
                x = match (j, dtype) {
                    (0, Dtype::Bf16) => [y[0].quiet(), y[1].quiet(), y[2].quiet(), y[3].quiet()],
                    (0, _) => y,
                    _ => plus(x, y),
                };
            }
            store(x, dtype, to.add(done * dtype.size()), stream);
            done += unit;
        }
        part::<V>(dst, sources, done, n);
    }
}

/// Elements `begin..end`, fewer than a unit, through a buffer on the stack.
///
/// # Safety
/// As [`sum`].
#[inline(always)]
unsafe fn part<V: Convert>(dst: ElementRun, sources: impl Iterator<Item = ElementRun>, begin: usize, end: usize) {
    /// The number of f32 in the widest unit.
    const MOST: usize = 64;
    debug_assert!(4 * V::W <= MOST && end - begin < MOST);
    if begin == end {
        return;
    }
    let mut bytes = [0f32; MOST];
    let on_stack = bytes.as_mut_ptr().cast::<u8>();
    // SAFETY: elements begin..end of each run; the stack has room for a unit of any type.
    unsafe {
        let mut x = [V::splat(0.0); 4];
        for (j, (from, dtype)) in sources.enumerate() {
            let size = dtype.size();
            core::ptr::copy_nonoverlapping(from.add(begin * size), on_stack, (end - begin) * size);
            let y = load::<V>(dtype, on_stack);
            x = match (j, dtype) {
                (0, Dtype::Bf16) => [y[0].quiet(), y[1].quiet(), y[2].quiet(), y[3].quiet()],
                (0, _) => y,
                _ => plus(x, y),
            };
        }
        let (to, dtype) = dst;
        let size = dtype.size();
        store(x, dtype, on_stack, false);
        core::ptr::copy_nonoverlapping(on_stack, to.add(begin * size), (end - begin) * size);
    }
}

/// Copies a run of bytes.
///
/// # Safety
/// As [`Convert`], with `bytes` bytes on both sides, which do not overlap.
#[inline(always)]
pub(crate) unsafe fn copy<V: Convert>(from: *const u8, to: *mut u8, bytes: usize, stream: bool) {
    let line = V::W * 4;
    // SAFETY: all bytes touched are below `bytes`.
    unsafe {
        let mut done = 0;
        if stream {
            done = ((line - to.addr() % line) % line).min(bytes);
            core::ptr::copy_nonoverlapping(from, to, done);
        }
        while done + 4 * line <= bytes {
            // Moves bits without arithmetic.
            prefetch::<V>(from.add(done), 4 * line);
            let x = load::<V>(Dtype::F32, from.add(done));
            store(x, Dtype::F32, to.add(done), stream);
            done += 4 * line;
        }
        while done + line <= bytes {
            prefetch::<V>(from.add(done), line);
            let x = V::load(from.add(done).cast());
            if stream {
                x.stream(to.add(done));
            } else {
                x.store(to.add(done).cast());
            }
            done += line;
        }
        core::ptr::copy_nonoverlapping(from.add(done), to.add(done), bytes - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;
    use crate::kernel::cpu::vector::portable::FourLanes;
    use alloc::{vec, vec::Vec};
    use half::{bf16, f16};

    const DTYPES: [Dtype; 3] = [Dtype::F16, Dtype::Bf16, Dtype::F32];

    /// One element as the rest of the crate converts it.
    fn one(dtype: Dtype, bytes: &[u8]) -> f32 {
        let half = || u16::from_ne_bytes([bytes[0], bytes[1]]);
        match dtype {
            Dtype::F16 => f16::from_bits(half()).widen(),
            Dtype::Bf16 => bf16::from_bits(half()).widen(),
            _ => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        }
    }

    fn rounded(dtype: Dtype, x: f32) -> Vec<u8> {
        match dtype {
            Dtype::F16 => f16::narrow(x).to_bits().to_ne_bytes().to_vec(),
            Dtype::Bf16 => bf16::narrow(x).to_bits().to_ne_bytes().to_vec(),
            _ => x.to_bits().to_ne_bytes().to_vec(),
        }
    }

    /// Checks the results of `sum`, and that it touches nothing else: for every half and every kind of f32, at every
    /// offset of a line, in every length up to some units.
    ///
    /// # Safety
    /// The instruction set of `V` is present.
    unsafe fn check<V: Convert>() {
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 32) as u32
        };
        for from in DTYPES {
            // All 65,536 halves; among 65,536 random f32 all exponents, and so NaN, infinities and subnormals.
            let mut bytes: Vec<u8> = match from {
                Dtype::F32 => (0..65_536).flat_map(|_| next().to_ne_bytes()).collect(),
                _ => (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect(),
            };
            for to in DTYPES {
                let mut out = vec![0u8; 65_536 * to.size()];
                let n = 65_536;
                // SAFETY: both have so many elements.
                unsafe { sum::<V>((out.as_mut_ptr(), to), [(bytes.as_mut_ptr(), from)].into_iter(), n, false) };
                for (i, found) in out.chunks(to.size()).enumerate() {
                    let x = one(from, &bytes[i * from.size()..]);
                    let expected =
                        if from == to { bytes[i * to.size()..][..to.size()].to_vec() } else { rounded(to, x) };
                    // A copy from a half to the same type may make a NaN quiet, as does the conversion of single
                    // elements.
                    assert!(found == expected || found == rounded(to, x), "{from:?} to {to:?}: {x:e} gives {found:?}");
                }
            }
        }
        for (length, shift) in [(0, 0), (1, 2), (15, 4), (63, 60), (64, 0), (65, 4), (200, 20), (1000, 36)] {
            for to in DTYPES {
                for stream in [false, true] {
                    let shift = shift / to.size() * to.size();
                    let size = to.size();
                    let (mut a, mut b): (Vec<f32>, Vec<bf16>) =
                        (0..length).map(|_| (next() as f32 / 1e9, bf16::from_f32(next() as f32 / 1e9))).unzip();
                    let mut memory = vec![0xa5u8; length * size + 256];
                    let start = memory.as_mut_ptr().align_offset(64) + shift;
                    let sources = [
                        (a.as_mut_ptr().cast(), Dtype::F32),
                        (b.as_mut_ptr().cast(), Dtype::Bf16),
                        (a.as_mut_ptr().cast(), Dtype::F32),
                    ];
                    // SAFETY: `length` elements of each lie in `memory` and the sources; the caller has checked the
                    // instruction set of V.
                    unsafe {
                        sum::<V>((memory.as_mut_ptr().add(start), to), sources.iter().copied(), length, stream);
                        V::finished();
                    }
                    for i in 0..length {
                        let expected = rounded(to, a[i] + b[i].to_f32() + a[i]);
                        assert_eq!(&memory[start + i * size..][..size], expected, "{to:?} {length} {shift} {stream}");
                    }
                    let outside = |x: &[u8]| x.iter().all(|&x| x == 0xa5);
                    assert!(outside(&memory[..start]) && outside(&memory[start + length * size..]));
                    let from: Vec<u8> = (0..length * size).map(|_| next() as u8).collect();
                    // SAFETY: as above.
                    unsafe {
                        copy::<V>(from.as_ptr(), memory.as_mut_ptr().add(start), length * size, stream);
                        V::finished();
                    }
                    assert_eq!(&memory[start..][..length * size], from);
                    assert!(outside(&memory[..start]) && outside(&memory[start + length * size..]));
                }
            }
        }
    }

    #[test]
    fn every_instruction_set_rounds_alike() {
        // SAFETY: arrays are always there, and the others are asked for.
        unsafe {
            check::<FourLanes<f32>>();
            #[cfg(target_arch = "aarch64")]
            check::<crate::kernel::cpu::vector::neon::Floats>();
            #[cfg(target_arch = "x86_64")]
            {
                if crate::kernel::cpu::vector::x86::has_avx2() && std::is_x86_feature_detected!("f16c") {
                    check::<core::arch::x86_64::__m256>();
                }
                if crate::kernel::cpu::vector::x86::has_avx512() {
                    check::<core::arch::x86_64::__m512>();
                }
            }
        }
    }
}
