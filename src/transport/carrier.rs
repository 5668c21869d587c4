// SPDX-License-Identifier: MIT OR Apache-2.0
//! Sends host memory over any transport.
//!
//! A transport of device memory moves only memory of its device. Host data (a stamp, a clock time, a trace, token ids)
//! is therefore copied to the device, exchanged, waited for and copied back. A [`Carrier`] hides whether this is
//! needed, so that its users are written once. It is for calls between runs: it allocates, and waits on the host for
//! each exchange.

use std::vec::Vec;

#[cfg(feature = "cuda")]
use super::DeviceTransport;
use super::{Label, Message, Transport};
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::kernel::cuda::DeviceMemory;

/// Memory of messages between runs.
pub(crate) enum WireBuffer {
    Host(Vec<u8>),
    #[cfg(feature = "cuda")]
    Device(DeviceMemory),
}

impl WireBuffer {
    /// Writes all of it.
    pub(crate) fn put(&mut self, from: &[u8]) -> Result<()> {
        match self {
            Self::Host(memory) => memory.copy_from_slice(from),
            #[cfg(feature = "cuda")]
            Self::Device(memory) => memory.upload(from)?,
        }
        Ok(())
    }

    /// Reads all of it.
    pub(crate) fn get(&self, to: &mut [u8]) -> Result<()> {
        match self {
            Self::Host(memory) => to.copy_from_slice(memory),
            #[cfg(feature = "cuda")]
            Self::Device(memory) => memory.download(to)?,
        }
        Ok(())
    }

    fn message(&mut self, peer: usize) -> Message {
        let (ptr, bytes) = match self {
            Self::Host(memory) => (memory.as_mut_ptr(), memory.len()),
            #[cfg(feature = "cuda")]
            Self::Device(memory) => (memory.ptr(), memory.bytes()),
        };
        Message { peer, ptr, bytes }
    }
}

/// The rank that bytes go to or come from, and their memory.
pub(crate) type Parcel<'a> = (usize, &'a mut WireBuffer);

/// One end of a transport of host memory or of device memory.
#[derive(Clone, Copy)]
pub(crate) enum Carrier<'a> {
    Host(&'a dyn Transport),
    #[cfg(feature = "cuda")]
    Device(&'a dyn DeviceTransport),
}

impl<'a> Carrier<'a> {
    pub(crate) fn end(self) -> &'a dyn Transport {
        match self {
            Self::Host(end) => end,
            #[cfg(feature = "cuda")]
            Self::Device(end) => end,
        }
    }

    /// Memory for a message. A size that cannot be allocated is an error and does not end the program.
    pub(crate) fn room(self, bytes: usize) -> Result<WireBuffer> {
        Ok(match self {
            Self::Host(_) => WireBuffer::Host(zeros(bytes)?),
            #[cfg(feature = "cuda")]
            Self::Device(end) => WireBuffer::Device(end.device().allocate(bytes)?),
        })
    }

    /// One exchange, complete when it returns.
    pub(crate) fn exchange<'r>(
        self,
        label: Label,
        sends: impl IntoIterator<Item = Parcel<'r>>,
        recvs: impl IntoIterator<Item = Parcel<'r>>,
    ) -> Result<()> {
        let message = |(peer, room): Parcel<'r>| room.message(peer);
        let sends: Vec<_> = sends.into_iter().map(message).collect();
        let recvs: Vec<_> = recvs.into_iter().map(message).collect();
        // SAFETY: the messages are in rooms that are borrowed alone until this returns. After a failure rooms are only
        // dropped, and the driver frees memory of a device once nothing there works with it.
        unsafe { self.end().exchange(label, &sends, &recvs) }?;
        match self {
            Self::Host(_) => Ok(()),
            #[cfg(feature = "cuda")]
            Self::Device(end) => end.synchronize(),
        }
    }

    /// Sends bytes to `peer`.
    pub(crate) fn send(self, label: Label, peer: usize, room: &mut WireBuffer) -> Result<()> {
        self.exchange(label, [(peer, room)], [])
    }

    /// Receives bytes from `peer`.
    pub(crate) fn receive(self, label: Label, peer: usize, room: &mut WireBuffer) -> Result<()> {
        self.exchange(label, [], [(peer, room)])
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
