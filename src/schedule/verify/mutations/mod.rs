// SPDX-License-Identifier: MIT OR Apache-2.0
//! Tests of the verifier: correct schedules are corrupted at every site of each kind of mistake, and each time the
//! proof must fail. Sites where the change makes no difference are left out, with the reason.

use alloc::{borrow::Cow, format, string::String, vec, vec::Vec};
use core::ops::{Index, IndexMut};

use super::{Proof, check_rank, promise, slices::ScheduleCheck};
use crate::slice::Slice;
use crate::{
    batch::{Batch, Side},
    call::Mode,
    element::Dtype,
    error::{Error, Result},
    layout::Layout,
    mask::Mask,
    mesh::Mesh,
    plan::{Circulate, Gather, Options, Plan, Problem, Wire},
    schedule::{
        AllToAll, AllToAllDirection, Buf, BufferView, Combine, CombineTo, Decay, Direction, Lane, OpKind, Purpose, Scan,
        ScanForm, Schedule, StepTensor, TensorId,
        expand::Expansion,
        expanded::{ExpandedOp, expand_with},
    },
};

mod combines;
mod extremes;
mod gateways;
mod operations;
mod scans;
mod written_out;

/// The correct schedules of a group, and the same with all arguments listed.
struct Subject {
    name: String,
    plan: Plan,
    purpose: Purpose,
    schedules: Vec<Schedule>,
    listed: Vec<Vec<ExpandedOp>>,
}

impl Subject {
    fn new(name: String, plan: &Plan, purpose: Purpose, schedule: impl Fn(usize) -> Result<Schedule>) -> Self {
        let schedules: Vec<Schedule> = (0..plan.mesh().group()).map(|rank| schedule(rank).unwrap()).collect();
        let list = |s: &Schedule| (0..s.ops.len()).map(|i| expand_with(s, i, &mut Expansion::new(s))).collect();
        let listed = schedules.iter().map(list).collect();
        Self { name, plan: plan.clone(), purpose, schedules, listed }
    }
}

/// Listed operations, by rank, to be changed: a rank's list is copied for its first change.
struct Changed<'a>(Vec<Cow<'a, [ExpandedOp]>>);

impl<'a> Changed<'a> {
    fn new(s: &'a Subject) -> Self {
        Self(s.listed.iter().map(|list| Cow::Borrowed(&list[..])).collect())
    }
}

impl Index<usize> for Changed<'_> {
    type Output = [ExpandedOp];
    fn index(&self, rank: usize) -> &[ExpandedOp] {
        &self.0[rank]
    }
}

impl IndexMut<usize> for Changed<'_> {
    fn index_mut(&mut self, rank: usize) -> &mut [ExpandedOp] {
        self.0[rank].to_mut()
    }
}

/// The proof of a subject's ranks with listed operations.
fn proof<'a>(s: &'a Subject, listed: &'a Changed) -> Result<Proof<'a>> {
    let (plan, purpose, e) = (&s.plan, s.purpose, &mut Expansion::default());
    let each = s.schedules.iter().zip(&listed.0);
    let ranks = each.map(|(x, written)| check_rank(x.clone(), Some(written), plan, purpose, e));
    Ok(Proof { plan, purpose, ranks: ranks.collect::<Result<_>>()?, threads: 1, listed: None })
}

