// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole runs in which one rank goes wrong, at every call of its transport, in every mode.
//!
//! A good run of each mode is tapped first: what each rank returns, and which calls of its transport it makes, with
//! which peers. A trial then repeats that run and lets one rank die, leave, fail, fall silent, come late or panic at one
//! of those calls, or in its own code before or between the two directions. What must hold every time:
//!
//! - every rank returns, in time: far below the deadline when the fault is one that is noticed at once;
//! - a rank that still needed the culprit gets an error that names itself, the culprit and what it did;
//! - a rank that returns `Ok` has the very bits of the good run; there is no third way;
//! - afterwards the rank says so again, at once, and no thread or memory is left behind.
//!
//! `cargo test` tries every call with the faults that cost no waiting, and a sample of the others. With
//! `CPATTN_FAULT_TRIALS=10000 cargo test --test faults` as many trials are drawn at random.

mod common;

use common::{Data, Random};
use cpattn::{
    Backward, Batch, Cause, Dtype, Error, Forward, Layout, Mask, Mesh, Options, Plan, Problem, Rank, Result, Side,
    View, ViewMut,
    plan::Circulate,
    transport::{
        Label, Message, Transport,
        fault::{Fault, Faulty},
        local::{self, Local},
    },
};
use std::{
    alloc::{GlobalAlloc, Layout as Block, System},
    collections::BTreeSet,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, Once, PoisonError,
        atomic::{AtomicI64, AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

/// Nothing that fails at once may wait for this.
const FAR: Duration = Duration::from_secs(60);
/// For faults that only a deadline finds.
const NEAR: Duration = Duration::from_millis(400);
/// What a busy machine may add to any trial.
const SLACK: Duration = Duration::from_secs(20);

/// Counts the bytes that are allocated at the moment.
struct Counting;
static LIVE: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        LIVE.fetch_add(block.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(block) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, block: Block) {
        LIVE.fetch_sub(block.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, block) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Trials count threads and bytes of the whole process, so tests of this file take turns.
static TURN: Mutex<()> = Mutex::new(());

/// What a rank does wrong.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// Nothing.
    Nothing,
    /// Something at one call of its transport.
    At(u64, Fault),
    /// Its rank is dropped before the forward.
    DropFirst,
    /// Its rank is dropped between forward and backward.
    DropBetween,
    /// The caller's code panics before the forward.
    PanicFirst,
    /// The caller's code panics between forward and backward.
    PanicBetween,
    /// Another thread aborts through a handle, after so many microseconds.
    Abort(u64),
}

impl Act {
    /// What the others say the culprit did.
    fn cause(self, deadline: Duration) -> Option<Cause> {
        let late = Cause::Deadline(deadline.as_millis() as u64);
        match self {
            Self::Nothing => None,
            Self::At(_, Fault::Delay(by)) => (by > deadline).then_some(late),
            Self::At(_, Fault::Silence) => Some(late),
            Self::At(_, Fault::Panic) | Self::PanicFirst | Self::PanicBetween => Some(Cause::Panicked),
            Self::At(_, Fault::Fail) => Some(Cause::Failed),
            Self::At(_, Fault::Leave) | Self::DropFirst | Self::DropBetween => Some(Cause::Left),
            Self::At(..) => None,
            Self::Abort(_) => Some(Cause::Aborted),
        }
    }

    fn deadline(self) -> Duration {
        match self {
            Self::At(_, Fault::Silence) => NEAR,
            Self::At(_, Fault::Delay(by)) if by > NEAR => NEAR,
            _ => FAR,
        }
    }
}

/// One call of a transport.
#[derive(Clone, Debug)]
struct Call {
    label: Label,
    peers: BTreeSet<usize>,
}

/// A transport that writes down its calls.
struct Tap {
    inner: Local,
    calls: Arc<Mutex<Vec<Call>>>,
}

impl Transport for Tap {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn world(&self) -> usize {
        self.inner.world()
    }
    fn agree(&self, group: Range<usize>, number: u64) -> Result<()> {
        let label = Label { operation: "agree", step: 0 };
        self.calls.lock().unwrap().push(Call { label, peers: group.clone().collect() });
        self.inner.agree(group, number)
    }
    unsafe fn exchange(&self, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
        let peers = sends.iter().chain(recvs).map(|m| m.peer).collect();
        self.calls.lock().unwrap().push(Call { label, peers });
        // SAFETY: the caller's promise is handed on.
        unsafe { self.inner.exchange(label, sends, recvs) }
    }
    fn poll(&self) -> Result<()> {
        self.inner.poll()
    }
    fn abort(&self, cause: Cause) {
        self.inner.abort(cause);
    }
}

/// o and lse; dq, dk, dv, dsinks.
type Parts = Vec<Vec<f32>>;

/// What a rank's thread brings back.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a handful exist at a time")]
enum End {
    /// It panicked.
    Panicked,
    /// It left on purpose, or another way was found wrong.
    Gone,
    /// What each direction returned, and what the rank says when asked again.
    Returned { forward: Result<Parts>, backward: Option<Result<Parts>>, again: Option<Error> },
}

/// A way to run a small problem.
struct Mode {
    name: &'static str,
    plan: Plan,
    data: Data<f32>,
    /// By rank: what a good run returns.
    good: Vec<(Parts, Parts)>,
    /// By rank: the calls of a good run.
    calls: Vec<Vec<Call>>,
}

/// One rank's forward.
fn forward(rank: &mut Rank, plan: &Plan, data: &Data<f32>) -> Result<Parts> {
    let (p, r) = (plan.problem(), rank.rank());
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.v_head_dim());
    let (tq, tk) = (plan.local_tokens(Side::Q, r), plan.local_tokens(Side::K, r));
    let q = plan.shard(Side::Q, r, &data.q, hq * d)?;
    let k = plan.shard(Side::K, r, &data.k, hk * d)?;
    let v = plan.shard(Side::K, r, &data.v, hk * dv)?;
    let (mut o, mut lse) = (vec![f32::NAN; tq * hq * dv], vec![f32::NAN; tq * hq]);
    let tensors = Forward {
        q: View::new(&q, tq, hq, d)?,
        k: View::new(&k, tk, hk, d)?,
        v: View::new(&v, tk, hk, dv)?,
        sinks: data.sinks.as_deref(),
        o: ViewMut::new(&mut o, tq, hq, dv)?,
        lse: ViewMut::head_major(&mut lse, tq, hq)?,
    };
    rank.forward(plan, tensors)?;
    Ok(vec![o, lse])
}

/// One rank's backward.
fn backward(rank: &mut Rank, plan: &Plan, data: &Data<f32>, made: &Parts) -> Result<Parts> {
    let (p, r) = (plan.problem(), rank.rank());
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.v_head_dim());
    let (tq, tk) = (plan.local_tokens(Side::Q, r), plan.local_tokens(Side::K, r));
    let q = plan.shard(Side::Q, r, &data.q, hq * d)?;
    let k = plan.shard(Side::K, r, &data.k, hk * d)?;
    let v = plan.shard(Side::K, r, &data.v, hk * dv)?;
    let d_o = plan.shard(Side::Q, r, &data.d_o, hq * dv)?;
    let (mut dq, mut dk) = (vec![f32::NAN; tq * hq * d], vec![f32::NAN; tk * hk * d]);
    let (mut d_v, mut dsinks) = (vec![f32::NAN; tk * hk * dv], vec![f32::NAN; if p.has_sinks() { hq } else { 0 }]);
    let tensors = Backward {
        q: View::new(&q, tq, hq, d)?,
        k: View::new(&k, tk, hk, d)?,
        v: View::new(&v, tk, hk, dv)?,
        sinks: data.sinks.as_deref(),
        o: View::new(&made[0], tq, hq, dv)?,
        lse: View::head_major(&made[1], tq, hq)?,
        d_o: View::new(&d_o, tq, hq, dv)?,
        dq: ViewMut::new(&mut dq, tq, hq, d)?,
        dk: ViewMut::new(&mut dk, tk, hk, d)?,
        dv: ViewMut::new(&mut d_v, tk, hk, dv)?,
        dsinks: p.has_sinks().then_some(&mut dsinks),
    };
    rank.backward(plan, tensors)?;
    Ok(vec![dq, dk, d_v, dsinks])
}

