// SPDX-License-Identifier: MIT OR Apache-2.0
//! Communicators of the caller's: checked, used, never freed, and aborted only by leave.

use std::{sync::Arc, thread, time::Duration};

use cpattn::{
    Error,
    kernel::cuda::Cuda,
    transport::{
        DeviceTransport, Label, Message, Transport,
        nccl::{Nccl, OnFailure, UniqueId},
    },
};

use crate::{
    group::{LONG, devices},
    raw::Raw,
};

fn take(raw: &Raw, rank: usize, world: usize, cuda: &Arc<Cuda>, how: OnFailure) -> cpattn::Result<Nccl> {
    // SAFETY: a communicator that outlives the transport, and that nothing else uses meanwhile.
    unsafe { Nccl::from_raw(raw.comm, rank, world, cuda, LONG, how) }
}

/// Two ranks with communicators of their own, as threads.
fn two<R: Send>(run: impl Fn(usize, Raw, Arc<Cuda>) -> R + Sync) -> Option<Vec<R>> {
    let (devices, id) = (devices(2)?, UniqueId::new().unwrap());
    Some(thread::scope(|scope| {
        let threads: Vec<_> = devices
            .iter()
            .enumerate()
            .map(|(rank, cuda)| {
                let run = &run;
                scope.spawn(move || run(rank, Raw::make(id, rank as i32, 2, cuda), Arc::clone(cuda)))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    }))
}

#[test]
fn numbers_are_compared() {
    let Some(both) = devices(2) else { return };
    two(|rank, raw, cuda| {
        let text = |r, w, c: &Arc<Cuda>| match take(&raw, r, w, c, OnFailure::Leave) {
            Err(e @ Error::Invalid { .. }) => e.to_string(),
            other => panic!("{other:?}"),
        };
        let other = 1 - rank;
        assert_eq!(text(other, 2, &cuda), format!("rank is {other}, expected {rank}, the rank of the communicator"));
        assert_eq!(text(rank, 3, &cuda), "world is 3, expected 2, the ranks of the communicator");
        let expected = format!("device is {other}, expected {rank}, the device of the communicator");
        assert_eq!(text(rank, 2, &both[other]), expected);
        raw.destroy();
    });
}

/// Sends 64 bytes to the other rank, and receives as many.
fn swap(end: &Nccl, step: u32, received: usize) -> cpattn::Result<()> {
    let cuda = end.device();
    let [from, to] = [(); 2].map(|()| cuda.allocate(64).unwrap());
    from.upload(&[end.rank() as u8 + 1; 64]).unwrap();
    let peer = 1 - end.rank();
    let [sends, recvs] = [(&from, 64), (&to, received)].map(|(m, bytes)| [Message { peer, ptr: m.ptr(), bytes }]);
    // SAFETY: both are waited for, or, when that fails, kept for good.
    let outcome = unsafe { end.exchange(Label::new("swap", step), &sends, &recvs) }.and_then(|()| end.synchronize());
    if outcome.is_err() {
        std::mem::forget([from, to]);
        return outcome;
    }
    let mut bytes = [0; 64];
    to.download(&mut bytes).unwrap();
    assert_eq!(bytes, [peer as u8 + 1; 64]);
    Ok(())
}

/// Dropping the transport leaves the communicator to its owner, who may give it to another.
#[test]
fn it_stays_its_owners() {
    two(|rank, raw, cuda| {
        for how in [OnFailure::Leave, OnFailure::Abort] {
            let end = take(&raw, rank, 2, &cuda, how).unwrap();
            end.agree(0..2, 3).unwrap();
            swap(&end, 0, 64).unwrap();
        }
        raw.destroy();
    });
}

/// Between runs nothing is called with it, so an owner that ends it first is no failure.
#[test]
fn its_owner_may_end_it_after_the_last_run() {
    two(|rank, raw, cuda| {
        let end = take(&raw, rank, 2, &cuda, OnFailure::Leave).unwrap();
        swap(&end, 0, 64).unwrap();
        raw.destroy();
        // The watchdog comes every 50 ms.
        thread::sleep(Duration::from_millis(200));
        end.poll().unwrap();
    });
}

#[test]
fn by_leave_it_is_aborted() {
    two(|rank, raw, cuda| {
        let end = take(&raw, rank, 2, &cuda, OnFailure::Abort).unwrap();
        swap(&end, 0, 64).unwrap();
        end.set_deadline(Duration::from_millis(300)).unwrap();
        let error = swap(&end, 1, 32).unwrap_err();
        assert!(error.to_string().starts_with(&format!("rank {rank}, swap, step 1: rank {} ", 1 - rank)), "{error}");
        crate::faults::usable(&cuda, end.stream());
        // The handle is gone: nothing of it may be touched.
    });
}

#[test]
fn without_leave_its_owner_ends_it() {
    two(|rank, raw, cuda| {
        let end = take(&raw, rank, 2, &cuda, OnFailure::Leave).unwrap();
        swap(&end, 0, 64).unwrap();
        end.set_deadline(Duration::from_millis(300)).unwrap();
        let error = swap(&end, 1, 32).unwrap_err();
        // The owner of the other one may be faster, and NCCL notices.
        let text = error.to_string();
        assert!(text.contains("did not answer within") || text.contains("the engine reports 6"), "{text}");
        assert_eq!(end.poll().as_ref(), Err(&error));
        assert_eq!(end.synchronize().as_ref(), Err(&error));
        assert_eq!(swap(&end, 2, 64).as_ref(), Err(&error));
        // The communicator lives, and its owner ends what is in the stream.
        assert_eq!(raw.call("ncclCommAbort"), 0);
        crate::faults::usable(&cuda, end.stream());
    });
}
