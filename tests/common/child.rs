// SPDX-License-Identifier: MIT OR Apache-2.0
//! Children of a test, which was forked: what happens to a whole process happens to them.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// Runs `job` in a child of this process; whatever waits without end there is ended after a minute.
pub fn in_a_child(job: impl FnOnce()) -> i32 {
    // SAFETY: the child runs code of this test alone, and ends without unwinding into the harness.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: ends the child.
            unsafe { libc::alarm(60) };
            let panicked = catch_unwind(AssertUnwindSafe(job)).is_err();
            // SAFETY: ends the child, without what the parent's harness would do at its end.
            unsafe { libc::_exit(i32::from(panicked)) }
        }
        child => {
            let mut status = 0;
            // SAFETY: a child of this process, and a place for its status.
            assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
            status
        }
    }
}

#[cfg(target_os = "linux")]
/// Sets how many threads this user may have, in this process, which is a child of the test. The limit counts the
/// threads of a user and does not bind root, so the process becomes another user first.
pub fn limit(threads: Option<u64>) {
    static ALL: std::sync::Mutex<Option<libc::rlimit>> = std::sync::Mutex::new(None);
    let mut all = ALL.lock().unwrap();
    let mut now = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for the limits; the user `nobody`, of this process alone.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NPROC, &raw mut now), 0);
        if libc::geteuid() == 0 {
            // The hard limit must allow what the user has later.
            let free = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
            libc::setrlimit(libc::RLIMIT_NPROC, &raw const free);
            assert_eq!(libc::setresuid(65_534, 65_534, 65_534), 0);
            assert_eq!(libc::getrlimit(libc::RLIMIT_NPROC, &raw mut now), 0);
        }
    }
    let all = all.get_or_insert(now);
    let wanted = libc::rlimit { rlim_cur: threads.unwrap_or(all.rlim_cur), ..*all };
    // SAFETY: limits of this process.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NPROC, &raw const wanted) }, 0);
}