/// The life of one rank.
fn live(mut rank: Rank, plan: &Plan, data: &Data<f32>, act: Act) -> End {
    match act {
        Act::DropFirst => return End::Gone,
        Act::PanicFirst => panic!("fault injected before the forward"),
        _ => {}
    }
    let aborter = match act {
        Act::Abort(micros) => {
            let handle = rank.handle();
            Some(thread::spawn(move || {
                thread::sleep(Duration::from_micros(micros));
                handle.abort();
            }))
        }
        _ => None,
    };
    let forward = forward(&mut rank, plan, data);
    let backward = match &forward {
        Ok(_) if matches!(act, Act::DropBetween) => return End::Gone,
        Ok(_) if matches!(act, Act::PanicBetween) => panic!("fault injected between the directions"),
        Ok(made) => Some(backward(&mut rank, plan, data, made)),
        Err(_) => None,
    };
    if let Some(aborter) = aborter {
        aborter.join().unwrap();
    }
    // After a failure, asking again tells the same without waiting, and running again is refused.
    let failed = forward.is_err() || backward.as_ref().is_some_and(|b| b.is_err());
    let again = failed.then(|| {
        let start = Instant::now();
        let refused = self::forward(&mut rank, plan, data).expect_err("a failed group runs again");
        assert!(start.elapsed() < SLACK, "a failed group makes its ranks wait");
        assert!(rank.poll().is_err() && rank.handle().poll().is_err(), "a failed group polls as well");
        refused
    });
    End::Returned { forward, backward, again }
}

