// SPDX-License-Identifier: MIT OR Apache-2.0
//! Groups over an engine of the caller's: how they are made, and the calls that need no rank.

use std::sync::Arc;

use super::{
    engine_table::{EngineTable, cpattn_engine_table},
    handle,
    input::{array, array_mut, result, sized},
    status::Outcome,
    table::cpattn_message,
    transport::{Any, cpattn_transport, deadline},
};
use cpattn::{
    Cause, Error,
    transport::{Label, Message, Transport, engine::EngineTransport},
};

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_engine_group(
    table: *const cpattn_engine_table, deadline_ms: u64, transport: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        let (table, out) = given!(sized("table", table), result("transport", transport));
        let deadline = deadline(deadline_ms)?;
        functions!(table: open, connect, post, wait, close, put, get, wait_for);
        // Checked before the engine is taken over: a refusal must not release it.
        super::table::place(table.rank, table.world)?;
        out.write(handle::create(Any::Engine(Arc::new(EngineTransport::new(EngineTable(table), deadline)?))));
    })
}

/// The group of a handle, kept for the duration of a call: another thread may destroy the handle meanwhile.
///
/// # Safety
/// The header's promise about handles.
unsafe fn group(transport: *mut cpattn_transport) -> Outcome<Arc<EngineTransport<EngineTable>>> {
    match given!(handle::borrow(transport.cast_const())) {
        Any::Engine(end) => Ok(Arc::clone(end)),
        _ => Err(Error::invalid("transport", "of another kind", "one of cpattn_engine_group").into()),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_engine_connect(transport: *mut cpattn_transport) -> i32 {
    boundary!({ given!(group(transport)).connect()? })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_engine_share(
    transport: *mut cpattn_transport, other: *mut *mut cpattn_transport,
) -> i32 {
    boundary!({
        let (end, out) = given!(group(transport), result("other", other));
        out.write(handle::create(Any::Engine(end)));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_engine_agree(
    transport: *mut cpattn_transport, first: u32, end: u32, number: u64, all: *mut u64,
) -> i32 {
    boundary!({
        let group = given!(group(transport));
        let ranks = first as usize..end as usize;
        let mut numbers = vec![0; if ranks.end <= group.world() { ranks.len() } else { 0 }];
        let out = given!(array_mut("all", all, numbers.len()));
        group.gather(ranks, number, &mut numbers)?;
        out.iter_mut().zip(numbers).for_each(|(to, number)| _ = to.write(number));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_engine_exchange(
    transport: *mut cpattn_transport, step: u32, sends: *const cpattn_message, send_count: usize,
    recvs: *const cpattn_message, recv_count: usize,
) -> i32 {
    boundary!({
        let group = given!(group(transport));
        let (sends, recvs) = given!(array("sends", sends, send_count), array("recvs", recvs, recv_count));
        let messages = |list: &[cpattn_message]| -> Vec<Message> {
            list.iter().map(|m| Message { peer: m.peer, ptr: m.data.cast(), bytes: m.bytes }).collect()
        };
        // SAFETY: the messages are the caller's until this returns, by the header's promise.
        unsafe { group.exchange(Label::new("exchange", step), &messages(sends), &messages(recvs)) }?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_engine_poll(transport: *mut cpattn_transport) -> i32 {
    boundary!({ given!(group(transport)).poll()? })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_engine_abort(transport: *mut cpattn_transport) -> i32 {
    boundary!({ given!(group(transport)).abort(Cause::Aborted) })
}
