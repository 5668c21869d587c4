// SPDX-License-Identifier: MIT OR Apache-2.0
//! Attention by a kernel of the caller's: drawn problems on drawn meshes against f64, what is refused, and kernels that
//! go wrong.

use crate::agreement::FAR;
use crate::common::{
    Data, Random, Results, check_within, one_rank,
    own::{Own, Slot, compact, gaps, heads_first},
    plain_kernel::{PlainKernel, Wrong},
    reference, run_with,
};
use crate::context_parallel::mesh;
use crate::slices::{any_plan, any_problem, number, poison};
use cpattn::{
    Batch, Cause, Dtype, Element, Error, Layout, Mask, Options, Plan, Problem, Rank, Result, Side, Slice, View,
    ViewMut,
    call::{Merge, Transform},
    kernel::{
        cpu,
        varlen::{Elements, ElementsMut, Honours, Rectangles, VarlenKernel},
    },
    runtime::LseBase,
    transport::local,
};
use half::bf16;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

/// Ranks with a kernel each.
pub fn ranks<K: VarlenKernel + 'static>(world: usize, kernel: impl Fn(usize) -> K) -> Vec<Rank> {
    let ends = local::group(world, FAR).unwrap().into_iter().enumerate();
    ends.map(|(rank, end)| Rank::with_kernel(end, kernel(rank))).collect()
}

fn run<T: Element, K: VarlenKernel + 'static>(
    plan: &Plan,
    data: &Data<T>,
    kernel: impl Fn(usize) -> K,
) -> Result<Results<T>> {
    run_with(ranks(plan.mesh().world(), kernel), plan, data, false)
}

/// The kernel with less that it honours: every way in which the work around it differs.
fn any_kernel(seed: u64, p: &Problem) -> PlainKernel {
    let mut kernel = PlainKernel::new();
    kernel.honours.groups = !seed.is_multiple_of(3);
    let limits = p.score().window_left != i64::MAX
        || p.batch().slices().is_some_and(|all| all.iter().any(|slice| slice.low != i64::MIN));
    kernel.honours.windows = limits || seed.is_multiple_of(2);
    kernel
}

/// One drawn problem, twice: as drawn, and with NaN in the rows of k and v that no query may read.
fn drawn<T: Element>(seed: u64, dtype: Dtype, documents: bool) {
    let mut r = Random::new(seed);
    let p = any_problem(&mut r, dtype);
    // Without dropout, and every second one by its documents alone.
    let p = without_dropout(&p, documents);
    let plan = loop {
        let plan = any_plan(&mut r, &p);
        if !plan.options().reproducible {
            break plan;
        }
    };
    let mut data = Data::<T>::random(&p, seed);
    let (want, one) = (reference(&p, &data), one_rank(&p, &data));
    let what = format!("seed {seed}: {p:?} {} {} {:?}", plan.mesh(), plan.layout(), plan.options());
    for nan in [false, true] {
        if nan && !documents {
            poison(&p, &mut data);
        }
        let kernel = |_| any_kernel(seed, &p);
        let mut got = run(&plan, &data, kernel).unwrap_or_else(|error| panic!("{what}: {error}"));
        got.max_logit.clone_from(&want.max_logit);
        check_within(16.0, &what, &got, &one, &want);
    }
}

/// The same problem without dropout, and by documents alone if `documents`.
fn without_dropout(p: &Problem, documents: bool) -> Problem {
    let p = p.clone().with_dropout(0.0);
    if !documents {
        return p;
    }
    let b = p.batch();
    let starts: Vec<i64> = (0..b.documents()).map(|d| b.start(Side::Q, d)).collect();
    let batch = Batch::cross(b.cu_seqlens(Side::Q), b.cu_seqlens(Side::K), Some(&starts)).unwrap();
    let mut of_documents = Problem::new(batch, p.heads(), p.kv_heads(), p.head_dim(), p.dtype())
        .with_value_dim(p.value_dim())
        .with_mask(p.mask())
        .with_sinks_per_head(p.sinks_per_head());
    if p.score().softcap != 0.0 {
        of_documents = of_documents.with_softcap(p.score().softcap);
    }
    if p.alibi_rows() == 1 && p.alibi_slopes().is_some() {
        of_documents = of_documents.with_alibi_slopes(p.alibi_slopes().unwrap());
    }
    of_documents
}

