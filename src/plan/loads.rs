// SPDX-License-Identifier: MIT OR Apache-2.0
//! The loads of all ring ranks at once, where q and k are the same tokens.
//!
//! The automatic choice compares six layouts for every mesh, at every step of a training run, so it may not list the
//! segments of every rank. Every layout cuts the pack, or each of its documents, into runs of one rank each, and one
//! pass over the parts of the batch counts all runs ([`pack`](crate::layout::pack)). A rank receives the rows that its
//! runs read and that it does not hold: those of the union of both, without its own. A zigzag cuts documents of the
//! same length alike, so where each document attends to itself alone, each length is counted once, times its documents.
//!
//! All figures are integers, and equal to the sum over [`load`](super::area::load) (tests compare them), which is used
//! for batches with different q and k, and for stripes that are too many to be visited one by one.

use alloc::{vec, vec::Vec};

use super::{CirculatingSide, Problem, area::Load, layout_load::LayoutLoad};
use crate::{
    batch::Side,
    error::Result,
    layout::{
        Layout, Shares, chunk_limit, cuts, deal,
        pack::{PackParts, pairs_of_document},
    },
};

/// Tokens of the pack, as first and end.
type Run = [i64; 2];

/// Counts the loads of a problem under many layouts and rings.
pub(crate) struct LoadCounter<'a> {
    problem: &'a Problem,
    /// `None` if q and k are different tokens.
    runs: Option<RunCounter<'a>>,
}

impl<'a> LoadCounter<'a> {
    pub(crate) fn new(problem: &'a Problem) -> Self {
        let itself = problem.batch().is_self_attention();
        Self { problem, runs: itself.then(|| RunCounter::new(problem)) }
    }

    /// How `layout` distributes the problem over `ring` ranks.
    pub(crate) fn load(&mut self, layout: Layout, ring: usize) -> Result<LayoutLoad> {
        if let Some(runs) = self.runs.as_mut().filter(|runs| runs.counts(layout, ring)) {
            let deal = match layout {
                Layout::Balanced { chunks } => {
                    chunk_limit(chunks, ring)?;
                    let areas = runs.parts.areas(cuts(runs.tokens(), ring * chunks as usize));
                    deal(&areas, ring, chunks as usize)
                }
                _ => vec![],
            };
            return Ok(LayoutLoad::sum(layout, ring, runs.loads(layout, ring, &deal).into_iter()));
        }
        let shares = Shares::new(self.problem.batch(), self.problem.mask(), layout, ring)?;
        Ok(LayoutLoad::of(self.problem, &shares, CirculatingSide::Keys))
    }

    /// The load of these shares, with any mask, if k and v are sent round the ring.
    pub(crate) fn load_of(&mut self, shares: &Shares) -> LayoutLoad {
        let (layout, ring) = (shares.layout(), shares.ring());
        match self.runs.as_mut().filter(|runs| runs.counts(layout, ring)) {
            Some(runs) => {
                LayoutLoad::sum(layout, ring, runs.loads(layout, ring, shares.deal().unwrap_or(&[])).into_iter())
            }
            None => LayoutLoad::of(self.problem, shares, CirculatingSide::Keys),
        }
    }
}

/// The parts of a batch of self-attention, prepared for counting; made once for all meshes and layouts.
struct RunCounter<'a> {
    cu: &'a [i32],
    parts: PackParts<'a>,
    /// If each document attends to itself alone: each length with the number of its documents.
    lengths: Vec<(u32, u32)>,
    /// By rank: what its runs hold and read. Kept for the next layout.
    rows: Vec<Vec<Run>>,
}

impl<'a> RunCounter<'a> {
    fn new(problem: &'a Problem) -> Self {
        let (batch, mask) = (problem.batch(), problem.mask());
        let (cu, parts) = (batch.cu_seqlens(Side::Q), PackParts::new(batch, mask));
        let mut lengths = Vec::new();
        if parts.band_of_documents().is_some() {
            let mut all: Vec<u32> = cu.windows(2).map(|w| (w[1] - w[0]) as u32).collect();
            all.sort_unstable();
            lengths.extend(all.chunk_by(|a, b| a == b).map(|same| (same[0], same.len() as u32)));
        }
        Self { cu, parts, lengths, rows: vec![] }
    }

    fn tokens(&self) -> usize {
        self.cu.last().map_or(0, |&n| n as usize)
    }

    /// Whether visiting each run of a layout is faster than counting rank by rank.
    fn counts(&self, layout: Layout, ring: usize) -> bool {
        match layout {
            Layout::Striped { stripe } => {
                stripe > 0 && self.tokens() / stripe as usize <= 16 * ring * (1 + self.parts.len())
            }
            _ => true,
        }
    }