/// Runs every rank on a thread of its own; what each brought back, and how long it took.
fn play(mode: &Mode, culprit: usize, act: Act) -> (Vec<End>, Duration) {
    let deadline = act.deadline();
    let start = Instant::now();
    let (sender, receiver) = mpsc::channel();
    let shared = Arc::new((mode.plan.clone(), mode.data.clone()));
    let threads: Vec<_> = local::group(mode.plan.mesh().world(), deadline)
        .unwrap()
        .into_iter()
        .map(|end| {
            let (sender, shared) = (sender.clone(), Arc::clone(&shared));
            let r = end.rank();
            let mine = if r == culprit { act } else { Act::Nothing };
            let run = move || {
                let (at, fault) = if let Act::At(at, fault) = mine { (at, fault) } else { (0, Fault::None) };
                let rank = Rank::new(Faulty::new(end, at, fault));
                let end = catch_unwind(AssertUnwindSafe(|| live(rank, &shared.0, &shared.1, mine)));
                drop(shared);
                sender.send((r, end.unwrap_or(End::Panicked))).unwrap();
            };
            thread::Builder::new().name(format!("fault-{r}")).spawn(run).unwrap()
        })
        .collect();
    let mut ends: Vec<Option<End>> = threads.iter().map(|_| None).collect();
    for _ in 0..threads.len() {
        let left = (deadline * 3 + SLACK).saturating_sub(start.elapsed());
        let Ok((r, end)) = receiver.recv_timeout(left) else {
            let missing: Vec<usize> = (0..ends.len()).filter(|&r| ends[r].is_none()).collect();
            panic!("{}, rank {culprit}, {act:?}: ranks {missing:?} hang", mode.name);
        };
        ends[r] = Some(end);
    }
    let took = start.elapsed();
    threads.into_iter().for_each(|t| t.join().unwrap());
    (ends.into_iter().flatten().collect(), took)
}

