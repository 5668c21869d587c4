// SPDX-License-Identifier: MIT OR Apache-2.0
//! Ranks: forward and backward.
//!
//! The rank is behind a mutex that is only ever tried: a second call is refused instead of queued, because ranks that
//! run plans in different orders would wait for each other for ever. `poll` and `abort` do not touch it.

use core::ffi::c_void;
use std::{
    format,
    sync::{Mutex, MutexGuard, TryLockError},
};

use super::{
    dlpack::{Form, cpattn_tensor, no_stream, optional, tensor},
    handle::{self, Handle, Kind},
    input::{reserved, result, sized},
    plan::{cpattn_plan, direction},
    status::{Fail, Outcome, boundary},
    transport::{Any, cpattn_transport},
};
use crate::{
    error::{Error, Result},
    plan::{self, Plan},
    runtime::{self, Bindings, Rank},
    schedule::{Direction, Tensor},
};

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_rank_options {
    pub struct_size: usize,
    pub workers: u32,
    pub device_type: i32,
    pub device_id: i32,
    pub reserved: i32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_forward_args {
    pub struct_size: usize,
    pub q: *const cpattn_tensor,
    pub k: *const cpattn_tensor,
    pub v: *const cpattn_tensor,
    pub sinks: *const cpattn_tensor,
    pub o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub stream: *mut c_void,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub struct cpattn_backward_args {
    pub struct_size: usize,
    pub q: *const cpattn_tensor,
    pub k: *const cpattn_tensor,
    pub v: *const cpattn_tensor,
    pub sinks: *const cpattn_tensor,
    pub o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub d_o: *const cpattn_tensor,
    pub dq: *const cpattn_tensor,
    pub dk: *const cpattn_tensor,
    pub dv: *const cpattn_tensor,
    pub dsinks: *const cpattn_tensor,
    pub stream: *mut c_void,
}

/// What a rank's handle holds.
#[doc(hidden)]
pub struct State {
    rank: Mutex<Rank>,
    handle: runtime::Handle,
}

pub type cpattn_rank = Handle<State>;

impl Kind for State {
    const NAME: &'static str = "rank";
    const MAGIC: u64 = u64::from_le_bytes(*b"cpatRANK");
}

impl State {
    fn lock(&self) -> Outcome<MutexGuard<'_, Rank>> {
        match self.rank.try_lock() {
            Ok(rank) => Ok(rank),
            // A rank that panicked has aborted its transport: what comes next says so.
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => Err(Fail::Busy("rank")),
        }
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_create(
    transport: *mut cpattn_transport,
    options: *const cpattn_rank_options,
    rank: *mut *mut cpattn_rank,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about results.
        let out = unsafe { result("rank", rank) }?;
        let mut n = 1;
        if !options.is_null() {
            // SAFETY: the header's promise about structs.
            let o = unsafe { sized("options", options) }?;
            reserved("options.reserved", o.reserved == 0)?;
            if (o.device_type, o.device_id) != (1, 0) {
                return Err(Error::unsupported(
                    format!("options.device_type {} with device_id {}", o.device_type, o.device_id),
                    "this build serves the CPU",
                    "use CPATTN_DEVICE_CPU (1) and device_id 0",
                )
                .into());
            }
            n = workers("options.workers", o.workers)?;
        }
        // SAFETY: the header's promise about handles. Nothing can be refused from here on.
        let rank = match unsafe { handle::take(transport) }? {
            Any::Local(t) => Rank::with_workers(t, n),
            Any::Table(t) => Rank::with_workers(t, n),
        };
        let handle = rank.handle();
        out.write(handle::create(State { rank: Mutex::new(rank), handle }));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_destroy(rank: *mut cpattn_rank) -> i32 {
    boundary!({
        if rank.is_null() {
            return Ok(());
        }
        // SAFETY: the header's promise about handles.
        drop(unsafe { handle::borrow(rank) }?.lock()?);
        // SAFETY: as above.
        unsafe { handle::destroy(rank) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_prepare(rank: *mut cpattn_rank, plan: *const cpattn_plan, direction: i32) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        let (rank, plan) = unsafe { (handle::borrow(rank.cast_const())?, handle::borrow(plan)?) };
        rank.lock()?.prepare(plan, self::direction(direction)?)?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_lend_workspace(
    rank: *mut cpattn_rank,
    workspace: *mut c_void,
    bytes: usize,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        let rank = unsafe { handle::borrow(rank.cast_const()) }?;
        if workspace.is_null() {
            return Err(Error::invalid("workspace", "NULL", "an address").into());
        }
        if workspace.addr().checked_add(bytes).is_none_or(|end| end > isize::MAX as usize) {
            return Err(Error::invalid("bytes", bytes, "memory that stays within the address space").into());
        }
        // SAFETY: lent until another is lent or the rank is destroyed, by the header's promise.
        unsafe { rank.lock()?.lend_workspace(workspace.cast(), bytes) }?;
        Ok(())
    })
}

fn runs(plan: &Plan) -> Result<()> {
    if plan.problem().kind == plan::Kind::Softmax {
        return Ok(());
    }
    Err(Error::unsupported(
        "a plan of kind CPATTN_OTHER",
        "what mixes its tokens is the caller's own",
        "use its shares and exchanges, or CPATTN_SOFTMAX",
    ))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_forward(
    rank: *mut cpattn_rank,
    plan: *const cpattn_plan,
    args: *const cpattn_forward_args,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles and structs.
        let (rank, plan, a) =
            unsafe { (handle::borrow(rank.cast_const())?, handle::borrow(plan)?, sized("args", args)?) };
        runs(plan)?;
        no_stream(a.stream)?;
        // SAFETY: the header's promise about tensors.
        let bindings = unsafe {
            Bindings::default()
                .with(Tensor::Q, tensor("q", a.q, Form::Rows)?)
                .with(Tensor::K, tensor("k", a.k, Form::Rows)?)
                .with(Tensor::V, tensor("v", a.v, Form::Rows)?)
                .with(Tensor::Sinks, optional("sinks", a.sinks, Form::PerHead)?)
                .with(Tensor::O, tensor("o", a.o, Form::Rows)?)
                .with(Tensor::Lse, tensor("lse", a.lse, Form::HeadMajor)?)
        };
        // SAFETY: the memory is the caller's for the call, by the header's promise; shapes are checked against the plan.
        unsafe { rank.lock()?.run(plan, Direction::Forward, &bindings) }?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_backward(
    rank: *mut cpattn_rank,
    plan: *const cpattn_plan,
    args: *const cpattn_backward_args,
) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles and structs.
        let (rank, plan, a) =
            unsafe { (handle::borrow(rank.cast_const())?, handle::borrow(plan)?, sized("args", args)?) };
        runs(plan)?;
        no_stream(a.stream)?;
        if !a.dsinks.is_null() && !plan.problem().has_sinks() {
            return Err(Error::invalid("dsinks", "given", "NULL, since the problem has no sinks").into());
        }
        // SAFETY: the header's promise about tensors.
        let bindings = unsafe {
            Bindings::default()
                .with(Tensor::Q, tensor("q", a.q, Form::Rows)?)
                .with(Tensor::K, tensor("k", a.k, Form::Rows)?)
                .with(Tensor::V, tensor("v", a.v, Form::Rows)?)
                .with(Tensor::Sinks, optional("sinks", a.sinks, Form::PerHead)?)
                .with(Tensor::O, tensor("o", a.o, Form::Rows)?)
                .with(Tensor::Lse, tensor("lse", a.lse, Form::HeadMajor)?)
                .with(Tensor::DO, tensor("d_o", a.d_o, Form::Rows)?)
                .with(Tensor::Dq, tensor("dq", a.dq, Form::Rows)?)
                .with(Tensor::Dk, tensor("dk", a.dk, Form::Rows)?)
                .with(Tensor::Dv, tensor("dv", a.dv, Form::Rows)?)
                .with(Tensor::Dsinks, optional("dsinks", a.dsinks, Form::PerHead)?)
        };
        // SAFETY: as in `cpattn_forward`.
        unsafe { rank.lock()?.run(plan, Direction::Backward, &bindings) }?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_poll(rank: *const cpattn_rank) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        unsafe { handle::borrow(rank) }?.handle.poll()?;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_abort(rank: *const cpattn_rank) -> i32 {
    boundary!({
        // SAFETY: the header's promise about handles.
        unsafe { handle::borrow(rank) }?.handle.abort();
        Ok(())
    })
}
