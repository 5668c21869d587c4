// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is refused, in words that name the argument, both values and the way out.

use std::{process::Command, ptr::null_mut, time::Duration};

use cpattn::{
    Result,
    transport::{
        DeviceTransport, Label, Message, Transport,
        nccl::{Nccl, OnFailure, UniqueId},
    },
};

use crate::{
    faults::stand_in,
    group::{LONG, devices, threads},
    refused::refused,
};

#[test]
fn numbers_and_ids() {
    let Some(device) = devices(1) else { return };
    let (device, id, zeros) = (&device[0], UniqueId::new().unwrap(), UniqueId::from_bytes([0; 128]));
    let new = |id, rank, world, deadline| Nccl::new(id, rank, world, device, deadline);
    refused(new(&id, 2, 2, LONG), &["rank is 2, expected below the world of 2"]);
    refused(new(&id, 0, 0, LONG), &["world is 0", "1 to 2147483647"]);
    refused(new(&id, 0, 1 << 31, LONG), &["world is 2147483648"]);
    refused(new(&id, 0, 1, Duration::ZERO), &["deadline is 0"]);
    refused(new(&zeros, 0, 1, LONG), &["unique_id is all zeros", "128 bytes"]);
    assert_eq!(format!("{id:?}"), "UniqueId(…)");
    // Nothing of that used the id up.
    let end = new(&id, 0, 1, LONG).unwrap();
    refused(new(&id, 0, 1, LONG), &["rank is 0, for the second time", "a new group needs a new id"]);
    refused(end.set_deadline(Duration::ZERO), &["deadline is 0"]);
    end.agree(0..1, 7).unwrap();
    end.synchronize().unwrap();
}

/// A library without communicators that do not block. It is opened once in a process, so another one meets it.
#[test]
fn a_library_that_is_too_old() {
    const VERSION: &str = "CPATTN_NCCL_VERSION";
    let Some(device) = devices(1) else { return };
    if std::env::var(VERSION).as_deref() == Ok("21300") {
        let words = ["nccl", "is version 2.13.0", "2.14 or later is needed", "install NCCL 2.14 or later"];
        refused(UniqueId::new(), &words);
        refused(Nccl::new(&UniqueId::from_bytes([1; 128]), 0, 1, &device[0], LONG), &words);
        return;
    }
    if !stand_in() {
        return;
    }
    let mut other = Command::new(std::env::current_exe().unwrap());
    other.args(["--exact", "refusals::a_library_that_is_too_old"]).env(VERSION, "21300");
    let out = other.output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert!(out.status.success() && text.contains("1 passed"), "{text}");
}

/// Of one process this crate knows it at once; of two NCCL says it.
#[test]
fn two_ranks_of_one_number() {
    let Some(devices) = devices(2) else { return };
    let id = UniqueId::new().unwrap();
    let short = Duration::from_millis(500);
    let all: Vec<Result<Nccl>> = std::thread::scope(|scope| {
        let threads: Vec<_> = devices
            .iter()
            .map(|device| {
                let id = &id;
                scope.spawn(move || Nccl::new(id, 1, 2, device, short))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let texts: Vec<String> = all.into_iter().map(|r| r.unwrap_err().to_string()).collect();
    // One of them is refused, and the other waits for a rank 0 in vain.
    assert!(texts.iter().any(|t| t.contains("rank is 1, for the second time")), "{texts:?}");
    let waited = "rank 1, making the communicator, step 0: rank 0 did not answer within ";
    assert!(texts.iter().any(|t| t.contains(waited)), "{texts:?}");
}

#[test]
fn two_ranks_on_one_device() {
    let Some(device) = devices(1) else { return };
    let all = threads(&[device[0].clone(), device[0].clone()], LONG, |_| ());
    for (rank, error) in all.into_iter().enumerate() {
        let text = error.unwrap_err().to_string();
        assert!(text.contains("ncclCommInitRankConfig failed with 5"), "{text}");
        assert!(text.contains(&format!("rank {rank} of 2 on device 0: NCCL refuses to join (invalid usage")), "{text}");
        assert!(
            text.ends_with(
                "give each rank a device of its own, all the same world, and a new unique id for each group"
            )
        );
    }
}

#[test]
fn lists_are_checked_before_anything_moves() {
    let Some(devices) = devices(2) else { return };
    let outcomes = threads(&devices, LONG, |end| {
        let memory = end.device().allocate(64).unwrap();
        let label = Label::new("test", 0);
        let message = |peer, ptr, bytes| Message { peer, ptr, bytes };
        // SAFETY: refused before anything is enqueued.
        let send = |m| unsafe { end.exchange(label, &[m], &[]) };
        refused(send(message(2, memory.ptr(), 8)), &["sends[0].peer is 2, expected a rank below 2"]);
        refused(send(message(end.rank(), memory.ptr(), 8)), &["another rank", "copy what a rank sends to itself"]);
        refused(send(message(1 - end.rank(), memory.ptr(), 0)), &["sends[0].bytes is 0"]);
        refused(send(message(1 - end.rank(), null_mut(), 8)), &["sends[0].ptr is null"]);
        refused(end.agree(0..3, 1), &["group is 0..3", "within 0..2"]);
        let other = 1 - end.rank();
        refused(end.agree(other..other + 1, 1), &["contains rank"]);
        // The group is as it was.
        end.agree(0..2, 1).unwrap();
        end.poll().unwrap();
    });
    outcomes.into_iter().for_each(|r| r.unwrap());
}

#[test]
fn a_communicator_that_is_not_there() {
    let Some(device) = devices(1) else { return };
    // SAFETY: null is refused.
    let taken = unsafe { Nccl::from_raw(null_mut(), 0, 1, &device[0], LONG, OnFailure::Leave) };
    refused(taken, &["comm is null", "ncclComm_t"]);
}