impl Mode {
    fn new(name: &'static str, problem: Problem, mesh: Mesh, options: Options) -> Self {
        let plan = Plan::with_options(&problem, mesh, Layout::Zigzag, options).unwrap();
        let data = Data::<f32>::random(&problem, 3);
        let mut mode = Self { name, plan, data, good: Vec::new(), calls: Vec::new() };
        let taps: Vec<_> = local::group(mode.plan.mesh().world(), FAR)
            .unwrap()
            .into_iter()
            .map(|inner| Tap { inner, calls: Arc::default() })
            .collect();
        let lists: Vec<_> = taps.iter().map(|t| Arc::clone(&t.calls)).collect();
        mode.good = thread::scope(|scope| {
            let run = |tap: Tap| {
                let mut rank = Rank::new(tap);
                let made = forward(&mut rank, &mode.plan, &mode.data).unwrap();
                let gradients = backward(&mut rank, &mode.plan, &mode.data, &made).unwrap();
                (made, gradients)
            };
            let threads: Vec<_> = taps.into_iter().map(|tap| scope.spawn(move || run(tap))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        mode.calls = lists.iter().map(|l| l.lock().unwrap().clone()).collect();
        mode
    }

    fn world(&self) -> usize {
        self.calls.len()
    }

    /// How many calls the forward of a rank makes.
    fn forward_calls(&self, rank: usize) -> usize {
        self.calls[rank].iter().skip(1).position(|c| c.label.operation == "agree").unwrap() + 1
    }

    /// Whether `rank` meets `culprit` in a call of the culprit's that does not take place.
    fn needs(&self, rank: usize, culprit: usize, act: Act) -> bool {
        let from = match act {
            Act::At(at, _) => at as usize,
            Act::DropBetween | Act::PanicBetween => self.forward_calls(culprit),
            _ => 0,
        };
        self.calls[culprit][from..].iter().any(|c| c.peers.contains(&rank))
    }

    /// One trial; everything that must hold.
    fn trial(&self, culprit: usize, act: Act) {
        let what = format!("{}, rank {culprit}, {act:?}", self.name);
        let deadline = act.deadline();
        let cause = act.cause(deadline);
        let (ends, took) = play(self, culprit, act);
        let bound = if deadline == FAR { FAR / 2 } else { deadline * 2 + SLACK };
        assert!(took < bound, "{what}: took {took:?}");
        for (r, end) in ends.iter().enumerate() {
            let what = format!("{what}: rank {r}");
            let (forward, backward, again) = match end {
                End::Returned { forward, backward, again } => (forward, backward, again),
                End::Panicked => {
                    assert!(r == culprit && cause == Some(Cause::Panicked), "{what} panicked");
                    continue;
                }
                End::Gone => {
                    assert!(r == culprit && cause == Some(Cause::Left), "{what} is gone");
                    continue;
                }
            };
            let mut failed = None;
            match forward {
                Ok(parts) => assert!(*parts == self.good[r].0, "{what}: wrong o or lse"),
                Err(error) => failed = Some(error),
            }
            match backward {
                Some(Ok(parts)) => assert!(*parts == self.good[r].1, "{what}: wrong gradients"),
                Some(Err(error)) => failed = Some(error),
                None => {}
            }
            let Some(error) = failed else {
                let free = cause.is_none() || matches!(act, Act::Abort(_));
                let own = r == culprit && !free;
                assert!(!own && (free || !self.needs(r, culprit, act)), "{what} returned Ok");
                continue;
            };
            let Error::Peer { rank, operation, step, peer, cause: found } = *error else { panic!("{what}: {error}") };
            assert_eq!((rank, peer, Some(found)), (r, culprit, cause), "{what}: {error}");
            let labels = &self.calls[r];
            let known = labels.iter().any(|c| c.label == Label { operation, step });
            // A silent call never reaches the transport, which then still knows the call before.
            let known = known || matches!(act, Act::At(0, Fault::Silence)) && operation == "start";
            assert!(known, "{what}: no call is named {operation}, step {step}");
            if let (true, Act::At(at, Fault::Fail | Fault::Leave)) = (r == culprit, act) {
                let Label { operation: o, step: s } = labels[at as usize].label;
                assert_eq!((operation, step), (o, s), "{what}: {error}");
            }
            let Some(Error::Peer { peer, .. }) = again else { panic!("{what}: {again:?}") };
            assert_eq!(*peer, culprit, "{what}: {again:?}");
        }
    }
}

fn modes() -> Vec<Mode> {
    let batch = Batch::from_lengths(&[13, 0, 6, 9]).unwrap();
    let p = || Problem::new(batch.clone(), 4, 2, 8, Dtype::F32);
    let mesh = |u, r| Mesh::explicit(u * r, u, r).unwrap();
    let o = Options::new;
    vec![
        Mode::new("Ulysses", p(), mesh(3, 1), o()),
        Mode::new("ring", p(), mesh(1, 4), o().circulate(Circulate::Keys)),
        Mode::new("hybrid", p().mask(Mask::full()), mesh(2, 2), o()),
        Mode::new("gather", p(), mesh(1, 3), o().gather(true)),
        Mode::new("queries", p(), mesh(1, 3), o().circulate(Circulate::Queries)),
        Mode::new("reproducible", p(), mesh(2, 2), o().reproducible(true)),
        Mode::new("passes", p(), mesh(1, 3), o().passes(2)),
        Mode::new("sinks", p().sinks(true).softcap(2.0), mesh(2, 2), o()),
        Mode::new("replicas", p(), Mesh::explicit(4, 1, 2).unwrap(), o()),
    ]
}

/// Expected panics say nothing.
fn hush() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let payload = info.payload();
            let text = payload.downcast_ref::<String>().map(String::as_str).or(payload.downcast_ref::<&str>().copied());
            if !text.is_some_and(|s| s.starts_with("fault injected")) {
                before(info);
            }
        }));
    });
}

/// Threads of ranks that are alive.
fn ranks_alive() -> usize {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else { return 0 };
    let name = |t: std::io::Result<std::fs::DirEntry>| std::fs::read_to_string(t.ok()?.path().join("comm")).ok();
    tasks.filter_map(name).filter(|n| n.starts_with("cpattn-comm") || n.starts_with("fault-")).count()
}

