// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tiles, threads and shared memory of every compiled shape: the numbers of `ptx/shared/shapes.cuh`.

/// How one kernel of a shape is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel::cuda) struct Shaped {
    /// Rows of its own side that one block holds.
    pub rows: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

/// The kernels for head dims up to `head_dim` and `value_dim`.
#[derive(Clone, Copy, Debug)]
pub(in crate::kernel::cuda) struct Shape {
    /// As in the names of the files.
    pub name: u32,
    pub head_dim: u32,
    pub value_dim: u32,
    pub forward: Shaped,
    /// The forward with fewer keys to a tile, for multiprocessors that have no room for two blocks of `forward`.
    pub narrow: Option<Shaped>,
    /// dq.
    pub queries: Shaped,
    /// dk and dv.
    pub keys: Shaped,
    /// Whether dk and dv are two kernels.
    pub split: bool,
    /// dq, dk and dv at once, where there is such a kernel.
    pub fused: Option<Fused>,
    /// The same kernel with v in registers, for devices with too little shared memory for `fused`. It has the same
    /// tiles.
    pub narrow_fused: Option<Fused>,
    /// The kernels with dropout; head dims of a shape without them run as the next larger one with them. The forward
    /// over pages exists for the same shapes, with the tiles of the forward with dropout.
    pub dropped: Option<Dropped>,
}

/// The kernels with dropout: `ptx/sm80/dropped_shapes.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel::cuda) struct Dropped {
    pub forward: Shaped,
    pub queries: Shaped,
    pub keys: Shaped,
}

/// The kernel that makes all gradients at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::kernel::cuda) struct Fused {
    /// Its rows are keys.
    pub launch: Shaped,
    /// Rows of the tiles of q that it adds to.
    pub queries: u32,
    /// Upper bound of the static shared memory that it declares in addition, in bytes: mostly for prepared steps.
    pub control: u32,
}

const fn forward(d: u32, dv: u32, m: u32, n: u32, warps: u32) -> Shaped {
    let rows_per_warp = m / (16 * warps);
    // With two tiles of rows per warp, largest score and sum lie in shared memory: one float per thread and row each.
    let state = if rows_per_warp > 1 { 2 * (2 * rows_per_warp * warps * 32 * 4) } else { 0 };
    Shaped { rows: m, threads: warps * 32, shared: 2 * (m * d + n * d + n * dv) + state }
}

const fn queries(d: u32, dv: u32, m: u32, n: u32, warps: u32, stages: u32) -> Shaped {
    Shaped { rows: m, threads: warps * 32, shared: 2 * (m + stages * n) * (d + dv) + 2 * m * 4 }
}

const fn keys(d: u32, dv: u32, n: u32, m: u32, warps: u32, stages: u32) -> Shaped {
    Shaped { rows: n, threads: warps * 32, shared: 2 * (n + stages * m) * (d + dv) + stages * 2 * m * 4 }
}

const fn fused(d: u32, dv: u32, n: u32, m: u32, key_parts: u32, column_parts: u32, batch: u32) -> Fused {
    let probabilities = 2 * n * m * if column_parts > 1 { 2 } else { 1 };
    let shared = 2 * (n + 2 * m) * (d + dv) + probabilities + 2 * m * 4;
    let control = if batch > 6 { 1280 } else { 512 };
    Fused { launch: Shaped { rows: n, threads: 32 * key_parts * column_parts, shared }, queries: m, control }
}

/// Without v, and with one buffer of do.
const fn narrow_fused(d: u32, dv: u32, n: u32, m: u32, key_parts: u32, column_parts: u32, batch: u32) -> Fused {
    let mut narrow = fused(d, dv, n, m, key_parts, column_parts, batch);
    narrow.launch.shared -= 2 * (n + m) * dv;
    narrow
}

/// 64 own rows by 64 keys in the forward, and by 32 rows in two buffers in the backward.
const fn dropped(d: u32) -> Option<Dropped> {
    Some(Dropped {
        forward: forward(d, d, 64, 64, 4),
        queries: queries(d, d, 64, 32, 4, 2),
        keys: keys(d, d, 64, 32, 4, 2),
    })
}

