// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transports may be the caller's own code: what a rank does when the one it was given misbehaves itself.

use std::{
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::mpsc,
    thread,
    time::Duration,
};

use cpattn::{
    Batch, Cause, Dtype, Forward, Layout, Mesh, Plan, Problem, Rank, Result, Side, View, ViewMut,
    transport::{
        Label, Message, Transport,
        local::{self, Local},
    },
};

/// Fails every exchange, and panics when it is told to tell the others.
struct Hopeless(Local);

impl Transport for Hopeless {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world(&self) -> usize {
        self.0.world()
    }

    fn agree(&self, group: Range<usize>, fingerprint: u64) -> Result<()> {
        self.0.agree(group, fingerprint)
    }

    unsafe fn exchange(&self, _: Label, _: &[Message], _: &[Message]) -> Result<()> {
        Err(cpattn::Error::invalid("exchange", "hopeless", "hope"))
    }

    fn poll(&self) -> Result<()> {
        self.0.poll()
    }

    fn abort(&self, cause: Cause) {
        self.0.abort(cause);
        panic!("cannot even abort");
    }
}

/// The lanes share the caller's memory: neither may unwind, or vanish, before the other has let go of it.
#[test]
fn a_transport_that_panics_in_abort_hangs_nobody() {
    let p = Problem::new(Batch::new(&[0, 9, 21]).unwrap(), 4, 2, 8, Dtype::F32);
    let plan = Plan::new(&p, Mesh { replicas: 1, ring: 2, ulysses: 2 }, Layout::Zigzag).unwrap();
    let (told, ends) = mpsc::channel();
    for end in local::group(4, Duration::from_secs(30)).unwrap() {
        let (plan, told) = (plan.clone(), told.clone());
        thread::spawn(move || {
            let mut rank = Rank::new(Hopeless(end));
            for _ in 0..3 {
                let n = plan.local_tokens(Side::Q, rank.rank()).len();
                let (q, kv) = (vec![1.0f32; n * 4 * 8], vec![1.0f32; n * 2 * 8]);
                let (mut o, mut lse) = (vec![0.0f32; n * 4 * 8], vec![0.0f32; n * 4]);
                let kv = View::new(&kv, n, 2, 8).unwrap();
                let t = Forward::new(
                    View::new(&q, n, 4, 8).unwrap(),
                    kv,
                    kv,
                    ViewMut::new(&mut o, n, 4, 8).unwrap(),
                    ViewMut::head_major(&mut lse, n, 4).unwrap(),
                );
                let outcome = catch_unwind(AssertUnwindSafe(|| rank.forward(&plan, t)));
                told.send(outcome.map_err(drop)).unwrap();
            }
        });
    }
    for _ in 0..12 {
        let outcome = ends.recv_timeout(Duration::from_secs(20)).expect("every call of every rank returns");
        let text = outcome.expect("no call unwinds").unwrap_err().to_string();
        assert!(text.starts_with("exchange is hopeless") || text.contains("failed"), "{text}");
    }
}

/// A rank beyond the mesh would otherwise pass for another one; a plan of another world is refused by every call.
#[test]
fn a_rank_outside_the_mesh_is_nobody() {
    let p = Problem::new(Batch::new(&[0, 9, 21]).unwrap(), 4, 2, 8, Dtype::F32);
    let plan = Plan::new(&p, Mesh { replicas: 1, ring: 2, ulysses: 2 }, Layout::Zigzag).unwrap();
    let calls: [&dyn Fn(usize) -> usize; 4] = [
        &|rank| plan.local_tokens(Side::Q, rank).len(),
        &|rank| plan.local_tokens(Side::K, rank).indices().len(),
        &|rank| plan.local_tokens(Side::Q, rank).positions().len(),
        &|rank| plan.heads_of(rank).q.len(),
    ];
    for call in calls {
        assert!(call(3) > 0);
        let panic = catch_unwind(AssertUnwindSafe(|| call(4))).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "rank is 4, expected below the world of 4");
    }
    let last = local::group(5, Duration::from_secs(1)).unwrap().pop().unwrap();
    let text =
        Rank::new(last).all_to_all(&plan).ulysses::<f32>(&[], &mut [], |_, _, _| Ok(())).unwrap_err().to_string();
    assert!(text.contains("= 4 ranks") && text.contains("world of 5"), "{text}");
}
