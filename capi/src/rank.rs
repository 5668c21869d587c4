// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks: create, prepare, lend workspace, poll and abort. Their runs are in `run`.
//!
//! A second call on a rank in use is refused instead of queued ([`Exclusive`]), because ranks that run plans in
//! different orders would wait for each other for ever. `poll` and `abort` are allowed at any time.

use core::ffi::c_void;
use std::{
    collections::VecDeque,
    sync::{Mutex, atomic::Ordering::Relaxed},
};

use super::{
    combine::{COMBINE, combine_of},
    dlpack::device_of,
    handle::{self, Exclusive, Handle, HandleKind},
    input::{one_of, renamed, reserved, result, sized},
    kernel_table::{TableKernel, cpattn_kernel_table},
    plan::{cpattn_plan, side},
    problem::DTYPES,
    status::Outcome,
    transport::{Any, cpattn_transport},
};
#[cfg(feature = "cuda")]
use super::{dlpack::device, table::DeviceTableTransport};
use cpattn::{
    Device, Error, Rank, Result,
    kernel::cpu::Isa,
    report::trace,
    runtime::AbortHandle,
    schedule::{AllToAll, Direction, Purpose},
};

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_rank_options {
    pub struct_size: usize,
    pub workers: u32,
    pub device_type: i32,
    pub device_id: i32,
    pub sm_margin: u32,
    pub isa: i32,
    pub reserved: i32,
    pub kernel: *const cpattn_kernel_table,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_purpose {
    pub struct_size: usize,
    pub side: i32,
    pub dim: u32,
    pub dtype: i32,
    pub to: i32,
}

versioned! {
    cpattn_rank_options through sm_margin;
    cpattn_purpose through to;
}

/// The content of a rank's handle.
#[doc(hidden)]
pub struct RankState {
    rank: Mutex<Rank>,
    /// Recorded events that the caller has not taken yet.
    pub(super) untaken: Mutex<VecDeque<trace::Event>>,
    handle: AbortHandle,
}

pub type cpattn_rank = Handle<RankState>;

impl HandleKind for RankState {
    const NAME: &'static str = "rank";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatRANK");
}

impl Exclusive for RankState {
    type State = Rank;

    fn mutex(&self) -> &Mutex<Rank> {
        &self.rank
    }
}

/// Refuses numbers of workers that would not be used.
pub(super) fn workers(name: &'static str, n: u32) -> Result<usize> {
    if n == 0 || n > 1024 {
        return Err(Error::invalid(name, n, "1 to 1024"));
    }
    if n > 1 && !cfg!(feature = "rayon") {
        return Err(Error::unsupported(
            format!("{name} = {n}"),
            "this build has one worker for each rank",
            "build with the feature rayon",
        ));
    }
    Ok(n as usize)
}

const ISAS: [&str; 7] = [
    "CPATTN_ISA_AUTO",
    "CPATTN_ISA_PORTABLE",
    "CPATTN_ISA_NEON",
    "CPATTN_ISA_AVX2",
    "CPATTN_ISA_AVX512",
    "CPATTN_ISA_AVX512_BF16",
    "CPATTN_ISA_AMX",
];

/// The instruction set with this number, in the order of the header; `None` for `CPATTN_ISA_AUTO`.
pub(super) fn instruction_set(name: &'static str, number: i32) -> Result<Option<Isa>> {
    let isas: Vec<_> = ISAS.into_iter().zip([None].into_iter().chain(Isa::ALL.map(Some))).collect();
    one_of(name, number, &isas)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_create(
    transport: *mut cpattn_transport, options: *const cpattn_rank_options, rank: *mut *mut cpattn_rank,
) -> i32 {
    boundary!({
        let (out, given) = given!(result("rank", rank), handle::borrow(transport));
        let (mut n, mut at, mut free, mut isa) = (1, given.device().unwrap_or(Device::Cpu), 0, None);
        let mut kernel = None;
        if !options.is_null() {
            let o = given!(sized("options", options));
            let wanted = device_of("options", o.device_type, o.device_id)?;
            if given.device().is_some_and(|at| at != wanted) {
                return Err(Error::invalid("options.device", wanted, format!("{at}, where the transport is")).into());
            }
            // Refused before a missing feature of the build is reported: another build would not help.
            if o.workers > 1 && wanted != Device::Cpu {
                let expected = "1 on a device, which has threads of its own";
                return Err(Error::invalid("options.workers", o.workers, expected).into());
            }
            reserved("options.reserved", o.reserved == 0)?;
            isa = instruction_set("options.isa", o.isa)?;
            if let (Some(_), Device::Cuda(_)) = (isa, wanted) {
                return Err(Error::unsupported(
                    format!("options.isa = {} on {wanted}", ISAS[o.isa as usize]),
                    "it is an instruction set of the CPU kernels",
                    "leave it CPATTN_ISA_AUTO on a device",
                )
                .into());
            }
            if !o.kernel.is_null() {
                if wanted != Device::Cpu {
                    return Err(Error::unsupported(
                        format!("options.kernel on {wanted}"),
                        "a kernel of the caller's computes in host memory",
                        "leave it NULL on a device, or use a rank on the CPU",
                    )
                    .into());
                }
                if o.workers > 1 {
                    let expected = "1 with options.kernel, which has threads of its own";
                    return Err(Error::invalid("options.workers", o.workers, expected).into());
                }
                kernel = Some(given!(TableKernel::new(o.kernel)));
            }
            (n, at, free) = (workers("options.workers", o.workers)?, wanted, o.sm_margin);
        }
        if (at, isa) == (Device::Cpu, None) {
            Isa::chosen()?;
        }
        let (kernel, owned) = kernel.unzip();
        let mut rank = rank_over(given, at, n, kernel)?;
        rank.set_sm_margin(free).map_err(|error| renamed(error, "options.sm_margin"))?;
        if isa.is_some() {
            rank.set_isa(isa)?;
        }
        let handle = rank.handle();
        // From here on the rank owns the transport. If an earlier step fails, the caller keeps it.
        drop(given!(handle::take(transport)));
        if let Some(owned) = owned {
            owned.store(true, Relaxed);
        }
        out.write(handle::create(RankState { rank: Mutex::new(rank), untaken: Mutex::default(), handle }));
    })
}

/// Makes a rank over a transport, which is on its device or on any.
fn rank_over(given: &Any, at: Device, workers: usize, kernel: Option<TableKernel>) -> Result<Rank> {
    if let Some(kernel) = kernel {
        return Ok(match given.clone() {
            Any::Host(end) => Rank::with_kernel(end, kernel),
            Any::Table(end) => Rank::with_kernel(end, kernel),
            Any::Engine(end) => Rank::with_kernel(end, kernel),
            #[cfg(feature = "cuda")]
            Any::Device(_) => unreachable!("refused before"),
        });
    }
    Ok(match (given.clone(), at) {
        #[cfg(feature = "cuda")]
        (Any::Table(end), Device::Cuda(ordinal)) => {
            Rank::on_device(DeviceTableTransport::new(end, device("options.device_id", ordinal)?)?)?
        }
        #[cfg(feature = "cuda")]
        (Any::Device(end), _) => Rank::on_device(end)?,
        (Any::Host(end), _) => Rank::with_workers(end, workers),
        (Any::Table(end), _) => Rank::with_workers(end, workers),
        (Any::Engine(end), _) => Rank::with_workers(end, workers),
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_destroy(rank: *mut cpattn_rank) -> i32 {
    boundary!({ given!(handle::destroy_idle(rank)) })
}

/// What is prepared: a direction of attention, or an all-to-all or a combine of what `of` says.
///
/// # Safety
/// The header's promise about structs.
unsafe fn purpose(direction: i32, of: *const cpattn_purpose) -> Outcome<Purpose> {
    let directions = [
        ("CPATTN_FORWARD", Some(Direction::Forward)),
        ("CPATTN_BACKWARD", Some(Direction::Backward)),
        ("CPATTN_TO_HEADS", None),
        ("CPATTN_TO_TOKENS", None),
        ("CPATTN_COMBINE", None),
    ];
    if let Some(attention) = one_of("direction", direction, &directions)? {
        if !of.is_null() {
            let expected = format!("NULL: {} is of the plan alone", directions[direction as usize].0);
            return Err(Error::invalid("purpose", "given", expected).into());
        }
        return Ok(attention.into());
    }
    let cpattn_purpose { side, dim, dtype, to, .. } = given!(sized("purpose", of));
    let unused = |name: &str, unused: bool| match unused {
        true => Ok(()),
        false => {
            let expected = format!("0 in {}", directions[direction as usize].0);
            Err(Error::invalid(format!("purpose.{name}"), "given", expected))
        }
    };
    if direction == COMBINE {
        unused("side", side == 0)?;
        unused("dim", dim == 0)?;
        return Ok(combine_of(to, ("dtype", dtype))?.into());
    }
    unused("to", to == 0)?;
    let (side, dtype) = (self::side(side)?, one_of("dtype", dtype, &DTYPES)?);
    let [to_heads, to_tokens] = AllToAll::both(side, dim as usize, dtype)?;
    Ok(if direction == COMBINE - 2 { to_heads } else { to_tokens }.into())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_prepare(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, direction: i32, purpose: *const cpattn_purpose,
) -> i32 {
    boundary!({
        let (rank, plan) = given!(handle::borrow(rank), handle::borrow(plan));
        let purpose = given!(self::purpose(direction, purpose));
        rank.claim()?.prepare(plan, purpose)?;
    })
}
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_lend_workspace(
    rank: *mut cpattn_rank, workspace: *mut c_void, bytes: usize,
) -> i32 {
    boundary!({
        let rank = given!(handle::borrow(rank));
        if workspace.is_null() {
            if bytes > 0 {
                return Err(Error::invalid("workspace", "NULL", "an address, or 0 bytes to take it back").into());
            }
            rank.claim()?.workspace().take_back()?;
            return Ok(());
        }
        if workspace.addr().checked_add(bytes).is_none_or(|end| end > isize::MAX as usize) {
            return Err(Error::invalid("bytes", bytes, "memory that stays within the address space").into());
        }
        // SAFETY: lent until another is lent or the rank is destroyed, by the header's promise.
        unsafe { rank.claim()?.workspace().lend(workspace.cast(), bytes) }?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_poll(rank: *const cpattn_rank) -> i32 {
    boundary!({ given!(handle::borrow(rank)).handle.poll()? })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_abort(rank: *const cpattn_rank) -> i32 {
    boundary!({ given!(handle::borrow(rank)).handle.abort() })
}