/// A shape without narrow kernels; the numbers are those of its lines in `ptx/shared/shapes.cuh` that the functions
/// above take.
const fn shape(d: u32, dv: u32, f: [u32; 3], q: [u32; 4], k: [u32; 4], all: [u32; 5]) -> Shape {
    Shape {
        name: if d == dv { d } else { d * 1000 + dv },
        head_dim: d,
        value_dim: dv,
        forward: forward(d, dv, f[0], f[1], f[2]),
        narrow: None,
        queries: queries(d, dv, q[0], q[1], q[2], q[3]),
        keys: keys(d, dv, k[0], k[1], k[2], k[3]),
        split: false,
        fused: Some(fused(d, dv, all[0], all[1], all[2], all[3], all[4])),
        narrow_fused: None,
        dropped: None,
    }
}

/// The shape whose partners come in chunks of 64 columns: `m` q rows in the forward and `own` own rows in the backward
/// by `n` rows of partners, in `stages` buffers.
const fn wide(d: u32, dv: u32, m: u32, own: u32, n: u32, stages: u32) -> Shape {
    let (threads, ring) = (256, 2 * stages * n * 64);
    let side = Shaped { rows: own, threads, shared: 2 * own * (d + dv) + ring + 4 * own * n + 8 * n };
    let forward = Shaped { rows: m, threads, shared: 2 * m * d + ring + 2 * m * n + 16 * m };
    Shape {
        name: d * 1000 + dv,
        head_dim: d,
        value_dim: dv,
        forward,
        narrow: None,
        queries: side,
        keys: side,
        split: false,
        fused: None,
        narrow_fused: None,
        dropped: Some(Dropped { forward, queries: side, keys: side }),
    }
}

/// All shapes, smallest first.
pub(in crate::kernel::cuda) const SHAPES: [Shape; 7] = [
    Shape {
        narrow: Some(forward(64, 64, 128, 64, 4)),
        dropped: dropped(64),
        ..shape(64, 64, [128, 128, 4], [128, 64, 4, 2], [128, 64, 4, 2], [128, 64, 4, 1, 6])
    },
    shape(96, 96, [128, 64, 4], [128, 32, 4, 2], [64, 64, 4, 2], [128, 64, 4, 2, 16]),
    Shape {
        narrow_fused: Some(narrow_fused(128, 128, 128, 64, 8, 1, 16)),
        dropped: dropped(128),
        ..shape(128, 128, [128, 64, 4], [128, 32, 4, 2], [64, 64, 4, 2], [128, 64, 4, 2, 16])
    },
    shape(192, 128, [128, 64, 8], [64, 32, 4, 2], [64, 32, 4, 2], [64, 64, 2, 4, 16]),
    shape(192, 192, [128, 64, 8], [64, 32, 4, 2], [64, 32, 4, 2], [64, 64, 2, 4, 16]),
    Shape { split: true, ..shape(256, 256, [64, 64, 4], [64, 32, 4, 1], [64, 32, 4, 1], [64, 64, 2, 4, 16]) },
    wide(576, 512, 64, 32, 64, 2),
];

/// The largest head dim and value dim of the kernels.
pub(in crate::kernel::cuda) const LARGEST: (u32, u32) =
    (SHAPES[SHAPES.len() - 1].head_dim, SHAPES[SHAPES.len() - 1].value_dim);

/// The smallest shape that holds these head dims.
pub(in crate::kernel::cuda) fn find(head_dim: u32, value_dim: u32) -> Option<(usize, &'static Shape)> {
    SHAPES.iter().enumerate().find(|(_, s)| head_dim <= s.head_dim && value_dim <= s.value_dim)
}