fn subjects() -> Vec<Subject> {
    let o = Options::new;
    let mesh = |ulysses, ring| Mesh { replicas: 1, ring, ulysses };
    let packed = Batch::from_lengths(&[5, 0, 9, 3]).unwrap();
    let crossed = Batch::cross(&[0, 6, 13], &[0, 4, 14], Some(&[-2, 3])).unwrap();
    // A shared prefix with a branch in another document, a span that is seen from both sides, a window, two bands of
    // one pair of documents.
    let sliced = packed.clone().with_slices(&[
        Slice::new(0..5, 0..5).causal(),
        Slice::new(5..14, 0..5).q_start(5),
        Slice::new(5..9, 5..9),
        Slice::new(9..14, 5..14).causal(),
        Slice::new(14..17, 4..17).band(-6, -2),
        Slice::new(14..17, 4..17).band(0, 0),
    ]);
    let sliced = &sliced.unwrap();
    let full = Mask::full();
    let cases = [
        ("slices", sliced, mesh(1, 3), Layout::Contiguous, full, 2, 1, Dtype::F32, o().circulate(Circulate::Keys)),
        ("slices, queries", sliced, mesh(1, 3), Layout::ZigzagPack, Mask::window(8, 1), 2, 2, Dtype::Bf16, {
            o().circulate(Circulate::Queries).circulate_forward(Circulate::Queries)
        }),
        ("slices, gather", sliced, mesh(2, 2), Layout::Balanced { chunks: 2 }, full, 4, 2, Dtype::Bf16, {
            o().gather(true)
        }),
        ("slices, together", sliced, mesh(1, 3), Layout::Striped { stripe: 2 }, full, 2, 1, Dtype::F32, {
            o().gather(Gather::Together)
        }),
        ("slices, ordered", sliced, mesh(2, 2), Layout::Striped { stripe: 1 }, full, 4, 2, Dtype::F32, {
            o().reproducible(true)
        }),
        ("slices, nodes", sliced, mesh(1, 4), Layout::ZigzagPack, full, 2, 1, Dtype::Bf16, {
            o().ranks_per_node(2).circulate(Circulate::Keys)
        }),
        ("ring", &packed, mesh(1, 3), Layout::Contiguous, Mask::full(), 2, 1, Dtype::F32, o()),
        ("zigzag", &packed, mesh(1, 3), Layout::Zigzag, Mask::causal(), 2, 2, Dtype::Bf16, {
            o().circulate(Circulate::Keys)
        }),
        ("window", &packed, mesh(1, 4), Layout::Contiguous, Mask::window(2, 0), 2, 1, Dtype::Bf16, o().passes(1)),
        ("queries", &packed, mesh(1, 3), Layout::Striped { stripe: 2 }, Mask::causal(), 2, 2, Dtype::Bf16, {
            o().circulate(Circulate::Queries).wire(Wire::Bf16).pack_inputs(true)
        }),
        ("queries forward", &packed, mesh(1, 3), Layout::Striped { stripe: 2 }, Mask::causal(), 2, 1, Dtype::Bf16, {
            o().circulate_forward(Circulate::Queries)
        }),
        ("queries forward, hybrid", &crossed, mesh(2, 2), Layout::Zigzag, Mask::causal(), 4, 2, Dtype::F32, {
            o().circulate_forward(Circulate::Queries).pack_inputs(true)
        }),
        ("nodes, queries forward", &crossed, mesh(1, 4), Layout::ZigzagPack, Mask::full(), 4, 2, Dtype::F32, {
            o().circulate_forward(Circulate::Queries).ranks_per_node(2)
        }),
        ("hybrid", &crossed, mesh(2, 2), Layout::ZigzagPack, Mask::causal(), 4, 2, Dtype::Bf16, o().passes(2)),
        ("uneven heads", &packed, mesh(4, 1), Layout::Contiguous, Mask::full(), 9, 3, Dtype::Bf16, {
            o().wire(Wire::Bf16)
        }),
        ("gather", &packed, mesh(1, 3), Layout::Balanced { chunks: 2 }, Mask::causal(), 2, 1, Dtype::F32, {
            o().gather(true)
        }),
        ("together", &packed, mesh(1, 3), Layout::Zigzag, Mask::causal(), 2, 1, Dtype::Bf16, {
            o().gather(Gather::Together)
        }),
        ("ordered", &packed, mesh(2, 2), Layout::Striped { stripe: 1 }, Mask::causal(), 4, 2, Dtype::F32, {
            o().reproducible(true)
        }),
        ("nodes", &packed, mesh(1, 6), Layout::Contiguous, Mask::causal(), 2, 1, Dtype::Bf16, {
            o().ranks_per_node(3).circulate(Circulate::Keys)
        }),
        ("nodes, gathered", &packed, mesh(1, 4), Layout::Zigzag, Mask::window(4, 0), 2, 1, Dtype::F32, {
            o().ranks_per_node(2).gather(true)
        }),
        ("nodes, queries", &crossed, mesh(2, 4), Layout::ZigzagPack, Mask::causal(), 4, 2, Dtype::Bf16, {
            o().ranks_per_node(4).circulate(Circulate::Queries)
        }),
        ("nodes, narrow", &packed, mesh(1, 4), Layout::Zigzag, Mask::causal(), 2, 1, Dtype::F32, {
            o().ranks_per_node(2).circulate(Circulate::Keys).wire(Wire::Bf16)
        }),
        ("nodes, together", &packed, mesh(1, 4), Layout::Zigzag, Mask::causal(), 2, 1, Dtype::F32, {
            o().ranks_per_node(2).gather(Gather::Together).wire(Wire::Bf16)
        }),
        ("nodes, queries together", &crossed, mesh(1, 4), Layout::Contiguous, Mask::full(), 2, 1, Dtype::F32, {
            o().ranks_per_node(2).gather(Gather::Together).circulate(Circulate::Queries)
        }),
        ("nodes, ordered", &packed, mesh(1, 4), Layout::Contiguous, Mask::causal(), 2, 1, Dtype::F32, {
            o().ranks_per_node(2).reproducible(true)
        }),
        ("gateways", &packed, mesh(4, 1), Layout::Contiguous, Mask::causal(), 4, 1, Dtype::Bf16, o().ranks_per_node(2)),
        ("gateways, uneven heads", &packed, mesh(4, 1), Layout::Contiguous, Mask::full(), 9, 3, Dtype::F32, {
            o().ranks_per_node(2).wire(Wire::Bf16)
        }),
        ("gateways, passes", &crossed, mesh(4, 2), Layout::ZigzagPack, Mask::causal(), 12, 6, Dtype::Bf16, {
            o().ranks_per_node(2).passes(2)
        }),
        ("holders", &packed, mesh(2, 2), Layout::Zigzag, Mask::causal(), 2, 1, Dtype::Bf16, {
            o().ranks_per_node(2).circulate(Circulate::Keys)
        }),
        ("ordered gateways", &packed, mesh(4, 1), Layout::Contiguous, Mask::causal(), 4, 1, Dtype::F32, {
            o().ranks_per_node(2).reproducible(true)
        }),
    ];
    let mut subjects = Vec::new();
    for (name, batch, mesh, layout, mask, heads, kv_heads, dtype, options) in cases {
        let problem = Problem::new(batch.clone(), heads, kv_heads, 8, dtype).with_mask(mask).with_sinks_per_head(2);
        let plan = Plan::builder(&problem).mesh(mesh).layout(layout).options(options).build().unwrap();
        for direction in [Direction::Forward, Direction::Backward] {
            let name = format!("{name}, {direction:?}");
            subjects.push(Subject::new(name, &plan, Purpose::Attention(direction), |rank| {
                Schedule::new(&plan, rank, direction)
            }));
        }
    }
    subjects.extend(all_to_alls());
    subjects.extend(combines());
    subjects.extend(scans());
    subjects
}