/// `CPATTN_DRAWN_KERNELS` problems from seed `CPATTN_DRAWN_SEED` on.
#[test]
fn any_problem_by_a_kernel_of_ones_own() {
    let (first, count) = (number("CPATTN_DRAWN_SEED", 1), number("CPATTN_DRAWN_KERNELS", 120));
    for seed in first..first + count {
        match seed % 8 {
            0 => drawn::<f64>(seed, Dtype::F64, seed % 16 == 0),
            1 => drawn::<bf16>(seed, Dtype::Bf16, seed % 16 == 1),
            _ => drawn::<f32>(seed, Dtype::F32, seed % 2 == 0),
        }
    }
}

fn problem(lengths: &[usize]) -> Problem {
    Problem::new(Batch::from_lengths(lengths).unwrap(), 4, 2, 8, Dtype::F32)
}

fn zigzag(p: &Problem, ring: usize) -> Plan {
    Plan::new(p, mesh(1, ring), Layout::Zigzag).unwrap()
}

/// A kernel that rounds o to bf16 costs half a bit of it where parts are merged, and no more.
#[test]
fn a_kernel_that_rounds_o() {
    let p = Problem::new(Batch::from_lengths(&[70, 41]).unwrap(), 4, 2, 16, Dtype::Bf16).with_sinks(true);
    let (plan, data) = (zigzag(&p, 3), Data::<bf16>::random(&p, 4));
    let (want, one) = (reference(&p, &data), one_rank(&p, &data));
    let rounded = run(&plan, &data, |_| {
        let mut kernel = PlainKernel::new();
        kernel.honours.rounded_o = true;
        kernel
    })
    .unwrap();
    let error = |o: &[bf16]| crate::common::error(o, &want.o);
    let (of_rounded, of_one) = (error(&rounded.o), error(&one.o));
    assert!(of_one < of_rounded && of_rounded < 2.0 * of_one, "{of_rounded:e} {of_one:e}");
}

/// What a kernel does not honour, by name and before anything moves, alike on all ranks.
#[test]
fn what_a_kernel_does_not_honour() {
    let slices = [Slice::new(0..20, 0..20).band(-3, 0)];
    let base = || problem(&[20]);
    let sliced = base().batch().clone().with_slices(&slices).unwrap();
    let cases = [
        (Problem::new(Batch::from_lengths(&[20]).unwrap(), 4, 2, 8, Dtype::F64), "dtype f64 with kernel \"little\""),
        (Problem::new(Batch::from_lengths(&[20]).unwrap(), 4, 2, 40, Dtype::F32), "head_dim 40 with kernel"),
        (base().with_value_dim(12), "value_dim 12 with kernel"),
        (base().with_softcap(2.0), "softcap 2 with kernel"),
        (base().with_alibi_slopes(&[0.5; 4]), "alibi_slopes with kernel"),
        (base().with_mask(Mask::sliding(6)), "window_left 5 with kernel"),
        (Problem::new(sliced, 4, 2, 8, Dtype::F32), "a slice with low -3 with kernel"),
        (base(), "a backward with kernel"),
    ];
    for (p, words) in cases {
        let plan = zigzag(&p, 2);
        let little = |_| {
            let mut kernel = PlainKernel::new();
            kernel.name = "little";
            kernel.honours = Honours::new(&[Dtype::F32], 32);
            kernel
        };
        let prepare = |mut rank: Rank| {
            use cpattn::schedule::Direction::{Backward, Forward};
            rank.prepare(&plan, Forward).and_then(|()| rank.prepare(&plan, Backward))
        };
        for error in ranks(2, little).into_iter().map(prepare) {
            let error = error.unwrap_err().to_string();
            assert!(error.starts_with(words) && error.contains("the library's own kernels"), "{words}: {error}");
        }
    }
}

/// Options of a run or of a plan that no kernel of the caller's can have.
#[test]
fn what_no_kernel_has() {
    let refused = |p: &Problem, options: Options, max: bool, words: &str| {
        let plan = Plan::builder(p).mesh(mesh(1, 1)).layout(Layout::Contiguous).options(options).build().unwrap();
        let data = Data::<f32>::random(p, 2);
        let error = run_with(ranks(1, |_| PlainKernel::new()), &plan, &data, max).unwrap_err().to_string();
        assert!(error.starts_with(words), "{error}");
    };
    let p = problem(&[20]);
    refused(&p.clone().with_dropout(0.5), Options::new(), false, "dropout 0.5 with a kernel of the caller's");
    refused(&p, Options::new().reproducible(true), false, "reproducible with a kernel of the caller's");
    refused(&p, Options::new(), true, "max_logit with a kernel of the caller's");
}

