// SPDX-License-Identifier: MIT OR Apache-2.0
//! Schedules as plain structs, for programs that execute them on their own streams and communicator.
//!
//! What a handle holds is listed in `schedule_list`; here are the structs of the header and the calls. A handle refers
//! to no plan, and what it points to lives as long as it does.

use core::ffi::c_char;

use super::{
    handle::{self, Handle},
    input::{one_of, result, write_sized},
    plan::{cpattn_plan, direction, rank_of, runs, side},
    problem::DTYPES,
    ranges::{cpattn_head_map, cpattn_ranges, cpattn_score},
    schedule_list::{ListedSchedule, given_to_all_to_all, given_to_attention},
};
use cpattn::{
    Error,
    schedule::{AllToAll, AllToAllDirection, Schedule},
};

pub type cpattn_schedule = Handle<ListedSchedule>;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_buffer {
    pub name: [c_char; 32],
    pub tensor: i32,
    pub dtype: i32,
    pub rows: u64,
    pub heads: u32,
    pub dim: u32,
    pub offset: u64,
    pub written: i32,
    pub reserved: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct cpattn_view {
    pub row: u64,
    pub rows: u64,
    pub buffer: u32,
    pub head: u32,
    pub heads: u32,
    pub reserved: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_op_message {
    pub view: cpattn_view,
    pub offset: u64,
    pub bytes: u64,
    pub peer: u32,
    pub tag: u32,
    pub send: i32,
    pub reserved: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_sum {
    pub dst: cpattn_view,
    pub sources_begin: u32,
    pub sources_end: u32,
    pub part: u32,
    pub reserved: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_schedule_info {
    pub struct_size: usize,
    pub buffers: *const cpattn_buffer,
    pub buffer_count: usize,
    pub op_count: usize,
    pub workspace_bytes: u64,
    pub rank: u32,
    pub direction: i32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_op {
    pub struct_size: usize,
    pub kind: i32,
    pub lane: i32,
    pub after: i64,
    pub name: [c_char; 32],
    pub phase: [c_char; 32],
    pub step: u32,
    pub reserved: u32,
    pub messages: *const cpattn_op_message,
    pub message_count: usize,
    pub sums: *const cpattn_sum,
    pub sum_count: usize,
    pub sources: *const cpattn_view,
    pub source_count: usize,
    pub q: cpattn_view,
    pub k: cpattn_view,
    pub v: cpattn_view,
    pub running: cpattn_view,
    pub running_lse: cpattn_view,
    pub o: cpattn_view,
    pub lse: cpattn_view,
    pub d_o: cpattn_view,
    pub delta: cpattn_view,
    pub dq: cpattn_view,
    pub dk: cpattn_view,
    pub dv: cpattn_view,
    pub sinks: cpattn_view,
    pub dsinks: cpattn_view,
    pub heads: cpattn_head_map,
    pub aligned: i32,
    pub accumulate_keys: i32,
    pub per_q_head: i32,
    pub gradients: i32,
    pub reserved_2: i32,
    pub score: cpattn_score,
    pub ranges: cpattn_ranges,
    pub q_range_size: usize,
    pub pair_size: usize,
}

versioned! {
    cpattn_schedule_info through direction;
    cpattn_op through pair_size;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_schedule_create(
    plan: *const cpattn_plan, rank: u32, direction: i32, schedule: *mut *mut cpattn_schedule,
) -> i32 {
    boundary!({
        let (plan, out) = given!(handle::borrow(plan), result("schedule", schedule));
        runs(plan)?;
        if let Some(probability) = plan.problem().dropout() {
            return Err(Error::unsupported(
                format!("the schedule of a plan with dropout {probability}"),
                "cpattn_attend and cpattn_attend_backward have no argument for it",
                "run the plan on a rank, or plan without dropout",
            )
            .into());
        }
        let made_for = self::direction(direction)?;
        let made = Schedule::new(plan, rank_of(plan, rank)?, made_for)?;
        let given = given_to_attention(plan, made.rank(), made_for);
        out.write(handle::create(ListedSchedule::new(plan, given, direction, &made)?));
    })
}

const TO_HEADS: i32 = 2;
const TO_TOKENS: i32 = 3;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_schedule_create_all_to_all(
    plan: *const cpattn_plan, rank: u32, direction: i32, side: i32, dim: u32, dtype: i32,
    schedule: *mut *mut cpattn_schedule,
) -> i32 {
    boundary!({
        let (plan, out) = given!(handle::borrow(plan), result("schedule", schedule));
        let (rank, side, dtype) = (rank_of(plan, rank)?, self::side(side)?, one_of("dtype", dtype, &DTYPES)?);
        let way = match direction {
            TO_HEADS => AllToAllDirection::ToHeads,
            TO_TOKENS => AllToAllDirection::ToTokens,
            _ => return Err(Error::invalid("direction", direction, "CPATTN_TO_HEADS or CPATTN_TO_TOKENS").into()),
        };
        let all_to_all = AllToAll { direction: way, side, dim, dtype };
        let made = Schedule::all_to_all(plan, rank, all_to_all)?;
        let given = given_to_all_to_all(plan, rank, all_to_all);
        out.write(handle::create(ListedSchedule::new(plan, given, direction, &made)?));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_schedule_destroy(schedule: *mut cpattn_schedule) -> i32 {
    boundary!({ given!(handle::destroy(schedule)) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_schedule_describe(
    schedule: *const cpattn_schedule, info: *mut cpattn_schedule_info,
) -> i32 {
    boundary!({
        let s = given!(handle::borrow(schedule));
        given!(write_sized("info", info, s.describe()));
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_schedule_op(schedule: *const cpattn_schedule, index: usize, op: *mut cpattn_op) -> i32 {
    boundary!({
        let s = given!(handle::borrow(schedule));
        let Some(listed) = s.op(index) else {
            let expected = format!("below the {} operations of the schedule", s.describe().op_count);
            return Err(Error::invalid("index", index, expected).into());
        };
        given!(write_sized("op", op, listed));
    })
}
