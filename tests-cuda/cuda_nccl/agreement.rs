// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks over NCCL that do not run the same: hosts meet for the first run of a plan alone, and in later runs the
//! devices find out.

use std::{
    sync::{
        Arc, Barrier,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Instant,
};

use cpattn::{Batch, Dtype, Error, Layout, Mask, Mesh, Plan, Problem, Rank, Result, schedule::Direction};

use crate::{
    common::through::{Counted, Through},
    group::{LONG, devices, threads},
    work::{Part, Tensors, data, tensors, wait},
};

/// Plans that differ in the scale alone have messages of the very same sizes.
fn plan(scale: f64, lengths: &[usize], mesh: Mesh, layout: Layout) -> Plan {
    let batch = Batch::from_lengths(lengths).unwrap();
    let p = Problem::new(batch, 4, 2, 32, Dtype::Bf16).with_mask(Mask::full()).with_scale(scale);
    Plan::new(&p, mesh, layout).unwrap()
}

fn ring(scale: f64, world: usize) -> Plan {
    plan(scale, &[30, 6], Mesh::ring(world).unwrap(), Layout::Zigzag)
}

/// Both directions, and what they give.
fn both(rank: &mut Rank, plan: &Plan, own: &Tensors) -> Result<Part> {
    own.enqueue(rank, plan, Direction::Forward)?;
    own.enqueue(rank, plan, Direction::Backward)?;
    rank.synchronize()?;
    Ok(own.results())
}

fn has_nan(o: &[u8]) -> bool {
    o.chunks_exact(2).any(|b| half::bf16::from_le_bytes([b[0], b[1]]).is_nan())
}

#[test]
fn only_first_runs_agree() {
    let Some(devices) = devices(2) else { return };
    let plans = [ring(0.2, 2), plan(0.2, &[30, 6], Mesh::ulysses(2).unwrap(), Layout::Contiguous)];
    let all = threads(&devices, LONG, |end| -> Result<()> {
        let asked = Arc::new(AtomicUsize::new(0));
        let mut rank = Rank::on_device(Through::new(end, Counted(Arc::clone(&asked))))?;
        let cuda = Arc::clone(rank.cuda().unwrap());
        let own = plans.each_ref().map(|p| tensors(&cuda, p, rank.rank(), &data(p)));
        let mut run =
            || -> Result<Vec<Part>> { plans.iter().zip(&own).map(|(p, own)| both(&mut rank, p, own)).collect() };
        let first = run()?;
        assert_eq!(asked.load(SeqCst), 4);
        for _ in 0..3 {
            assert!(run()? == first, "a later run has other bits");
        }
        assert_eq!(asked.load(SeqCst), 4, "later runs meet on the host");
        Ok(())
    });
    all.into_iter().for_each(|r| r.unwrap().unwrap());
}

/// A plan of the very same message sizes that was agreed on before, run by one rank alone.
#[test]
fn another_plan_is_found() {
    let world = 3;
    let Some(devices) = devices(world) else { return };
    let (ours, other) = (ring(0.2, world), ring(0.3, world));
    for odd in [0, 2] {
        let (begin, barrier) = (Instant::now(), Barrier::new(world));
        let errors = threads(&devices, LONG, |end| -> Result<Error> {
            let mut rank = Rank::on_device(end)?;
            let (me, cuda) = (rank.rank(), Arc::clone(rank.cuda().unwrap()));
            let [own, others] = [&ours, &other].map(|p| tensors(&cuda, p, me, &data(p)));
            both(&mut rank, &ours, &own)?;
            both(&mut rank, &other, &others)?;
            let (plan, used) = if me == odd { (&other, &others) } else { (&ours, &own) };
            assert!(!has_nan(&used.results()[0]));
            used.enqueue(&mut rank, plan, Direction::Forward)?;
            wait(&cuda)?;
            // Until all devices are done, no host has told another.
            barrier.wait();
            let first = rank.synchronize().unwrap_err();
            assert_eq!(rank.poll(), Err(first.clone()));
            assert_eq!(own.enqueue(&mut rank, &ours, Direction::Forward), Err(first.clone()));
            assert!(has_nan(&used.results()[0]), "rank {me} has results");
            barrier.wait();
            Ok(first)
        });
        for (r, error) in errors.into_iter().enumerate() {
            let error = error.unwrap().unwrap();
            let Error::Disagreement { rank, peer, ours, theirs, runs, .. } = &error else { panic!("{error:?}") };
            assert!(*rank == r && ours != theirs && *runs == Some([5, 5]), "{error}");
            assert!(r == odd || *peer == odd, "rank {r} blames rank {peer}, not {odd}");
        }
        assert!(begin.elapsed() < LONG, "the ranks waited for a deadline");
    }
}

/// A rank that is a run ahead.
#[test]
fn one_run_more() {
    let Some(devices) = devices(2) else { return };
    let ours = ring(0.2, 2);
    // Each rank has a document of its own: its run meets no other rank.
    let apart = plan(0.2, &[8, 8], Mesh::ring(2).unwrap(), Layout::Contiguous);
    let barrier = Barrier::new(2);
    let errors = threads(&devices, LONG, |end| -> Result<Error> {
        let mut rank = Rank::on_device(end)?;
        let (me, cuda) = (rank.rank(), Arc::clone(rank.cuda().unwrap()));
        let [own, alone] = [&ours, &apart].map(|p| tensors(&cuda, p, me, &data(p)));
        both(&mut rank, &ours, &own)?;
        for _ in 0..=usize::from(me == 0) {
            alone.enqueue(&mut rank, &apart, Direction::Forward)?;
        }
        own.enqueue(&mut rank, &ours, Direction::Forward)?;
        wait(&cuda)?;
        barrier.wait();
        let error = rank.synchronize().unwrap_err();
        assert!(has_nan(&own.results()[0]));
        barrier.wait();
        Ok(error)
    });
    for (r, error) in errors.into_iter().enumerate() {
        let error = error.unwrap().unwrap();
        let Error::Disagreement { rank, ours, theirs, runs, .. } = &error else { panic!("{error:?}") };
        assert!(*rank == r && ours == theirs, "{error}");
        assert_eq!(*runs, Some(if r == 0 { [5, 4] } else { [4, 5] }));
    }
}
