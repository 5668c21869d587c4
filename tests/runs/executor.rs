// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernels on threads of the caller's: the same bits whatever the executor does with its workers, and no silence about
//! one that fails.

use cpattn::kernel::cpu::Executor;
use cpattn::{Backward, Forward};
use cpattn::{Batch, Dtype, Element, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut, transport::local};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Calls the work `calls(n)` times on that many threads.
struct Threads(fn(usize) -> usize);

impl Executor for Threads {
    fn execute(&self, n: usize, work: &(dyn Fn() + Sync)) {
        std::thread::scope(|scope| (0..(self.0)(n)).for_each(|_| drop(scope.spawn(work))));
    }
}

/// One after another on the calling thread; counts the calls.
struct Counted(AtomicUsize);

impl Executor for Counted {
    fn execute(&self, n: usize, work: &(dyn Fn() + Sync)) {
        (0..n).for_each(|_| work());
        self.0.fetch_add(n, Ordering::Relaxed);
    }
}

const HEADS: usize = 4;
const DIM: usize = 40;

/// o, lse, dq, dk and dv of packed documents on one rank, as bits.
fn bits<T: Element>(workers: usize, executor: Option<Arc<dyn Executor>>) -> Vec<u64> {
    let problem = Problem::new(Batch::new(&[0, 700, 701, 1100]).unwrap(), HEADS, 2, DIM, T::DTYPE);
    let plan = Plan::new(&problem, Mesh::ring(1).unwrap(), Layout::Contiguous).unwrap();
    let end = local::group(1, Duration::from_secs(60)).unwrap().remove(0);
    let mut rank = match executor {
        Some(executor) => Rank::with_executor(end, workers, executor),
        None => Rank::with_workers(end, workers),
    };
    let n = plan.local_tokens(Side::Q, 0).len();
    let mut random = fastrand::Rng::with_seed(7);
    let mut numbers =
        |heads: usize| -> Vec<T> { (0..n * heads * DIM).map(|_| T::from_f64(random.f64() * 2.0 - 1.0)).collect() };
    let (q, k, v, d_o) = (numbers(HEADS), numbers(2), numbers(2), numbers(HEADS));
    let nan = |heads: usize| vec![T::from_f64(f64::NAN); n * heads * DIM];
    let (mut o, mut dq, mut dk, mut dv) = (nan(HEADS), nan(HEADS), nan(2), nan(2));
    let mut lse = vec![<T::Acc as Element>::from_f64(f64::NAN); n * HEADS];
    let view = |x| View::new(x, n, HEADS, DIM).unwrap();
    let pair = |x| View::new(x, n, 2, DIM).unwrap();
    rank.forward(
        &plan,
        Forward::new(
            view(&q),
            pair(&k),
            pair(&v),
            ViewMut::new(&mut o, n, HEADS, DIM).unwrap(),
            ViewMut::new(&mut lse, n, HEADS, 1).unwrap(),
        ),
    )
    .unwrap();
    rank.backward(
        &plan,
        Backward::new(
            view(&q),
            pair(&k),
            pair(&v),
            view(&o),
            View::new(&lse, n, HEADS, 1).unwrap(),
            view(&d_o),
            [
                ViewMut::new(&mut dq, n, HEADS, DIM).unwrap(),
                ViewMut::new(&mut dk, n, 2, DIM).unwrap(),
                ViewMut::new(&mut dv, n, 2, DIM).unwrap(),
            ],
        ),
    )
    .unwrap();
    let all = [o, dq, dk, dv].concat();
    assert!(all.iter().all(|x| x.to_f64().is_finite()));
    all.iter().map(|x| x.to_f64().to_bits()).chain(lse.iter().map(|x| x.to_f64().to_bits())).collect()
}

/// Two calls (forward and backward) with three workers each.
fn every_executor<T: Element>() {
    let expected = bits::<T>(1, None);
    let threads: [fn(usize) -> usize; 4] = [|n| n, |_| 0, |_| 1, |n| 3 * n];
    for calls in threads {
        assert_eq!(bits::<T>(3, Some(Arc::new(Threads(calls)))), expected, "{} calls for 3", calls(3));
    }
    let counted = Arc::new(Counted(AtomicUsize::new(0)));
    assert_eq!(bits::<T>(3, Some(counted.clone())), expected);
    assert_eq!(counted.0.load(Ordering::Relaxed), 2 * 3, "{}", T::DTYPE);
    let alone = Arc::new(Counted(AtomicUsize::new(0)));
    assert_eq!(bits::<T>(1, Some(alone.clone())), expected);
    assert_eq!(alone.0.load(Ordering::Relaxed), 0, "one worker needs no other thread");
}

#[test]
fn bits_do_not_depend_on_the_executor() {
    every_executor::<f32>();
    every_executor::<half::bf16>();
    every_executor::<f64>();
}

/// An executor that panics itself ends the call as any panic does.
#[test]
fn a_panic_of_the_executor_reaches_the_caller() {
    struct Panics;
    impl Executor for Panics {
        fn execute(&self, _: usize, _: &(dyn Fn() + Sync)) {
            panic!("no threads today");
        }
    }
    let found = catch_unwind(AssertUnwindSafe(|| bits::<f32>(2, Some(Arc::new(Panics))))).unwrap_err();
    assert_eq!(found.downcast_ref::<&str>(), Some(&"no threads today"));
    assert_eq!(Dtype::F32, <f32 as Element>::DTYPE);
}

/// More workers than the build has threads for are refused before anything runs, in runs and in single calls.
#[cfg(not(feature = "rayon"))]
#[test]
fn workers_without_threads_are_refused() {
    let wanted =
        "workers = 8 is not supported: the kernels start no threads of their own; build with the feature rayon";
    let problem = Problem::new(Batch::new(&[0, 7]).unwrap(), HEADS, 2, DIM, Dtype::F32);
    let plan = Plan::new(&problem, Mesh::ring(1).unwrap(), Layout::Contiguous).unwrap();
    let end = local::group(1, Duration::from_secs(60)).unwrap().remove(0);
    let mut rank = Rank::with_workers(end, 8);
    let refusal = rank.prepare(&plan, cpattn::schedule::Direction::Forward).unwrap_err().to_string();
    assert!(refusal.starts_with(wanted), "{refusal}");
    let mut kernels = cpattn::kernel::Kernels::cpu(8);
    let refusal = kernels.reserve(Dtype::F32, 8, 8).unwrap_err().to_string();
    assert!(refusal.starts_with(wanted), "{refusal}");
}
