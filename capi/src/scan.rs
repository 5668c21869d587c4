// SPDX-License-Identifier: MIT OR Apache-2.0
//! States passed on along documents: the segments of a rank, the run, its proof and workspace, its schedule.

use super::{
    dlpack::{Axes, cpattn_tensor, one, tensor},
    handle::{self, Exclusive as _},
    input::{array_mut, one_of, reserved, result, sized},
    plan::{cpattn_plan, rank_of},
    problem::DTYPES,
    rank::cpattn_rank,
    schedule::cpattn_schedule,
    schedule_list::{Given, ListedSchedule},
};
use cpattn::{
    Plan, Result, Side,
    runtime::Bindings,
    schedule::{Decay, Scan, ScanForm, Schedule, TensorId},
};

/// The direction of its schedules.
const SCAN: i32 = 5;

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_segment {
    pub row: u64,
    pub token: u64,
    pub tokens: u64,
    pub document: u64,
    pub position: i64,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_scan {
    pub struct_size: usize,
    pub decay: i32,
    pub heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub dtype: i32,
    pub reverse: i32,
    pub form: i32,
    pub reserved: i32,
}

versioned! { cpattn_scan through reserved; }

impl cpattn_scan {
    fn read(&self) -> Result<Scan> {
        let decays = [("CPATTN_DECAY_DIAGONAL", Decay::Diagonal), ("CPATTN_DECAY_MATRIX", Decay::Matrix)];
        let forms = [
            ("CPATTN_SCAN_AUTO", ScanForm::Auto),
            ("CPATTN_SCAN_CHAIN", ScanForm::Chain),
            ("CPATTN_SCAN_TREE", ScanForm::Tree),
            ("CPATTN_SCAN_DIRECT", ScanForm::Direct),
        ];
        reserved("scan.reserved", self.reserved == 0)?;
        Ok(Scan {
            decay: one_of("scan.decay", self.decay, &decays)?,
            heads: self.heads,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            dtype: one_of("scan.dtype", self.dtype, &DTYPES)?,
            reverse: one_of("scan.reverse", self.reverse, &[("0", false), ("1", true)])?,
            form: one_of("scan.form", self.form, &forms)?,
        })
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_segments(
    plan: *const cpattn_plan, rank: u32, segments: *mut cpattn_segment, capacity: usize, count: *mut usize,
) -> i32 {
    boundary!({
        let (plan, out, count) =
            given!(handle::borrow(plan), array_mut("segments", segments, capacity), result("count", count));
        let all = plan.local_tokens(Side::Q, rank_of(plan, rank)?).segments();
        count.write(all.len());
        for (to, s) in out.iter_mut().zip(all) {
            let [row, token, tokens, document] = [s.row, s.token, s.tokens, s.document].map(|n| n as u64);
            to.write(cpattn_segment { row, token, tokens, document, position: s.position });
        }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_scan(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, scan: *const cpattn_scan, decay: *const cpattn_tensor,
    state: *const cpattn_tensor, initial_state: *const cpattn_tensor,
) -> i32 {
    boundary!({
        let (rank, plan, scan) = given!(handle::borrow(rank), handle::borrow(plan), sized("scan", scan));
        let (mut rank, scan) = (rank.claim()?, scan.read()?);
        let (at, mut bindings) = (rank.device(), Bindings::default());
        for (id, of) in [(TensorId::Decay, decay), (TensorId::State, state), (TensorId::InitialState, initial_state)] {
            bindings.set(id, given!(one(at, &tensor(id.name(), of, Axes::Rows))));
        }
        // SAFETY: the memory is the caller's for the run, by the header's promises; shapes are checked against the
        // plan.
        unsafe { rank.run(plan, scan, &bindings) }?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_verify_scan(plan: *const cpattn_plan, scan: *const cpattn_scan) -> i32 {
    boundary!({
        let (plan, scan) = given!(handle::borrow(plan), sized("scan", scan));
        plan.verify_purpose(scan.read()?)?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_scan_workspace(
    plan: *const cpattn_plan, rank: u32, scan: *const cpattn_scan, bytes: *mut u64,
) -> i32 {
    boundary!({
        let (plan, scan, bytes) = given!(handle::borrow(plan), sized("scan", scan), result("bytes", bytes));
        bytes.write(Schedule::scan(plan, rank_of(plan, rank)?, scan.read()?)?.workspace_bytes());
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_schedule_create_scan(
    plan: *const cpattn_plan, rank: u32, scan: *const cpattn_scan, schedule: *mut *mut cpattn_schedule,
) -> i32 {
    boundary!({
        let (plan, scan, out) = given!(handle::borrow(plan), sized("scan", scan), result("schedule", schedule));
        let (rank, scan) = (rank_of(plan, rank)?, scan.read()?);
        let made = Schedule::scan(plan, rank, scan)?;
        out.write(handle::create(ListedSchedule::new(plan, given(plan, rank, scan), SCAN, &made)?));
    })
}

/// The caller's tensors.
fn given(plan: &Plan, rank: usize, scan: Scan) -> Vec<Given> {
    let (segments, heads) = (plan.local_tokens(Side::Q, rank).segments().len(), scan.heads as usize);
    let of = |id, dim: u64, written| (id, [segments, heads, dim as usize], scan.dtype, written);
    vec![
        of(TensorId::Decay, scan.decay_dim(), false),
        of(TensorId::State, scan.state_dim(), false),
        of(TensorId::InitialState, scan.state_dim(), true),
    ]
}
