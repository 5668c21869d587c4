// SPDX-License-Identifier: MIT OR Apache-2.0
//! Partial results of several ranks, merged over the ring: the run, its preparation, proof and workspace, its schedule.

use core::ffi::c_void;

use super::{
    dlpack::{cpattn_tensor, one, tensor},
    handle::{self, Exclusive as _},
    input::{one_of, reserved, result, sized},
    plan::{cpattn_plan, rank_of},
    problem::DTYPES,
    rank::cpattn_rank,
    run::lse_base,
    schedule::cpattn_schedule,
    schedule_list::{Given, ListedSchedule},
};
use cpattn::{
    Dtype, Plan, Result, Side,
    runtime::Bindings,
    schedule::{Combine, CombineTo, Schedule, TensorId},
};

/// The direction of its schedules.
pub(super) const COMBINE: i32 = 4;

fn to(value: i32) -> Result<CombineTo> {
    let names = [
        ("CPATTN_COMBINE_TO_ALL", CombineTo::All),
        ("CPATTN_COMBINE_TO_HEADS", CombineTo::Heads),
        ("CPATTN_COMBINE_TO_TOKENS", CombineTo::Tokens),
    ];
    one_of("to", value, &names)
}

/// A combine of parts of this type, which is an argument of that name.
pub(super) fn combine_of(to: i32, (name, partial): (&'static str, i32)) -> Result<Combine> {
    Ok(Combine { to: self::to(to)?, partial: one_of(name, partial, &DTYPES)? })
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_combine_args {
    pub struct_size: usize,
    pub partial_o: *const cpattn_tensor,
    pub partial_lse: *const cpattn_tensor,
    pub sinks: *const cpattn_tensor,
    pub o: *const cpattn_tensor,
    pub lse: *const cpattn_tensor,
    pub stream: *mut c_void,
    pub lse_base: i32,
    pub reserved: i32,
}

versioned! { cpattn_combine_args through stream; }

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_rank_combine(
    rank: *mut cpattn_rank, plan: *const cpattn_plan, to: i32, args: *const cpattn_combine_args,
) -> i32 {
    boundary!({
        let (rank, plan, args) = given!(handle::borrow(rank), handle::borrow(plan), sized("args", args));
        let (mut rank, to) = (rank.claim()?, self::to(to)?);
        let (at, mut bindings) = (rank.device(), Bindings::default());
        for (id, of) in [
            (TensorId::PartialO, args.partial_o),
            (TensorId::PartialLse, args.partial_lse),
            (TensorId::Sinks, args.sinks),
            (TensorId::O, args.o),
            (TensorId::Lse, args.lse),
        ] {
            let of = tensor(id.name(), of, id.axes().into());
            bindings.set(id, given!(one(at, &if id.is_of_sinks() { of.optional() } else { of })));
        }
        reserved("args.reserved", args.reserved == 0)?;
        let bindings = bindings.with_lse_base(lse_base(args.lse_base)?);
        let combine = Combine { to, partial: bindings.get(TensorId::PartialO).dtype };
        // SAFETY: the memory is the caller's for the run, and the stream one of the driver's, by the header's promises;
        // shapes are checked against the plan.
        unsafe { rank.run(plan, combine, &bindings.on(args.stream)) }?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_verify_combine(plan: *const cpattn_plan, to: i32, partial: i32) -> i32 {
    boundary!({
        given!(handle::borrow(plan)).verify_purpose(combine_of(to, ("partial", partial))?)?;
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_combine_workspace(
    plan: *const cpattn_plan, rank: u32, to: i32, partial: i32, bytes: *mut u64,
) -> i32 {
    boundary!({
        let (plan, bytes) = given!(handle::borrow(plan), result("bytes", bytes));
        bytes.write(
            Schedule::combine(plan, rank_of(plan, rank)?, combine_of(to, ("partial", partial))?)?.workspace_bytes(),
        );
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_schedule_create_combine(
    plan: *const cpattn_plan, rank: u32, to: i32, partial: i32, schedule: *mut *mut cpattn_schedule,
) -> i32 {
    boundary!({
        let (plan, out) = given!(handle::borrow(plan), result("schedule", schedule));
        let (rank, combine) = (rank_of(plan, rank)?, combine_of(to, ("partial", partial))?);
        let made = Schedule::combine(plan, rank, combine)?;
        out.write(handle::create(ListedSchedule::new(plan, given(plan, rank, combine), COMBINE, &made)?));
    })
}

/// The caller's tensors.
fn given(plan: &Plan, rank: usize, combine: Combine) -> Vec<Given> {
    let (p, share) = (plan.problem(), plan.combined_share(rank, combine.to));
    let (dim, accumulator) = (p.value_dim(), p.dtype().accumulator());
    let (tokens, own) = (p.batch().tokens(Side::Q), plan.heads_of(rank).q.len());
    let (rows, heads) = (share.tokens.len(), share.heads.len());
    let mut list = vec![
        (TensorId::PartialO, [tokens, own, dim], combine.partial, false),
        (TensorId::PartialLse, [tokens, own, 1], accumulator, false),
        (TensorId::O, [rows, heads, dim], p.dtype(), true),
        (TensorId::Lse, [rows, heads, 1], accumulator, true),
    ];
    if p.sinks() {
        list.push((TensorId::Sinks, [1, p.heads(), p.sinks_per_head()], Dtype::F32, false));
    }
    list
}