/// A base of 2 is a matter of the tensors of the run.
#[test]
fn lse_to_base_two() {
    let p = problem(&[20]);
    let plan = zigzag(&p, 1);
    let data = Data::<f32>::random(&p, 2);
    let lse = |base| {
        let (mut o, mut lse) = (vec![0f32; 20 * 4 * 8], vec![0f32; 20 * 4]);
        let views = [(&data.q, 4), (&data.k, 2), (&data.v, 2)].map(|(x, heads)| View::new(x, 20, heads, 8).unwrap());
        let [q, k, v] = views;
        let (out, sums) = (ViewMut::new(&mut o, 20, 4, 8).unwrap(), ViewMut::head_major(&mut lse, 20, 4).unwrap());
        let call = cpattn::Forward::new(q, k, v, out, sums).lse_base(base);
        ranks(1, |_| PlainKernel::new()).remove(0).forward(&plan, call).unwrap();
        lse
    };
    let (natural, two) = (lse(LseBase::Natural), lse(LseBase::Two));
    assert!(natural.iter().zip(&two).all(|(a, b)| (a - b * std::f32::consts::LN_2).abs() < 1e-5));
}

/// The errors of ranks of which the second has a kernel that goes wrong; nobody waits for a deadline.
fn outcomes(
    plan: &Plan,
    data: &Data<f32>,
    kernel: impl Fn(usize) -> PlainKernel,
) -> Vec<std::thread::Result<Result<()>>> {
    let start = Instant::now();
    let outcomes = std::thread::scope(|scope| {
        let each = ranks(plan.mesh().world(), kernel).into_iter().map(|mut rank| {
            scope.spawn(move || {
                let mut own = Own::new(plan, data, rank.rank(), compact);
                let first = own.forward(&mut rank, plan).and_then(|()| own.backward(&mut rank, plan));
                if let Err(error) = &first {
                    // The group stays failed.
                    let again = own.forward(&mut rank, plan).unwrap_err();
                    assert!(matches!(error, Error::Disagreement { .. }) || again == *error, "{again}, after {error}");
                }
                first
            })
        });
        let threads: Vec<_> = each.collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    assert!(start.elapsed() < Duration::from_secs(60), "somebody waited for a deadline");
    outcomes
}

/// A kernel that fails in the middle: its rank's error names kernel, rank, operation and step; the peers are told.
#[test]
fn a_kernel_that_fails() {
    let p = problem(&[40, 13]);
    let (plan, data) = (zigzag(&p, 3), Data::<f32>::random(&p, 2));
    // In every call of a forward and of a backward, until none is left.
    for (n, many) in (0..).zip([false, false, true]) {
        let at = if many { 5 } else { n };
        let mut outcomes = outcomes(&plan, &data, |rank| {
            let mut kernel = PlainKernel::new();
            kernel.wrong = if rank == 1 { Wrong::Fails(at) } else { Wrong::Nothing };
            kernel
        });
        let error = outcomes.remove(1).unwrap().unwrap_err();
        assert!(matches!(&error, Error::Kernel { rank: 1, kernel, .. } if kernel == "plain"), "{error}");
        let text = error.to_string();
        let run = if many { "of the backward of plan" } else { "of the forward of plan" };
        assert!(text.starts_with("rank 1, attend") && text.contains(", step ") && text.contains(run), "{text}");
        assert!(text.ends_with("kernel \"plain\" failed: launch failed with 7: out of luck"), "{text}");
        for outcome in outcomes {
            let error = outcome.unwrap().unwrap_err();
            let failed = matches!(&error, Error::Peer { fault: cpattn::Fault::One { peer: 1, cause }, .. } if *cause == Cause::Failed);
            assert!(failed, "{error}");
        }
    }
}

/// A kernel that panics: the panic reaches the caller, the peers are told.
#[test]
fn a_kernel_that_panics() {
    let p = problem(&[40, 13]);
    let (plan, data) = (zigzag(&p, 2), Data::<f32>::random(&p, 2));
    let mut outcomes = outcomes(&plan, &data, |rank| {
        let mut kernel = PlainKernel::new();
        kernel.wrong = if rank == 1 { Wrong::Panics(1) } else { Wrong::Nothing };
        kernel
    });
    assert!(outcomes.remove(1).is_err());
    let error = outcomes.remove(0).unwrap().unwrap_err();
    assert_eq!(error.peer(), Some(1), "{error}");
    assert!(error.to_string().contains("panicked"), "{error}");
}

/// An lse that cannot be is named, and not trusted; one of NaN inputs is passed on, as by the library's own kernels.
#[test]
fn an_lse_that_cannot_be() {
    let p = problem(&[40, 13]);
    let (plan, data) = (zigzag(&p, 2), Data::<f32>::random(&p, 2));
    let wrongs = [
        (Wrong::Lse(f32::NAN), "is NaN for finite q and k: it is not written, or wrong"),
        (Wrong::Lse(f32::NEG_INFINITY), "is -inf for finite q and k: the row has keys"),
        (Wrong::Lse(f32::INFINITY), "is inf for finite q and k: no score of it is so large"),
        (Wrong::Unwritten, "is NaN for finite q and k"),
        (Wrong::TopLeft, "is -inf for finite q and k: the row has keys"),
    ];
    for (wrong, words) in wrongs {
        // Limits from the top-left corner leave rows without keys where there are fewer keys than rows.
        let (plan, data) = if wrong == Wrong::TopLeft {
            let p = Problem::new(Batch::cross(&[0, 10], &[0, 5], Some(&[0])).unwrap(), 4, 2, 8, Dtype::F32);
            let p = p.with_mask(Mask::window(3, 0));
            (Plan::new(&p, mesh(1, 1), Layout::Contiguous).unwrap(), Data::<f32>::random(&p, 2))
        } else {
            (plan.clone(), data.clone())
        };
        let wrong_kernel = |_| {
            let mut kernel = PlainKernel::new();
            kernel.wrong = wrong;
            kernel
        };
        let texts: Vec<String> = outcomes(&plan, &data, wrong_kernel)
            .into_iter()
            .map(|outcome| outcome.unwrap().map_or_else(|error| error.to_string(), |()| "nothing".into()))
            .collect();
        assert!(texts.iter().any(|text| text.contains(words)), "{wrong:?}: {texts:?}");
    }
    let mut nan = data;
    nan.q[5] = f32::NAN;
    let got = run(&plan, &nan, |_| PlainKernel::new()).unwrap();
    assert_eq!(got.lse.iter().filter(|x| x.is_nan()).count(), 1);
}

/// Tensors of any strides, runs of several plans in turn: always the same bits, and nothing beside the tensors.
#[test]
fn runs_repeat_bit_for_bit() {
    let p = problem(&[40, 13]).with_sinks(true);
    let data = Data::<f32>::random(&p, 3);
    // Rows of any strides are packed before they are sent.
    let options = Options::new().pack_inputs(true);
    let ring = Plan::builder(&p).mesh(mesh(1, 2)).layout(Layout::Zigzag).options(options).build().unwrap();
    let plans = [ring, Plan::new(&p, mesh(2, 1), Layout::Contiguous).unwrap()];
    let results = |style| {
        std::thread::scope(|scope| {
            let each = ranks(2, |_| PlainKernel::new()).into_iter().map(|mut rank| {
                let (plans, data) = (&plans, &data);
                scope.spawn(move || {
                    rank.prepare(&plans[1], cpattn::schedule::Direction::Backward).unwrap();
                    let mut found = Vec::new();
                    for plan in [&plans[0], &plans[1], &plans[0], &plans[1]] {
                        let mut own = Own::new(plan, data, rank.rank(), style);
                        own.forward(&mut rank, plan).and_then(|()| own.backward(&mut rank, plan)).unwrap();
                        let slots = [&own.o, &own.lse, &own.dq, &own.dk, &own.dv];
                        assert!(slots.iter().all(|slot| slot.gaps_are_whole()));
                        found.push(slots.map(Slot::bytes));
                    }
                    assert!(found[0] == found[2] && found[1] == found[3]);
                    found
                })
            });
            let threads: Vec<_> = each.collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let all = results(compact);
    assert!(all == results(gaps) && all == results(heads_first));
}

/// A kernel with moves and merges of its own, which it counts.
struct Moves(PlainKernel, Arc<[AtomicUsize; 2]>);

impl VarlenKernel for Moves {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn honours(&self) -> Honours {
        self.0.honours()
    }

    fn forward(
        &mut self,
        call: &Rectangles<'_>,
        inputs: [Elements<'_>; 3],
        o: ElementsMut<'_>,
        lse: ElementsMut<'_>,
    ) -> Result<()> {
        self.0.forward(call, inputs, o, lse)
    }

    unsafe fn transform(&mut self, args: &Transform<'_>) -> Result<()> {
        self.1[0].fetch_add(1, Relaxed);
        // SAFETY: handed on.
        unsafe { cpu::transform(args) }
    }

    unsafe fn merge(&mut self, args: &Merge) -> Result<()> {
        if self.1[1].fetch_add(1, Relaxed) == 3 {
            return Err(Error::invalid("the fourth merge", 4, "at most 3"));
        }
        // SAFETY: handed on.
        unsafe { self.0.merge(args) }
    }
}

/// Copies and merges by the kernel; the failure of one names the operation.
#[test]
fn moves_of_ones_own() {
    let counts: Arc<[AtomicUsize; 2]> = Arc::default();
    let failure = |lengths: &[usize]| {
        let plan = Plan::new(&problem(lengths), mesh(1, 1), Layout::Contiguous).unwrap();
        let data = Data::<f32>::random(plan.problem(), 2);
        counts.iter().for_each(|count| count.store(0, Relaxed));
        run(&plan, &data, |_| Moves(PlainKernel::new(), Arc::clone(&counts))).unwrap_err().to_string()
    };
    // Each document is a rectangle, whose result is merged. The backward is promised, and not written.
    let text = failure(&[40, 13]);
    assert!(text.starts_with("rank 0, attend backward, step 0") && text.contains("the kernel has none"), "{text}");
    assert!(counts[0].load(Relaxed) > 0 && counts[1].load(Relaxed) == 2, "{counts:?}");
    let text = failure(&[40, 13, 5, 9]);
    assert!(text.starts_with("rank 0, attend, step 0") && text.contains("the fourth merge is 4"), "{text}");
}

/// Ranks with other kernels, or the same one with other limits, find out before anything moves, and may go on.
#[test]
fn ranks_need_the_same_kernel() {
    let p = problem(&[40]);
    let (plan, data) = (zigzag(&p, 2), Data::<f32>::random(&p, 2));
    for limits in [false, true] {
        let errors = outcomes(&plan, &data, |rank| {
            let mut kernel = PlainKernel::new();
            if rank == 1 && limits {
                kernel.honours.softcap = false;
            } else if rank == 1 {
                kernel.name = "other";
            }
            kernel
        });
        for error in errors {
            let error = error.unwrap().unwrap_err();
            assert!(matches!(error, Error::Disagreement { .. }), "{error}");
            assert!(error.to_string().contains(", kernel \""), "{error}");
        }
    }
}

/// A plan that one rank's kernel does not honour, in the group's first run: the others are told at once who differs.
/// Where no kernel honours it all refuse, and the group stays usable.
#[test]
fn one_kernel_alone_refuses() {
    let p = problem(&[40, 13]).with_softcap(2.0);
    let (plan, data) = (zigzag(&p, 3), Data::<f32>::random(&p, 2));
    let without_softcap = || {
        let mut kernel = PlainKernel::new();
        kernel.honours.softcap = false;
        kernel
    };
    let errors = outcomes(&plan, &data, |rank| if rank == 2 { without_softcap() } else { PlainKernel::new() });
    for (rank, error) in errors.into_iter().enumerate() {
        let error = error.unwrap().unwrap_err();
        let Error::Disagreement { peer, .. } = &error else { panic!("{error}") };
        assert!(if rank == 2 { *peer < 2 } else { *peer == 2 }, "rank {rank}: {error}");
        assert!(error.to_string().contains("softcap: "), "{error}");
    }
    let (plain, plain_data) = {
        let p = problem(&[40, 13]);
        (zigzag(&p, 3), Data::<f32>::random(&p, 2))
    };
    std::thread::scope(|scope| {
        for mut rank in ranks(3, |_| without_softcap()) {
            let (plan, data, plain, plain_data) = (&plan, &data, &plain, &plain_data);
            scope.spawn(move || {
                for _ in 0..2 {
                    let error = Own::new(plan, data, rank.rank(), compact).forward(&mut rank, plan).unwrap_err();
                    assert!(error.to_string().starts_with("softcap 2 with kernel \"plain\""), "{error}");
                    Own::new(plain, plain_data, rank.rank(), compact).forward(&mut rank, plain).unwrap();
                }
            });
        }
    });
}

/// A score that is too large for sums in f32 is named; the kernel is not blamed.
#[test]
fn a_score_that_overflows() {
    let p = problem(&[6]);
    let (plan, mut data) = (zigzag(&p, 1), Data::<f32>::random(&p, 2));
    let large = |row: &mut [f32]| row.iter_mut().for_each(|x| *x = 1e20);
    large(&mut data.q[4 * 4 * 8..][..8]);
    large(&mut data.k[3 * 2 * 8..][..8]);
    let error = run(&plan, &data, |_| PlainKernel::new()).expect_err("an error");
    let text = error.to_string();
    assert!(
        // The call has the keys of the first chunk, 0 to 3, and then those of the second, 0 to 6.
        text.contains("q·k of row 4, key 6 and head 0 of a call (rank 0, attend") && text.contains("is up to 8.0"),
        "{text}"
    );
    assert!(!text.contains("kernel \"plain\""), "{text}");
}