    /// The load of every ring rank under a layout; `deal` has the chunks of a balanced one, as [`Shares::deal`].
    fn loads(&mut self, layout: Layout, ring: usize, deal: &[u32]) -> Vec<Load> {
        let n = self.tokens();
        let zigzag = (0..ring).chain((0..ring).rev());
        match layout {
            Layout::Contiguous => self.count(ring, cuts(n, ring).zip(0..ring)),
            Layout::ZigzagPack => self.count(ring, cuts(n, 2 * ring).zip(zigzag)),
            Layout::Zigzag => match self.parts.band_of_documents() {
                Some(band) => self.zigzag_of_lengths(ring, band),
                None => {
                    let chunks = self.cu.windows(2).flat_map(|w| {
                        let first = w[0] as usize;
                        cuts((w[1] - w[0]) as usize, 2 * ring).map(move |end| first + end).zip(zigzag.clone())
                    });
                    self.count(ring, chunks)
                }
            },
            Layout::Striped { stripe } => {
                let ends = (1..).map(|i| n.min(i * stripe as usize));
                self.count(ring, ends.zip((0..ring).cycle()).take(n.div_ceil(stripe as usize)))
            }
            Layout::Balanced { chunks } => {
                let mut owner = vec![0; deal.len()];
                deal.iter().enumerate().for_each(|(i, &c)| owner[c as usize] = i / chunks as usize);
                self.count(ring, cuts(n, deal.len()).zip(owner))
            }
        }
    }

    /// The loads of ranks whose runs are given by their ends and ranks.
    fn count(&mut self, ring: usize, runs: impl Iterator<Item = (usize, usize)>) -> Vec<Load> {
        let mut loads = vec![Load::default(); ring];
        self.rows.resize_with(ring.max(self.rows.len()), Vec::new);
        let (rows, documents) = (&mut self.rows[..ring], self.parts.band_of_documents().is_some());
        rows.iter_mut().for_each(Vec::clear);
        self.parts.for_each_run(runs, |rank: usize, mut run, pairs, keys| {
            if run[0] == run[1] {
                return;
            }
            let (load, rows) = (&mut loads[rank], &mut rows[rank]);
            load.area += pairs;
            load.q_tokens += (run[1] - run[0]) as u64;
            for &read in keys {
                if !join(&mut run, read) {
                    add(rows, read);
                }
            }
            if documents && rows.last().is_some_and(|last| last[1] < run[0]) {
                // The rows of a rank ascend: those before are complete.
                load.needed += union(rows);
                rows.clear();
            }
            add(rows, run);
        });
        for (load, rows) in loads.iter_mut().zip(rows) {
            load.k_tokens = load.q_tokens;
            load.needed = load.needed + union(rows) - load.q_tokens;
        }
        loads
    }

    /// Each document in 2R chunks, from both ends at once; each attends to itself in a band that has 0.
    fn zigzag_of_lengths(&self, ring: usize, band: [i64; 2]) -> Vec<Load> {
        let [low, high] = band;
        let mut loads = vec![Load::default(); ring];
        for &(length, documents) in &self.lengths {
            let (n, times) = (i64::from(length), u64::from(documents));
            // Chunk r ends at ⌊(r + 1)·n / 2R⌋, and the chunk opposite to it begins at n − ⌈(r + 1)·n / 2R⌉.
            let (whole, rest, parts) = (n / (2 * ring as i64), n % (2 * ring as i64), 2 * ring as i64);
            let (mut a, mut d, mut carry) = (0, n, 0);
            let (mut front, mut back) = (0, pairs_of_document(n, n, band));
            for load in &mut loads {
                carry += rest;
                let more = i64::from(carry >= parts);
                carry -= parts * more;
                let b = a + whole + more;
                let c = n - b - i64::from(carry > 0);
                let own = b - a + d - c;
                if own == 0 {
                    continue;
                }
                let to = if a < b { (b + high).min(n) } else { 0 };
                let lower = if a < b { to - (a + low).max(0) } else { 0 };
                let from = (c + low).max(to);
                let upper = if c < d { ((d + high).min(n) - from).max(0) } else { 0 };
                let (up, down) = (pairs_of_document(b, n, band), pairs_of_document(c, n, band));
                load.area += times * (up - front + back - down);
                load.q_tokens += times * own as u64;
                load.needed += times * (lower + upper - own) as u64;
                (a, d, front, back) = (b, c, up, down);
            }
        }
        loads.iter_mut().for_each(|l| l.k_tokens = l.q_tokens);
        loads
    }
}

/// Extends a run by another one if they overlap or touch.
fn join(run: &mut Run, other: Run) -> bool {
    let touch = run[0] <= other[1] && other[0] <= run[1];
    if touch {
        *run = [run[0].min(other[0]), run[1].max(other[1])];
    }
    touch
}

/// Adds a run to a list, joined with one of the last few where they touch: a shared prefix is read by run after run.
fn add(list: &mut Vec<Run>, run: Run) {
    let ascends = list.last().is_none_or(|last| last[1] < run[0]);
    if ascends || !list.iter_mut().rev().take(3).any(|last| join(last, run)) {
        list.push(run);
    }
}

