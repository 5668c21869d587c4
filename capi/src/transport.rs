// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transports and how they are made: the in-process groups of threads and of devices, and tables of the caller's.

use std::{sync::Arc, time::Duration};

#[cfg(feature = "cuda")]
use super::dlpack::device;
use super::{
    engine_table::EngineTable,
    handle::{self, Handle, HandleKind},
    input::{array, array_mut, result, sized},
    table::{TableTransport, cpattn_transport_table, place},
};
#[cfg(feature = "cuda")]
use cpattn::transport::{DeviceTransport, peer};
use cpattn::{
    Device, Error, Result,
    transport::{
        Transport,
        engine::EngineTransport,
        local,
        ring_check::{Link, RingFault},
    },
};

/// Threads of one process beyond this number are a mistake.
const MAX_THREADS: u32 = 4096;

/// A transport of any kind, until a rank takes it.
#[doc(hidden)]
#[derive(Clone)]
pub enum Any {
    /// Of host memory, by the library.
    Host(Arc<dyn Transport>),
    /// Of device memory, by the library.
    #[cfg(feature = "cuda")]
    Device(Arc<dyn DeviceTransport>),
    /// The caller's functions, of host memory or with a stream of device memory.
    Table(Arc<TableTransport>),
    Engine(Arc<EngineTransport<EngineTable>>),
}

pub type cpattn_transport = Handle<Any>;

impl HandleKind for Any {
    const NAME: &'static str = "transport";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatWIRE");
}

impl Any {
    /// The device of its messages; `None` for a table, which serves the CPU and any device.
    pub(super) fn device(&self) -> Option<Device> {
        match self {
            Self::Host(_) | Self::Engine(_) => Some(Device::Cpu),
            #[cfg(feature = "cuda")]
            Self::Device(end) => Some(Device::Cuda(end.device().ordinal())),
            Self::Table(_) => None,
        }
    }

    /// The check of the links of its ring.
    pub(super) fn check_ring(&self, bytes: usize) -> Result<Vec<Link>, RingFault> {
        match self {
            #[cfg(feature = "cuda")]
            Self::Device(end) => Link::check_all_on_device(&**end, bytes),
            _ => Link::check_all(self.end(), bytes),
        }
    }

    pub(super) fn end(&self) -> &dyn Transport {
        match self {
            Self::Host(end) => &**end,
            #[cfg(feature = "cuda")]
            Self::Device(end) => &**end,
            Self::Table(end) => &**end,
            Self::Engine(end) => &**end,
        }
    }
}

pub(super) fn deadline(ms: u64) -> Result<Duration> {
    if ms == 0 {
        return Err(Error::invalid("deadline_ms", 0, "at least 1"));
    }
    Ok(Duration::from_millis(ms))
}

fn threads(world: u32) -> Result<usize> {
    if world == 0 || world > MAX_THREADS {
        return Err(Error::invalid("world", world, format!("1 to {MAX_THREADS}")));
    }
    Ok(world as usize)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_local_group(
    world: u32, deadline_ms: u64, transports: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        let (world, deadline) = (threads(world)?, deadline(deadline_ms)?);
        let out = given!(array_mut("transports", transports, world));
        for (to, rank) in out.iter_mut().zip(local::group(world, deadline)?) {
            to.write(handle::create(Any::Host(Arc::new(rank))));
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_peer_group(
    world: u32, devices: *const i32, deadline_ms: u64, transports: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        let (world, deadline) = (threads(world)?, deadline(deadline_ms)?);
        let devices = given!(array("devices", devices, world));
        let out = given!(array_mut("transports", transports, world));
        with_feature!("cuda", cpattn_peer_group, (devices, deadline, out), {
            let each = devices.iter().enumerate().map(|(r, &id)| device(&format!("devices[{r}]"), id));
            let devices = each.collect::<Result<Vec<_>>>()?;
            for (to, rank) in out.iter_mut().zip(peer::group(&devices, deadline)?) {
                to.write(handle::create(Any::Device(Arc::new(rank))));
            }
        });
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_transport_create(
    table: *const cpattn_transport_table, transport: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        let (table, out) = given!(sized("table", table), result("transport", transport));
        place(table.rank, table.world)?;
        functions!(table: agree, exchange, poll, abort);
        out.write(handle::create(Any::Table(Arc::new(TableTransport::new(table)))));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_transport_destroy(transport: *mut cpattn_transport) -> i32 {
    boundary!({ given!(handle::destroy(transport)) })
}