/// Both directions of both sides, with kv heads that several ranks hold, with uneven heads, and beside a ring.
fn all_to_alls() -> Vec<Subject> {
    let batch = Batch::cross(&[0, 6, 6, 13], &[0, 4, 5, 14], Some(&[-2, 0, 3])).unwrap();
    let mut subjects = Vec::new();
    for (mesh, heads, kv_heads) in [
        (Mesh { replicas: 1, ring: 1, ulysses: 4 }, 9, 3),
        (Mesh { replicas: 1, ring: 2, ulysses: 2 }, 4, 1),
        (Mesh { replicas: 1, ring: 1, ulysses: 3 }, 7, 7),
    ] {
        let problem = Problem::new(batch.clone(), heads, kv_heads, 8, Dtype::F32);
        let plan = Plan::new(&problem, mesh, Layout::Contiguous).unwrap();
        for way in [AllToAllDirection::ToHeads, AllToAllDirection::ToTokens] {
            for (side, dtype) in [(Side::Q, Dtype::Bf16), (Side::K, Dtype::F32)] {
                let all_to_all = AllToAll { direction: way, side, dim: 5, dtype };
                let name = format!("{all_to_all:?} over {mesh:?}");
                subjects.push(Subject::new(name, &plan, Purpose::AllToAll(all_to_all), |rank| {
                    Schedule::all_to_all(&plan, rank, all_to_all)
                }));
            }
        }
    }
    subjects
}