/// The smallest shape with kernels with dropout that holds these head dims.
pub(in crate::kernel::cuda) fn find_dropped(head_dim: u32, value_dim: u32) -> Option<usize> {
    SHAPES.iter().position(|s| head_dim <= s.head_dim && value_dim <= s.value_dim && s.dropped.is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::format;
    use alloc::vec::Vec;

    #[test]
    fn dims_find_the_smallest_shape() {
        let name = |d, dv| find(d, dv).map(|(_, s)| s.name);
        assert_eq!(name(8, 8), Some(64));
        assert_eq!(name(72, 64), Some(96));
        assert_eq!(name(64, 128), Some(128));
        assert_eq!(name(192, 128), Some(192128));
        assert_eq!(name(128, 192), Some(192));
        assert_eq!(name(256, 8), Some(256));
        assert_eq!(name(257, 8), Some(576512));
        assert_eq!(name(64, 264), Some(576512));
        assert_eq!(name(577, 8), None);
        assert_eq!(name(8, 513), None);
        let dropped = |d, dv| find_dropped(d, dv).map(|at| SHAPES[at].name);
        assert_eq!([dropped(8, 64), dropped(8, 72), dropped(136, 8)], [Some(64), Some(128), Some(576512)]);
        assert_eq!([dropped(576, 512), dropped(577, 8)], [Some(576512), None]);
    }

    #[test]
    fn no_tile_has_fewer_rows_than_plans_count_with() {
        for s in SHAPES {
            let fused = s.fused.map_or([u32::MAX; 2], |f| [f.launch.rows, f.queries]);
            let counted = crate::report::metadata::tile_rows(s.head_dim, s.value_dim);
            let rows = [s.forward.rows, s.queries.rows, s.keys.rows].into_iter().chain(fused);
            assert_eq!(rows.clone().min().map(u64::from), Some(counted.min(64)), "{}", s.name);
            let d = SHAPES[find_dropped(s.head_dim, s.value_dim).expect("the largest shape has them")].dropped.unwrap();
            let counted = crate::report::metadata::dropped_tile_rows(s.head_dim, s.value_dim);
            assert_eq!(u64::from(d.forward.rows.min(d.queries.rows).min(d.keys.rows)), counted, "{}", s.name);
        }
    }

    #[test]
    fn threads_are_those_of_the_ptx() {
        for shape in SHAPES {
            for (file, entry, threads) in [
                ("forward", "cpattn_forward", shape.forward.threads),
                ("forward", "cpattn_forward_narrow", shape.narrow.map_or(0, |n| n.threads)),
                ("backward", "cpattn_backward_queries", shape.queries.threads),
                ("backward", "cpattn_backward_keys", shape.keys.threads),
                ("fused", "cpattn_backward_fused", shape.fused.map_or(0, |f| f.launch.threads)),
                ("fused", "cpattn_backward_fused_narrow", 0),
                ("fused_narrow", "cpattn_backward_fused_narrow", shape.narrow_fused.map_or(0, |n| n.launch.threads)),
            ] {
                let name = format!("{file}_bf16_{}", shape.name);
                let Some(text) = crate::kernel::cuda::embedded::find(&name) else {
                    assert!(file.starts_with("fused") && threads == 0, "{name}");
                    continue;
                };
                let text = text.into_string().expect("text");
                if threads == 0 {
                    assert!(!text.contains(entry), "{name} has {entry}");
                    continue;
                }
                let at = text.find(&format!(".visible .entry {entry}(")).expect("the entry");
                let bound = text[at..].find(".maxntid ").expect("a bound") + at + ".maxntid ".len();
                assert!(text[bound..].starts_with(&format!("{threads},")), "{name} {entry}");
                let split = text.contains("cpattn_backward_values(");
                assert_eq!(split, file == "backward" && shape.split, "{name}");
            }
        }
    }

    /// The numbers of every `NAME(shape, …)` line of `ptx/shared/shapes.cuh`.
    fn lines(name: &str) -> Vec<Vec<u32>> {
        include_str!("../../../../ptx/shared/shapes.cuh")
            .lines()
            .filter_map(|line| line.strip_prefix(name)?.strip_prefix('(')?.strip_suffix(')'))
            .map(|numbers| numbers.split(", ").filter_map(|n| n.parse().ok()).collect())
            .collect()
    }

    #[test]
    fn tiles_are_those_of_the_sources() {
        let (f, q, k) = (lines("FORWARD"), lines("QUERIES"), lines("KEYS"));
        let fuse = lines("FUSED");
        // One of them is `wide`; two have a second kernel.
        assert_eq!([f.len(), q.len(), k.len(), fuse.len()].map(|n| n + 1 - SHAPES.len()), [1, 0, 0, 1]);
        let [w] = lines("WIDE").try_into().expect("one");
        for shape in SHAPES {
            if shape.name == w[0] {
                let expected = wide(shape.head_dim, shape.value_dim, w[1], w[2], w[3], w[4]);
                assert_eq!(
                    (shape.forward, shape.queries, shape.keys, shape.fused),
                    (expected.forward, expected.queries, expected.keys, None)
                );
                continue;
            }
            let (d, dv) = (shape.head_dim, shape.value_dim);
            let of_name = |lines: &[Vec<u32>], name| lines.iter().find(|l| l[0] == name).expect("a line").clone();
            let of = |lines: &[Vec<u32>]| of_name(lines, shape.name);
            let (f, q, k) = (of(&f), of(&q), of(&k));
            assert_eq!(shape.forward, forward(d, dv, f[1], f[2], f[3]));
            if let Some(narrow) = shape.narrow {
                let n = of_name(&lines("FORWARD"), 6464);
                assert_eq!((shape.name, narrow), (64, forward(d, dv, n[1], n[2], n[3])));
                assert_eq!(narrow.rows, shape.forward.rows, "metadata is made for either");
            }
            assert_eq!(shape.queries, queries(d, dv, q[1], q[2], q[3], q[4]));
            assert_eq!(shape.keys, keys(d, dv, k[1], k[2], k[4], k[5]));
            let f = of(&fuse);
            let of_sources = fused(d, dv, f[1], f[2], f[4], f[5], f[9]);
            assert_eq!(shape.fused, Some(of_sources));
            if let Some(narrow) = shape.narrow_fused {
                let n = of_name(&fuse, 128128);
                assert_eq!((shape.name, narrow), (128, narrow_fused(d, dv, n[1], n[2], n[4], n[5], n[9])));
                assert_eq!(narrow.tiles(), of_sources.tiles(), "bits are those of the other");
            }
        }
    }

    /// Bytes of the variables that the kernels of a file declare in shared memory.
    fn declared(name: &str) -> Vec<u32> {
        let text = crate::kernel::cuda::embedded::find(name).expect("embedded").into_string().expect("text");
        let bytes = |l: &str| l.trim().strip_prefix(".shared ")?.split_once('[')?.1.strip_suffix("];")?.parse().ok();
        text.lines().filter_map(bytes).collect()
    }

    #[test]
    fn shared_memory_fits_the_smallest_device() {
        for shape in SHAPES {
            for (file, launch) in [("forward", shape.forward), ("backward", shape.queries), ("backward", shape.keys)] {
                let control = declared(&format!("{file}_bf16_{}", shape.name)).into_iter().max().expect("a kernel");
                assert!(launch.shared + control <= 99 * 1024, "{}: {launch:?} and {control} bytes", shape.name);
            }
        }
    }

    /// The memory that a kernel declares must leave room for the second block for which its tiles leave room on a
    /// multiprocessor of compute capability 8.0. That has 164 KB; each block takes 1 KB more, and declared memory is
    /// counted in units of 128 bytes.
    #[test]
    fn declared_memory_costs_no_block() {
        let two = |bytes: u32| 2 * (bytes.next_multiple_of(128) + 1024) <= 164 * 1024;
        let mut seen = 0;
        for shape in SHAPES {
            for (file, launch) in [("forward", shape.forward), ("backward", shape.queries), ("backward", shape.keys)] {
                let control = declared(&format!("{file}_bf16_{}", shape.name)).into_iter().max().expect("a kernel");
                if two(launch.shared) {
                    seen += 1;
                    assert!(two(launch.shared + control), "{}: {launch:?} and {control} bytes", shape.name);
                }
            }
        }
        assert!(seen > 6, "{seen} kernels share a multiprocessor");
    }

    /// Compute capability 8.0 allows 163 KB to a block, 9.0 allows 227. At head dim 64 two blocks share the 164 KB of a
    /// multiprocessor, and each takes 1 KB more.
    #[test]
    fn fused_shapes_fit_their_devices() {
        for shape in SHAPES {
            let Some(Fused { launch, control, .. }) = shape.fused else { continue };
            let most = if shape.name == 256 { 227 } else { 163 };
            assert!(launch.shared + control <= most * 1024, "{}: {launch:?}", shape.name);
            if shape.name == 64 {
                assert!(2 * (launch.shared + control + 1024) <= 164 * 1024, "{launch:?}");
            }
            let name = format!("fused_bf16_{}", shape.name);
            let bytes: u32 = declared(&name).into_iter().sum();
            assert!((1..=control).contains(&bytes), "{name} declares {bytes} bytes");
            let Some(Fused { launch, control, .. }) = shape.narrow_fused else { continue };
            assert!(launch.shared + control <= 99 * 1024, "{}: {launch:?}", shape.name);
            let bytes: u32 = declared(&format!("fused_narrow_bf16_{}", shape.name)).into_iter().sum();
            assert!((1..=control).contains(&bytes), "{bytes} bytes");
        }
    }
}
