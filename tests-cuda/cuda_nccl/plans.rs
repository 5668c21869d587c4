// SPDX-License-Identifier: MIT OR Apache-2.0
//! Whole plans over NCCL: right against the f64 reference, and the same bits as over transport `peer`.

use cpattn::{Layout, Mesh, Plan, Rank, Result, schedule::Direction, transport::peer};

use crate::{
    common::{check_on_device, reference},
    group::{Folder, LONG, devices, finish, process, required, threads},
    work::{Part, T, data, forward_and_backward, plan, tensors, wait, whole},
};

/// The ranks on one device, over copies.
fn over_copies(plan: &Plan) -> Option<Vec<Part>> {
    let cuda = devices(1)?.remove(0);
    let ends = peer::group(&vec![cuda; plan.mesh().world()], LONG).unwrap();
    let one = |end: peer::Peer| -> Result<Part> {
        let mut rank = Rank::on_device(end)?;
        let cuda = rank.cuda().unwrap().clone();
        let all = tensors(&cuda, plan, rank.rank(), &data(plan));
        all.enqueue(&mut rank, plan, Direction::Forward)?;
        all.enqueue(&mut rank, plan, Direction::Backward)?;
        wait(&cuda)?;
        Ok(all.results())
    };
    Some(std::thread::scope(|scope| {
        let threads: Vec<_> = ends.into_iter().map(|end| scope.spawn(|| one(end))).collect();
        threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect()
    }))
}

fn right(name: &str, plan: &Plan, parts: &[Part]) {
    let p = plan.problem();
    let single = Plan::new(p, Mesh::single(), Layout::Contiguous).unwrap();
    let Some(one) = over_copies(&single) else { return };
    let want = reference::<T>(p, &data(plan));
    check_on_device(name, &whole(plan, parts), &whole(&single, &one), &want, 0.0);
}

/// As threads, each with a device of its own.
fn as_threads(name: &str) {
    let plan = plan(name);
    let Some(devices) = devices(plan.mesh().world()) else { return };
    let parts: Vec<Part> = threads(&devices, LONG, |end| forward_and_backward(end, &plan))
        .into_iter()
        .map(|p| p.unwrap().unwrap())
        .collect();
    right(name, &plan, &parts);
    if let Some(copies) = over_copies(&plan) {
        assert!(parts == copies, "{name}: other bits than over copies");
    }
}

/// As processes on one device.
fn as_processes(name: &str) {
    let plan = plan(name);
    let (world, folder) = (plan.mesh().world(), Folder::new());
    if devices(1).is_none() {
        return;
    }
    let children: Vec<_> = (0..world).map(|r| process(&format!("plan {name}"), r, world, &folder.0, &[])).collect();
    for (r, child) in children.into_iter().enumerate() {
        let (ok, text) = finish(child, 4 * LONG);
        assert!(ok, "{name}, rank {r}: {text}");
        assert!(!text.contains("nccl-stand-in:") && !text.contains("cuda-emulator:"), "{name}, rank {r}: {text}");
    }
    let read = |r: usize, k: usize| std::fs::read(folder.0.join(format!("{r}.{k}"))).unwrap();
    let parts: Vec<Part> = (0..world).map(|r| (0..7).map(|k| read(r, k)).collect()).collect();
    right(name, &plan, &parts);
    if let Some(copies) = over_copies(&plan) {
        assert!(parts == copies, "{name}: other bits than over copies");
    }
}

#[test]
fn two_threads() {
    as_threads("ulysses 2");
    as_threads("ring 2");
}

#[test]
fn four_threads() {
    as_threads("ulysses 4");
    as_threads("ring 4");
    as_threads("hybrid 2 x 2");
    as_threads("two nodes");
}

#[test]
fn eight_threads() {
    as_threads("hybrid 2 x 4");
}

#[test]
fn two_processes() {
    as_processes("ulysses 2");
    as_processes("ring 2");
}

#[test]
fn four_processes() {
    as_processes("ulysses 4");
    as_processes("hybrid 2 x 2");
}

#[test]
fn eight_processes() {
    as_processes("ring 8");
}

/// One communicator serves plans whose ranks are only some of the world, and several plans in turn.
#[test]
fn one_communicator_serves_every_mesh() {
    let Some(devices) = devices(4) else { return };
    let names = ["two replicas", "hybrid 2 x 2", "ring 4"];
    let all = threads(&devices, LONG, |end| -> Result<()> {
        let mut rank = Rank::on_device(end)?;
        let cuda = rank.cuda().unwrap().clone();
        let of = |name: &str| {
            let plan = plan(name);
            (tensors(&cuda, &plan, rank.rank(), &data(&plan)), plan)
        };
        let held = names.map(of);
        for direction in [Direction::Forward, Direction::Backward] {
            for (tensors, plan) in &held {
                tensors.enqueue(&mut rank, plan, direction)?;
            }
        }
        wait(&cuda)?;
        rank.poll()
    });
    // Of all, since the first is often only told that another has left.
    let failed: Vec<_> = all.into_iter().map(|r| r.and_then(|r| r)).filter_map(Result::err).collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

/// Tests must not pass because there is nothing to test with.
#[test]
fn there_is_nccl() {
    if required() {
        cpattn::transport::nccl::UniqueId::new().unwrap();
    }
}