/// Combines over rings, alone and beside Ulysses ranks, with pieces of heads and of tokens, some of them empty.
fn combines() -> Vec<Subject> {
    let mut subjects = Vec::new();
    for (ring, ulysses, heads, tokens) in [(2, 1, 2, 3), (3, 1, 4, 2), (3, 2, 6, 4), (4, 1, 3, 2)] {
        let problem = Problem::new(Batch::from_lengths(&[tokens]).unwrap(), heads, heads, 8, Dtype::Bf16);
        let mesh = Mesh { replicas: 1, ring, ulysses };
        let plan = Plan::new(&problem.with_sinks(ring == 3), mesh, Layout::Contiguous).unwrap();
        for to in [CombineTo::All, CombineTo::Heads, CombineTo::Tokens] {
            let combine = Combine { to, partial: Dtype::F32 };
            let name = format!("{combine:?} over {mesh:?}");
            subjects.push(Subject::new(name, &plan, Purpose::Combine(combine), |rank| {
                Schedule::combine(&plan, rank, combine)
            }));
        }
    }
    subjects
}

/// Scans in each form: documents within a rank and over several, an empty one, ranks without tokens, two segments of a
/// document on one rank, beside Ulysses ranks.
fn scans() -> Vec<Subject> {
    let mut subjects = Vec::new();
    for (lengths, ring, ulysses, layout) in [
        (&[2, 0, 13, 3][..], 5, 1, Layout::Contiguous),
        (&[9, 7], 3, 1, Layout::Zigzag),
        (&[3, 14], 2, 2, Layout::Balanced { chunks: 2 }),
    ] {
        let problem = Problem::new(Batch::from_lengths(lengths).unwrap(), 4, 2, 8, Dtype::Bf16);
        let plan = Plan::new(&problem, Mesh { replicas: 1, ring, ulysses }, layout).unwrap();
        for form in [ScanForm::Chain, ScanForm::Tree, ScanForm::Direct] {
            for decay in [Decay::Diagonal, Decay::Matrix] {
                let scan = Scan { form, reverse: decay == Decay::Matrix, ..Scan::new(decay, 2, 2, 2) };
                let name = format!("{scan:?} over {layout}, {ring} × {ulysses}");
                subjects.push(Subject::new(name, &plan, Purpose::Scan(scan), |rank| Schedule::scan(&plan, rank, scan)));
            }
        }
    }
    subjects
}

/// Which of many corruptions are tried, without a pattern: one in `CPATTN_MUTANTS`, which is 10 if it is not set and 3
/// in `.ci/run`; all with `CPATTN_LONG` set (`.ci/long`).
#[derive(Default)]
struct Sample {
    seen: u32,
}

impl Sample {
    fn takes_next(&mut self) -> bool {
        self.seen += 1;
        Self::one_in() == 1 || (self.seen.wrapping_mul(2_654_435_761) >> 16).is_multiple_of(Self::one_in() as u32)
    }

    /// The least number of sites in a sample of so many: a tenth less than its part, since a sample has no pattern.
    fn least(of_all: usize) -> usize {
        if Self::one_in() == 1 { of_all } else { of_all * 9 / (10 * Self::one_in()) }
    }

    fn one_in() -> usize {
        if std::env::var_os("CPATTN_LONG").is_some() {
            return 1;
        }
        std::env::var("CPATTN_MUTANTS").map_or(10, |n| {
            let number = n.parse().ok().filter(|&n| n > 0);
            number
                .unwrap_or_else(|| panic!("CPATTN_MUTANTS is {n:?}, expected a number above 0: one mutant in so many"))
        })
    }
}

