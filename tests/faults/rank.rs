// SPDX-License-Identifier: MIT OR Apache-2.0
//! The life of a rank that may go wrong, and a group of them, each on a thread of its own.

use crate::act::{Act, SLACK};
use crate::common::{
    Data,
    through::{Fault, Through},
};
use crate::mode::Mode;
use cpattn::{
    Backward, Error, Forward, Plan, Rank, Result, Side, View, ViewMut,
    transport::{Transport, local},
};
use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

/// o and lse; dq, dk, dv, dsinks.
pub type Parts = Vec<Vec<f32>>;

/// What a rank's thread brings back.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "a handful exist at a time")]
pub enum End {
    /// It panicked.
    Panicked,
    /// It left on purpose, or another way was found wrong.
    Gone,
    /// What each direction returned, and what the rank says when asked again.
    Returned { forward: Result<Parts>, backward: Option<Result<Parts>>, again: Option<Error> },
}

/// One rank's forward.
pub fn forward(rank: &mut Rank, plan: &Plan, data: &Data<f32>) -> Result<Parts> {
    let (p, r) = (plan.problem(), rank.rank());
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let (tq, tk) = (plan.local_tokens(Side::Q, r).len(), plan.local_tokens(Side::K, r).len());
    let q = plan.local_tokens(Side::Q, r).shard(&data.q, hq * d)?;
    let k = plan.local_tokens(Side::K, r).shard(&data.k, hk * d)?;
    let v = plan.local_tokens(Side::K, r).shard(&data.v, hk * dv)?;
    let (mut o, mut lse) = (vec![f32::NAN; tq * hq * dv], vec![f32::NAN; tq * hq]);
    let tensors = Forward::new(
        View::new(&q, tq, hq, d)?,
        View::new(&k, tk, hk, d)?,
        View::new(&v, tk, hk, dv)?,
        ViewMut::new(&mut o, tq, hq, dv)?,
        ViewMut::head_major(&mut lse, tq, hq)?,
    )
    .sinks(data.sinks.as_deref());
    rank.forward(plan, tensors)?;
    Ok(vec![o, lse])
}

/// One rank's backward.
pub fn backward(rank: &mut Rank, plan: &Plan, data: &Data<f32>, made: &Parts) -> Result<Parts> {
    let (p, r) = (plan.problem(), rank.rank());
    let (hq, hk, d, dv) = (p.heads(), p.kv_heads(), p.head_dim(), p.value_dim());
    let (tq, tk) = (plan.local_tokens(Side::Q, r).len(), plan.local_tokens(Side::K, r).len());
    let q = plan.local_tokens(Side::Q, r).shard(&data.q, hq * d)?;
    let k = plan.local_tokens(Side::K, r).shard(&data.k, hk * d)?;
    let v = plan.local_tokens(Side::K, r).shard(&data.v, hk * dv)?;
    let d_o = plan.local_tokens(Side::Q, r).shard(&data.d_o, hq * dv)?;
    let (mut dq, mut dk) = (vec![f32::NAN; tq * hq * d], vec![f32::NAN; tk * hk * d]);
    let (mut d_v, mut dsinks) = (vec![f32::NAN; tk * hk * dv], vec![f32::NAN; if p.sinks() { hq } else { 0 }]);
    let tensors = Backward::new(
        View::new(&q, tq, hq, d)?,
        View::new(&k, tk, hk, d)?,
        View::new(&v, tk, hk, dv)?,
        View::new(&made[0], tq, hq, dv)?,
        View::head_major(&made[1], tq, hq)?,
        View::new(&d_o, tq, hq, dv)?,
        [ViewMut::new(&mut dq, tq, hq, d)?, ViewMut::new(&mut dk, tk, hk, d)?, ViewMut::new(&mut d_v, tk, hk, dv)?],
    )
    .sinks(data.sinks.as_deref())
    .dsinks(p.sinks().then_some(&mut dsinks[..]));
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
pub fn play(mode: &Mode, culprit: usize, act: Act) -> (Vec<End>, Duration) {
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
                let rank = Rank::new(Through::faulty(end, at, fault));
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