/// Plays trials on some threads at once; nothing may be left behind.
fn play_all(modes: &[Mode], trials: &[(usize, usize, Act)]) {
    hush();
    // What is allocated once, on first use, is no leak.
    for &(mode, culprit, act) in trials.iter().take(8) {
        modes[mode].trial(culprit, act);
    }
    let (before, next) = (LIVE.load(Ordering::Relaxed), AtomicUsize::new(0));
    thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| {
                while let Some(&(mode, culprit, act)) = trials.get(next.fetch_add(1, Ordering::Relaxed)) {
                    modes[mode].trial(culprit, act);
                }
            });
        }
    });
    // The kernel takes a thread off its list shortly after it was joined.
    let patience = Instant::now();
    while ranks_alive() > 0 && patience.elapsed() < SLACK {
        thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(ranks_alive(), 0, "threads are left behind");
    let after = LIVE.load(Ordering::Relaxed);
    assert!(after - before < 64 << 10, "{} bytes are left behind by {} trials", after - before, trials.len());
}

/// Everything that can go wrong without costing more than a few milliseconds.
fn swift(at: u64) -> [Act; 4] {
    [Fault::Panic, Fault::Fail, Fault::Leave, Fault::Delay(Duration::from_millis(15))].map(|f| Act::At(at, f))
}

#[test]
fn at_every_call_of_every_rank_in_every_mode() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let modes = modes();
    let mut trials = Vec::new();
    for (m, mode) in modes.iter().enumerate() {
        assert!(mode.calls.iter().all(|c| c.len() >= 4), "{}: {:?}", mode.name, mode.calls);
        for culprit in 0..mode.world() {
            for at in 0..mode.calls[culprit].len() as u64 {
                trials.extend(swift(at).map(|act| (m, culprit, act)));
            }
            let own = [Act::Nothing, Act::DropFirst, Act::DropBetween, Act::PanicFirst, Act::PanicBetween];
            trials.extend(own.map(|act| (m, culprit, act)));
        }
    }
    play_all(&modes, &trials);
}

#[test]
fn silence_and_delays_beyond_the_deadline() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let modes = modes();
    let mut r = Random(1);
    let mut trials = Vec::new();
    for (m, mode) in modes.iter().enumerate() {
        for fault in [Fault::Silence, Fault::Silence, Fault::Delay(NEAR * 2)] {
            let culprit = r.below(mode.world());
            trials.push((m, culprit, Act::At(r.below(mode.calls[culprit].len()) as u64, fault)));
        }
    }
    play_all(&modes, &trials);
}

#[test]
fn an_abort_from_another_thread_at_any_moment() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let modes = modes();
    let mut r = Random(2);
    let draw = |i: usize| (i % modes.len(), r.below(2), Act::Abort(r.below(3000) as u64));
    let trials: Vec<_> = (0..modes.len() * 10).map(draw).collect();
    play_all(&modes, &trials);
}

#[test]
fn as_many_trials_as_are_asked_for() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let count = std::env::var("CPATTN_FAULT_TRIALS").map_or(100, |n| n.parse().expect("a number of trials"));
    let (modes, start) = (modes(), Instant::now());
    let mut r = Random(9);
    let trials: Vec<_> = (0..count)
        .map(|i| {
            let m = i % modes.len();
            let culprit = r.below(modes[m].world());
            let at = r.below(modes[m].calls[culprit].len()) as u64;
            // One in sixteen waits for a deadline.
            let act = match r.below(16) {
                0 if r.below(2) == 0 => Act::At(at, Fault::Silence),
                0 => Act::At(at, Fault::Delay(NEAR * 2)),
                1 => Act::DropFirst,
                2 => Act::DropBetween,
                3 => Act::PanicFirst,
                4 => Act::PanicBetween,
                5 => Act::Abort(r.below(4000) as u64),
                n => swift(at)[n % 4],
            };
            (m, culprit, act)
        })
        .collect();
    play_all(&modes, &trials);
    println!("{count} trials in {:.1} s", start.elapsed().as_secs_f64());
}

#[test]
fn new_ranks_run_after_a_failure_and_old_handles_do_not_keep_a_rank() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    hush();
    let mode = &modes()[1];
    mode.trial(2, Act::At(3, Fault::Panic));
    mode.trial(2, Act::Nothing);
    // A handle that outlives its rank does not hide that the rank has left.
    let mut ranks: Vec<Rank> = local::group(2, FAR).unwrap().into_iter().map(Rank::new).collect();
    let handle = ranks[1].handle();
    drop(ranks.pop());
    let p = mode.plan.problem();
    let plan = Plan::new(p, Mesh::ring(2).unwrap(), Layout::Contiguous).unwrap();
    let error = forward(&mut ranks[0], &plan, &mode.data).unwrap_err();
    assert_eq!(error.to_string(), "rank 0, agree, step 0: rank 1 left");
    handle.abort();
    assert_eq!(handle.poll(), Ok(()));
}