/// The results of one kind of corruption.
struct Trial {
    kind: &'static str,
    /// If the corruptions are many.
    sample: Option<Sample>,
    caught: usize,
    missed: Vec<String>,
}

impl Trial {
    fn new(kind: &'static str) -> Self {
        Self { kind, sample: None, caught: 0, missed: Vec::new() }
    }

    fn sampled(kind: &'static str) -> Self {
        Self { sample: Some(Sample::default()), ..Self::new(kind) }
    }

    fn judge(&mut self, subject: &Subject, result: Result<super::Report>, site: String) {
        match result {
            Err(Error::Schedule { .. }) => self.caught += 1,
            other => self.missed.push(format!("{}: {site}: {:?}", subject.name, other.map(|r| r.pairs))),
        }
    }

    /// Corrupts one rank's schedule and proves again.
    fn schedule(&mut self, subject: &Subject, rank: usize, site: String, change: impl FnOnce(&mut Schedule)) {
        let mut schedules = subject.schedules.clone();
        change(&mut schedules[rank]);
        self.judge(subject, subject.plan.verify_schedules(&schedules), site);
    }

    /// Corrupts the listed operations and proves again.
    fn listed(&mut self, subject: &Subject, site: String, change: impl FnOnce(&mut Changed)) {
        if self.sample.as_mut().is_some_and(|sample| !sample.takes_next()) {
            return;
        }
        let mut listed = Changed::new(subject);
        change(&mut listed);
        self.judge(subject, proof(subject, &listed).and_then(Proof::finish), site);
    }

    fn done(self, at_least: usize) {
        assert!(
            self.missed.is_empty(),
            "{}: {} missed of {}, first {:#?}",
            self.kind,
            self.missed.len(),
            self.caught + self.missed.len(),
            &self.missed[..self.missed.len().min(12)]
        );
        let at_least = if self.sample.is_some() { Sample::least(at_least) } else { at_least };
        assert!(self.caught >= at_least, "{}: only {} sites", self.kind, self.caught);
    }
}

/// Calls `each(rank, operation, its list)` for every operation of a subject.
fn each_op(s: &Subject, mut each: impl FnMut(usize, usize, &ExpandedOp)) {
    for (r, ops) in s.listed.iter().enumerate() {
        ops.iter().enumerate().for_each(|(i, w)| each(r, i, w));
    }
}

/// A trial of one kind of corruption: `each(trial, subject, rank, operation, its list)` is called for every operation
/// of every subject, and must make at least `at_least` changes.
fn mutate(kind: &'static str, at_least: usize, each: impl FnMut(&mut Trial, &Subject, usize, usize, &ExpandedOp)) {
    mutate_in(Trial::new(kind), at_least, each);
}

fn mutate_in(mut t: Trial, at_least: usize, mut each: impl FnMut(&mut Trial, &Subject, usize, usize, &ExpandedOp)) {
    for s in &subjects() {
        each_op(s, |r, i, w| each(&mut t, s, r, i, w));
    }
    t.done(at_least);
}

#[test]
fn right_schedules_are_proved() {
    for s in subjects() {
        let written = proof(&s, &Changed::new(&s)).unwrap().finish().unwrap();
        assert_eq!(s.plan.verify_schedules(&s.schedules).unwrap(), written);
    }
}

/// Both storage modes of cells are tested: one cell for a row, and one for each head.
#[test]
fn some_subjects_take_whole_rows_and_some_do_not() {
    let whole = |s: &Subject| proof(s, &Changed::new(s)).unwrap().takes_whole_rows();
    let of = |name: &str| subjects().iter().find(|s| s.name == name).map(whole);
    assert_eq!(of("ring, Forward"), Some(true));
    assert_eq!(of("ring, Backward"), Some(true));
    assert_eq!(of("hybrid, Forward"), Some(false));
    assert_eq!(of("ordered, Backward"), Some(false));
}
