// SPDX-License-Identifier: MIT OR Apache-2.0
//! A `CPATTN_CPU_ISA` that names nothing, or what the machine lacks, is refused by every call before a run begins, and
//! ends no group. The variable is read once in a process, so each test starts this program again, with itself alone to
//! run; there it finds what the error has to say.

use std::{env, process::Command, thread, time::Duration};

use cpattn::{
    Batch, Dtype, Error, Forward, Layout, Mesh, Plan, Problem, Rank, Side, View, ViewMut, kernel::cpu::Isa,
    schedule::Direction, transport::local,
};

/// Set in the second process: how its errors have to begin.
const NAMED: &str = "CPATTN_TEST_NAMED";

/// The test of this name, in a process with this value of the variable.
fn in_a_process(test: &str, value: &str, named: &str) {
    if let Ok(named) = env::var(NAMED) {
        return refused_before_a_run(&named);
    }
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(Isa::VARIABLE, value)
        .env(NAMED, named)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{value}: {text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn names_that_are_none() {
    in_a_process("names_that_are_none", "foo", "CPATTN_CPU_ISA is \"foo\", expected one of portable, ");
}

#[test]
fn instruction_sets_that_the_machine_lacks() {
    let lacking = Isa::ALL.into_iter().find(|isa| !isa.is_available()).expect("no machine has NEON and AVX2");
    let named = format!("CPATTN_CPU_ISA={lacking} is not supported: this machine has ");
    in_a_process("instruction_sets_that_the_machine_lacks", lacking.name(), &named);
}

fn refused_before_a_run(named: &str) {
    let problem = Problem::new(Batch::new(&[0, 5, 12]).unwrap(), 2, 2, 16, Dtype::F32);
    let plan = &Plan::new(&problem, Mesh { replicas: 1, ring: 2, ulysses: 1 }, Layout::Contiguous).unwrap();
    thread::scope(|scope| {
        for end in local::group(2, Duration::from_secs(60)).unwrap() {
            scope.spawn(move || {
                let mut rank = Rank::new(end);
                let refused = |result: Result<(), Error>| {
                    let text = result.unwrap_err().to_string();
                    assert!(text.starts_with(named), "{text:?} does not begin with {named:?}");
                };
                let n = plan.local_tokens(Side::Q, rank.rank()).len();
                let x = vec![1.0f32; n * 2 * 16];
                let (mut o, mut lse) = (vec![0.0f32; n * 2 * 16], vec![0.0f32; n * 2]);
                let mut forward = |rank: &mut Rank| {
                    let view = || View::new(&x, n, 2, 16).unwrap();
                    rank.forward(
                        plan,
                        Forward::new(
                            view(),
                            view(),
                            view(),
                            ViewMut::new(&mut o, n, 2, 16).unwrap(),
                            ViewMut::head_major(&mut lse, n, 2).unwrap(),
                        ),
                    )
                };
                refused(rank.prepare(plan, Direction::Forward));
                refused(rank.workspace().bytes(plan, Direction::Forward).map(|_| ()));
                refused(forward(&mut rank));
                refused(rank.set_isa(None));
                rank.poll().unwrap();
                rank.set_isa(Some(Isa::Portable)).unwrap();
                forward(&mut rank).unwrap();
                assert!(o.iter().all(|x| (x - 1.0).abs() < 1e-6));
            });
        }
    });
}
