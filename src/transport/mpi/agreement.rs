// SPDX-License-Identifier: MIT OR Apache-2.0
//! `agree`: every rank of a group sends its number to every other.
//!
//! Three words are sent each way, on the communicator for agreements and notices: the number, and the sender's group.

use std::{ffi::c_int, ops::Range, ptr::NonNull, vec::Vec};

use super::{
    group::MpiGroup,
    notices::WaitsFor,
    raw::{Comm, Request},
};
use crate::transport::fault::GroupFailure;

/// Differs from the tag of notices, which use the same communicator.
const TAG: c_int = 1;

/// The message of a rank: its number, and first and end of the group.
pub(super) type AgreementWords = [u64; 3];

/// By rank: the messages sent and received. MPI may read or write them.
pub(super) struct AgreementMessages {
    ours: NonNull<AgreementWords>,
    theirs: NonNull<AgreementWords>,
    requests: Vec<(Request, Request)>,
}

// SAFETY: memory of its own and requests, which any thread may use.
unsafe impl Send for AgreementMessages {}

impl AgreementMessages {
    pub(super) fn new(world: usize) -> Self {
        let room = || NonNull::from(std::vec![AgreementWords::default(); world].leak()).cast();
        let requests = (0..world).map(|_| (Request::none(), Request::none())).collect();
        Self { ours: room(), theirs: room(), requests }
    }

    /// Exchanges the message with every rank of `group`. Returns the first rank whose message differs.
    pub(super) fn take(
        &mut self,
        own: &MpiGroup,
        comm: Comm,
        group: Range<usize>,
        number: u64,
    ) -> Result<Option<(usize, AgreementWords)>, GroupFailure> {
        let Self { ours, theirs, requests } = self;
        let message = [number, group.start as u64, group.end as u64];
        let peers = group.filter(|&peer| peer != own.rank);
        for peer in peers.clone() {
            // SAFETY: both rooms have a place for every rank; MPI holds none of them, since the last agreement ended
            // well. Nothing touches them until the requests are complete.
            let begun = unsafe {
                ours.add(peer).write(message);
                let bytes = size_of_val(&message);
                let receive = comm.receive(theirs.add(peer).as_ptr().cast(), bytes, Some(peer), TAG);
                requests[peer].1 = receive.map_err(|refused| own.fail_mpi(peer, refused))?;
                comm.send(ours.add(peer).as_ptr().cast_const().cast(), bytes, peer, TAG)
            };
            requests[peer].0 = begun.map_err(|refused| own.fail_mpi(peer, refused))?;
        }
        let (mut state, mut failed) = (own.deadline_state(), None);
        let mut left = 2 * peers.clone().count();
        while left > 0 {
            let (mut now, mut first) = (0, None);
            for peer in peers.clone() {
                let (send, receive) = &mut requests[peer];
                for (call, request) in [("MPI_Irecv", receive), ("MPI_Isend", send)] {
                    if !request.test(call).map_err(|refused| own.fail_mpi(peer, refused))? {
                        now += 1;
                        first = first.or(Some(peer));
                    }
                }
            }
            match (first, failed) {
                _ if now < left => state.moved(),
                (_, Some(failure)) => return Err(failure),
                (None, None) => {}
                (Some(on), None) => {
                    failed = own.pause(&mut state, WaitsFor { on, agreeing: true }, || 0).err();
                }
            }
            left = now;
        }
        // SAFETY: the agreement is complete, so every member's place was written, and MPI holds none of them.
        let message_of = |peer: usize| unsafe { theirs.add(peer).read() };
        Ok(peers.map(|peer| (peer, message_of(peer))).find(|other| other.1 != message))
    }

    /// After a failure: cancels receives.
    pub(super) fn cancel(&mut self) {
        self.requests.iter_mut().for_each(|(_, receive)| receive.cancel());
    }

    /// Tests all requests, and returns whether all are complete.
    pub(super) fn is_free(&mut self) -> bool {
        let requests = self.requests.iter_mut().flat_map(|(a, b)| [a, b]);
        requests.filter_map(|r| (!matches!(r.test("MPI_Test"), Ok(true))).then_some(())).count() == 0
    }
}

impl Drop for AgreementMessages {
    fn drop(&mut self) {
        if self.requests.iter().all(|(a, b)| a.is_none() && b.is_none()) {
            for room in [self.ours, self.theirs] {
                let all = NonNull::slice_from_raw_parts(room, self.requests.len());
                // SAFETY: leaked by `new` with this length, and MPI is done with it.
                drop(unsafe { Box::from_raw(all.as_ptr()) });
            }
        }
    }
}
