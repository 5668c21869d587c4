// SPDX-License-Identifier: MIT OR Apache-2.0
//! Documents over groups of ranks that change size.

use core::ffi::c_char;

use super::{
    input::{array, array_mut, renamed_by, reserved, sized, text, write_sized},
    problem::{cpattn_problem, read_problem},
};
use cpattn::{
    Machine, Result,
    predict::{GroupLimits, groups},
};

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct cpattn_group_limits {
    pub struct_size: usize,
    pub sizes: *const u32,
    pub size_count: usize,
    pub room: u64,
    pub token_flops: u64,
    pub world: u32,
    pub passes: u32,
    pub ranks_per_node: u32,
    pub reserved: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct cpattn_groups_info {
    pub struct_size: usize,
    pub makespan: u64,
    pub bound: u64,
    pub passes: u32,
    pub reserved: u32,
}

versioned! {
    cpattn_group_limits through reserved;
    cpattn_groups_info through reserved;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cpattn_plan_groups(
    problem: *const cpattn_problem, limits: *const cpattn_group_limits, machine: *const c_char, pass: *mut u32,
    first_rank: *mut u32, ranks: *mut u32, info: *mut cpattn_groups_info,
) -> i32 {
    boundary!({
        let (problem, limits) = given!(read_problem("problem", problem, None), sized("limits", limits));
        let sizes = given!(array("limits.sizes", limits.sizes, limits.size_count));
        let machine = if machine.is_null() { None } else { Some(Machine::parse(given!(text("machine", machine)))?) };
        let documents = problem.batch().documents();
        let (pass, first_rank, ranks) = given!(
            array_mut("pass", pass, documents),
            array_mut("first_rank", first_rank, documents),
            array_mut("ranks", ranks, documents),
        );
        let found = groups(&problem, &limits_of(&limits, sizes)?, machine.as_ref())
            .map_err(|error| renamed_by(error, named))?;
        let value = cpattn_groups_info {
            makespan: found.makespan,
            bound: found.bound,
            passes: found.passes.len() as u32,
            ..Default::default()
        };
        given!(write_sized("info", info, value));
        for (at, group) in found.passes.iter().enumerate().flat_map(|(at, all)| all.iter().map(move |one| (at, one))) {
            for &d in &group.documents {
                let values = [at, group.first_rank, group.ranks];
                for (out, value) in [&mut *pass, &mut *first_rank, &mut *ranks].into_iter().zip(values) {
                    out[d as usize].write(value as u32);
                }
            }
        }
    })
}

fn limits_of(limits: &cpattn_group_limits, sizes: &[u32]) -> Result<GroupLimits> {
    reserved("limits.reserved", limits.reserved == 0)?;
    let sizes: Vec<usize> = sizes.iter().map(|&n| n as usize).collect();
    let room = usize::try_from(limits.room).unwrap_or(usize::MAX);
    Ok(GroupLimits::new(limits.world as usize, &sizes, room)
        .passes(limits.passes as usize)
        .token_flops(limits.token_flops)
        .ranks_per_node(limits.ranks_per_node as usize))
}

/// The header's name of an argument.
fn named(argument: &str) -> String {
    match argument {
        "sizes" | "world" | "room" | "passes" => format!("limits.{argument}"),
        _ => argument.into(),
    }
}
