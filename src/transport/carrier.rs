// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sends host memory over any transport.
//!
//! A transport of device memory moves only memory of its device. Host data (a stamp, a clock time, a trace, token ids)
//! is therefore copied to the device, exchanged, waited for and copied back. A [`Carrier`] hides whether this is
//! needed, so that its users are written once. It is for calls between runs: it allocates, and waits on the host for
//! each exchange.

use std::{boxed::Box, vec::Vec};

#[cfg(feature = "cuda")]
use super::DeviceTransport;
use super::{Label, Message, Transport};
use crate::error::{Error, Result};

/// Memory of messages between runs: of the host, or of a device.
pub(crate) trait WireBuffer {
    fn ptr(&mut self) -> *mut u8;
    fn bytes(&self) -> usize;
    fn put(&mut self, from: &[u8]) -> Result<()>;
    fn get(&self, to: &mut [u8]) -> Result<()>;
}

impl WireBuffer for Vec<u8> {
    fn ptr(&mut self) -> *mut u8 {
        self.as_mut_ptr()
    }

    fn bytes(&self) -> usize {
        self.len()
    }

    fn put(&mut self, from: &[u8]) -> Result<()> {
        self.copy_from_slice(from);
        Ok(())
    }

    fn get(&self, to: &mut [u8]) -> Result<()> {
        to.copy_from_slice(self);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl WireBuffer for crate::kernel::cuda::DeviceMemory {
    fn ptr(&mut self) -> *mut u8 {
        Self::ptr(self)
    }

    fn bytes(&self) -> usize {
        Self::bytes(self)
    }

    fn put(&mut self, from: &[u8]) -> Result<()> {
        self.upload(from)
    }

    fn get(&self, to: &mut [u8]) -> Result<()> {
        self.download(to)
    }
}

/// One end of a transport, and memory that it can reach.
pub(crate) trait Carrier {
    fn end(&self) -> &dyn Transport;

    /// Memory for a message. A size that cannot be allocated is an error and does not end the program.
    fn room(&self, bytes: usize) -> Result<Box<dyn WireBuffer>>;

    /// Waits until the messages have arrived.
    fn complete(&self) -> Result<()>;
}

/// A transport of host memory.
pub(crate) struct HostCarrier<'a>(pub(crate) &'a dyn Transport);

impl Carrier for HostCarrier<'_> {
    fn end(&self) -> &dyn Transport {
        self.0
    }

    fn room(&self, bytes: usize) -> Result<Box<dyn WireBuffer>> {
        Ok(Box::new(zeros(bytes)?))
    }

    fn complete(&self) -> Result<()> {
        Ok(())
    }
}

/// A transport of device memory.
#[cfg(feature = "cuda")]
pub(crate) struct DeviceCarrier<'a>(pub(crate) &'a dyn DeviceTransport);

#[cfg(feature = "cuda")]
impl Carrier for DeviceCarrier<'_> {
    fn end(&self) -> &dyn Transport {
        self.0
    }

    fn room(&self, bytes: usize) -> Result<Box<dyn WireBuffer>> {
        Ok(Box::new(self.0.device().allocate(bytes)?))
    }

    fn complete(&self) -> Result<()> {
        self.0.synchronize()
    }
}

/// `bytes` zeros, or an error if there is no memory for them.
pub(crate) fn zeros(bytes: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    if out.try_reserve_exact(bytes).is_err() {
        return Err(Error::invalid("bytes", bytes, "a number that fits into memory"));
    }
    out.resize(bytes, 0);
    Ok(out)
}

/// Bytes, and the rank that they go to or come from.
pub(crate) type Parcel = (usize, Box<dyn WireBuffer>);

/// One exchange, complete when it returns.
pub(crate) fn exchange(carrier: &dyn Carrier, label: Label, sends: &mut [Parcel], recvs: &mut [Parcel]) -> Result<()> {
    let messages =
        |list: &mut [Parcel]| list.iter_mut().map(|(peer, room)| message(*peer, &mut **room)).collect::<Vec<_>>();
    let (sends, recvs) = (messages(sends), messages(recvs));
    // SAFETY: the rooms are borrowed alone until this returns.
    unsafe { moved(carrier, label, &sends, &recvs) }
}

/// Sends bytes to `peer`, or receives them.
pub(crate) fn carry(
    carrier: &dyn Carrier,
    label: Label,
    peer: usize,
    room: &mut dyn WireBuffer,
    send: bool,
) -> Result<()> {
    let one = [message(peer, room)];
    let (sends, recvs): (&[_], &[_]) = if send { (&one, &[]) } else { (&[], &one) };
    // SAFETY: the room is borrowed alone until this returns.
    unsafe { moved(carrier, label, sends, recvs) }
}

fn message(peer: usize, room: &mut dyn WireBuffer) -> Message {
    Message { peer, ptr: room.ptr(), bytes: room.bytes() }
}

/// # Safety
/// The messages are in rooms that nothing else uses during the call, nor after one that has failed.
unsafe fn moved(carrier: &dyn Carrier, label: Label, sends: &[Message], recvs: &[Message]) -> Result<()> {
    // SAFETY: the rooms are used by nothing else until the exchange is complete (the contract of this function); after
    // a failure they are only dropped, and the driver frees memory of a device once nothing there works with it.
    unsafe { carrier.end().exchange(label, sends, recvs) }?;
    carrier.complete()
}
