// SPDX-License-Identifier: MIT OR Apache-2.0
//! A line that shows how far the work is: on standard error, and only if that is a terminal.

use std::{
    io::{IsTerminal as _, Write as _},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Characters of the bar.
const WIDTH: usize = 40;
/// Between two drawings of the line.
const PAUSE: Duration = Duration::from_millis(100);

struct State {
    message: &'static str,
    position: usize,
    drawn: Option<Instant>,
}

pub struct Progress {
    steps: usize,
    begin: Instant,
    terminal: bool,
    state: Mutex<State>,
}

impl Progress {
    pub fn new(steps: usize, message: &'static str) -> Self {
        let state = Mutex::new(State { message, position: 0, drawn: None });
        Self { steps, begin: Instant::now(), terminal: std::io::stderr().is_terminal(), state }
    }

    /// What the work does from here on.
    pub fn message(&self, message: &'static str) {
        self.update(|state| (state.message, state.drawn) = (message, None));
    }

    /// One more step is done, by any thread.
    pub fn step(&self) {
        self.update(|state| state.position += 1);
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut state);
        if self.terminal && state.drawn.is_none_or(|drawn| drawn.elapsed() > PAUSE) {
            state.drawn = Some(Instant::now());
            let _ = write!(
                std::io::stderr(),
                "\r{}",
                line(state.message, state.position, self.steps, self.begin.elapsed())
            );
        }
    }

    /// Takes the line away.
    pub fn clear(&self) {
        if self.terminal {
            let _ = write!(std::io::stderr(), "\r\x1b[K");
        }
    }
}

fn line(message: &str, position: usize, steps: usize, time: Duration) -> String {
    let filled = WIDTH * position.min(steps) / steps.max(1);
    let head = if filled < WIDTH { ">" } else { "" };
    let bar = format!("{}{head}", "=".repeat(filled));
    let seconds = time.as_secs();
    format!("{message:20} [{bar:WIDTH$}] {position}/{steps} {:02}:{:02}", seconds / 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_shows_the_part_that_is_done() {
        let at = |position| line("work", position, 4, Duration::from_secs(61));
        assert_eq!(at(0), format!("work                 [>{}] 0/4 01:01", " ".repeat(39)));
        assert_eq!(at(2), format!("work                 [{}>{}] 2/4 01:01", "=".repeat(20), " ".repeat(19)));
        assert_eq!(at(4), format!("work                 [{}] 4/4 01:01", "=".repeat(40)));
        assert!(line("nothing", 0, 0, Duration::ZERO).contains("0/0"));
    }
}
