// SPDX-License-Identifier: MIT OR Apache-2.0
//! Transport `mpi`, over real processes.
//!
//! Started plainly (`cargo test --features mpi --test mpi`), the program starts itself under `mpirun`, once for each
//! trial, with a limit on the time; started there, it plays one rank. What a rank finds wrong it panics about, and its
//! exit code ends the trial. A name as an argument picks the trials whose names contain it; what takes more memory than
//! a test should is played only then.
//!
//! - `launch`: how the processes are started and judged; `exchange`: what must work; `failure`, `joining`,
//!   `later_plan`: what must fail, and how; `refusals`: what is refused from the start; `trials`: `-- --trials N
//!   [--seed S]`, jobs that go wrong at random; `together`: what the ranks of `cpattn run` do after a run.

mod exchange;
mod failure;
mod joining;
mod later_plan;
mod launch;
mod refusals;
#[allow(dead_code, reason = "the program `cpattn` uses all of it")]
mod together;
mod trials;

use std::process::ExitCode;

use launch::{Ends, Role, Trial};

/// Every trial: its name, how many processes, what one of them does, how the job ends.
const TRIALS: &[Trial] = &[
    Trial { name: "random_exchanges", world: 2, rank: exchange::random, ends: Ends::Well },
    Trial { name: "random_exchanges", world: 5, rank: exchange::random, ends: Ends::Well },
    Trial { name: "batches_need_not_pair_up", world: 2, rank: exchange::uneven, ends: Ends::Well },
    Trial { name: "a_message_beyond_2_gib", world: 2, rank: exchange::huge, ends: Ends::Well },
    Trial { name: "agreements", world: 4, rank: exchange::agreements, ends: Ends::Well },
    Trial { name: "agree_and_exchange_overlap", world: 3, rank: exchange::overlap, ends: Ends::Well },
    Trial { name: "plans_as_in_one_process", world: 4, rank: exchange::plans, ends: Ends::Well },
    Trial { name: "ranks_of_a_part_of_the_job", world: 4, rank: exchange::part_of_the_job, ends: Ends::Well },
    Trial { name: "ranks_of_nodes", world: 4, rank: exchange::nodes, ends: Ends::Well },
    Trial { name: "sizes_that_differ", world: 3, rank: failure::sizes, ends: Ends::Well },
    Trial { name: "a_silent_rank_is_blamed", world: 4, rank: failure::silent, ends: Ends::Well },
    Trial { name: "a_question_between_two_calls", world: 3, rank: failure::between_calls, ends: Ends::Well },
    Trial { name: "a_circle_of_waiting_ranks", world: 3, rank: failure::circle, ends: Ends::Well },
    Trial { name: "ranks_that_run_different_things", world: 3, rank: failure::different, ends: Ends::Well },
    Trial { name: "another_plan_that_was_agreed_on", world: 3, rank: later_plan::named, ends: Ends::Well },
    Trial { name: "a_new_plan_against_an_old_one", world: 3, rank: later_plan::new, ends: Ends::Well },
    Trial { name: "abort_and_a_new_group", world: 3, rank: failure::abort, ends: Ends::Well },
    Trial { name: "a_rank_that_leaves_is_said_to_have_left", world: 3, rank: failure::leaves, ends: Ends::Well },
    Trial { name: "a_process_stopped_for_a_while", world: 3, rank: failure::stopped_for_a_while, ends: Ends::Well },
    Trial { name: "a_panic_ends_the_group", world: 3, rank: failure::panics, ends: Ends::Well },
    Trial { name: "a_failed_group_lets_go_of_memory", world: 2, rank: failure::lets_go, ends: Ends::Well },
    Trial { name: "a_killed_process", world: 3, rank: failure::killed, ends: Ends::Survivors },
    Trial { name: "a_killed_process_ends_the_job", world: 3, rank: failure::killed, ends: Ends::Killed },
    Trial { name: "an_abort_of_a_process_that_ends", world: 3, rank: failure::aborted_and_gone, ends: Ends::Survivors },
    Trial {
        name: "a_process_stopped_while_one_compares",
        world: 3,
        rank: failure::stopped_while_one_compares,
        ends: Ends::Survivors,
    },
    Trial {
        name: "a_process_killed_while_one_compares",
        world: 3,
        rank: failure::killed_while_one_compares,
        ends: Ends::Survivors,
    },
    Trial { name: "a_rank_that_never_starts", world: 3, rank: joining::never_starts, ends: Ends::Survivors },
    Trial { name: "ranks_that_come_too_late", world: 4, rank: joining::too_late, ends: Ends::Well },
    Trial { name: "ranks_that_come_and_go", world: 4, rank: joining::come_and_go, ends: Ends::Well },
    Trial { name: "stopped_while_ranks_are_made", world: 3, rank: joining::stopped_while_made, ends: Ends::Well },
    Trial { name: "refused_arguments", world: 2, rank: refusals::arguments, ends: Ends::Well },
    Trial { name: "refused_thread_level", world: 1, rank: refusals::thread_level, ends: Ends::Well },
    Trial { name: "refused_launcher_of_another_mpi", world: 1, rank: refusals::another_launcher, ends: Ends::Well },
    Trial { name: "refused_before_and_after", world: 1, rank: refusals::before_and_after, ends: Ends::Well },
    Trial { name: "refused_other_versions", world: 3, rank: refusals::another_version, ends: Ends::Well },
    Trial { name: "refused_plans", world: 2, rank: refusals::plans, ends: Ends::Well },
];

fn main() -> ExitCode {
    match launch::role() {
        Some(Role::Trial(at)) => (TRIALS[at].rank)(),
        Some(Role::Drawn(seed)) => trials::rank(seed),
        None => match launch::drawn() {
            Some((count, seed)) if !trials::all(count, seed) => return ExitCode::FAILURE,
            Some(_) => {}
            None => return launch::all(TRIALS),
        },
    }
    ExitCode::SUCCESS
}