/// The number of tokens in some of these runs. Sorts them.
fn union(runs: &mut [Run]) -> u64 {
    if !runs.is_sorted() {
        runs.sort_unstable();
    }
    let (mut tokens, mut done) = (0, 0);
    for &[first, end] in &*runs {
        tokens += (end - first.max(done)).max(0) as u64;
        done = done.max(end);
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Batch, Dtype, Mask, Slice, plan::layout_load::loads_of_ranks, slices};

    /// Random documents, slices, masks and layouts: the loads of all ranks at once equal the sums over each rank's
    /// segments.
    #[test]
    fn loads_are_the_sums_over_segments() {
        let mut draw = fastrand::Rng::with_seed(9);
        let mut compared = [0; 3];
        for trial in 0..3000 {
            let most = [1, 3, 20, 200][draw.usize(..4)];
            let documents = if trial % 3 == 2 { 8 } else { 30 };
            let lengths: Vec<usize> = (0..draw.usize(0..documents))
                .map(|_| if draw.u8(..5) == 0 { 0 } else { draw.usize(..=most) })
                .collect();
            let plain = Batch::from_lengths(&lengths).unwrap();
            let n = plain.tokens(Side::Q);
            let batch = match trial % 3 {
                0 => plain,
                // Documents as slices, all of one band or not.
                1 => {
                    let one = draw.bool();
                    let band = |draw: &mut fastrand::Rng| (-draw.i64(-1..9), draw.i64(-1..9));
                    let of_all = band(&mut draw);
                    let list: Vec<Slice> = slices::documents(plain.cu_seqlens(Side::Q))
                        .into_iter()
                        .map(|slice| {
                            let (low, high) = if one { of_all } else { band(&mut draw) };
                            slice.band(low, high)
                        })
                        .collect();
                    plain.with_slices(&list).unwrap()
                }
                _ => {
                    let lists = draw.usize(1..40);
                    let mut list: Vec<Slice> = Vec::new();
                    for _ in 0..lists {
                        let run = |draw: &mut fastrand::Rng| {
                            let a = draw.usize(..=n);
                            a..draw.usize(a..=n)
                        };
                        let (q, k) = (run(&mut draw), run(&mut draw));
                        let slice =
                            Slice::new(q, k).q_start(draw.i64(-9..90)).band(-draw.i64(-9..90), draw.i64(-9..90));
                        list.push(slice);
                        if plain.clone().with_slices(&list).is_err() {
                            list.pop();
                        }
                    }
                    plain.with_slices(&list).unwrap()
                }
            };
            let limit = |draw: &mut fastrand::Rng| [None, Some(0), Some(1), Some(7), Some(90)][draw.usize(..5)];
            let mask = Mask { left: limit(&mut draw), right: limit(&mut draw) };
            let problem = Problem::new(batch, 1, 1, 8, Dtype::F32).with_mask(mask);
            let mut counter = LoadCounter::new(&problem);
            let ring = draw.usize(1..12);
            let chunks = draw.u32(1..7);
            let stripe = draw.u32(1..9);
            for layout in [
                Layout::Contiguous,
                Layout::Zigzag,
                Layout::ZigzagPack,
                Layout::Striped { stripe },
                Layout::Balanced { chunks },
            ] {
                // The chunks of another mask.
                let other = Shares::new(problem.batch(), Mask::sliding(3), layout, ring).unwrap();
                let own = Shares::new(problem.batch(), mask, layout, ring).unwrap();
                assert_eq!(counter.load_of(&other), LayoutLoad::of(&problem, &other, CirculatingSide::Keys));
                assert_eq!(counter.load(layout, ring).unwrap(), counter.load_of(&own));
                let runs = counter.runs.as_mut().unwrap();
                if !runs.counts(layout, ring) {
                    continue;
                }
                let got = runs.loads(layout, ring, own.deal().unwrap_or(&[]));
                let want: Vec<Load> = loads_of_ranks(&problem, &own, CirculatingSide::Keys).collect();
                assert_eq!(got, want, "trial {trial} {layout} {mask:?} {ring} ranks: {lengths:?}");
                compared[trial % 3] += want.iter().filter(|load| load.needed > 0).count();
            }
        }
        assert!(compared.iter().all(|&n| n > 5_000), "{compared:?}");
    }

    #[test]
    fn limits_of_the_layouts_are_kept() {
        let problem = Problem::new(Batch::from_lengths(&[7]).unwrap(), 1, 1, 8, Dtype::F32);
        let mut counter = LoadCounter::new(&problem);
        for layout in
            [Layout::Balanced { chunks: 0 }, Layout::Balanced { chunks: u32::MAX }, Layout::Striped { stripe: 0 }]
        {
            let text = |e: crate::error::Error| alloc::string::ToString::to_string(&e);
            assert_eq!(
                text(counter.load(layout, 2).unwrap_err()),
                text(Shares::new(problem.batch(), Mask::causal(), layout, 2).unwrap_err())
            );
        }
    }
}
