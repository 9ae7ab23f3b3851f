// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Shows the progress of long work: a line on standard error that is redrawn again and again.

use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, Instant},
};

use crate::human;

/// Time after which a redraw is worthwhile.
pub const INTERVAL: Duration = Duration::from_millis(100);
/// Time between two lines where standard error is no terminal.
const PLAIN_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest work that is worth a bar.
const PATIENCE: Duration = Duration::from_millis(200);
/// Seconds over which the shown rate is averaged, roughly.
const MEMORY: f64 = 1.0;

/// When to show progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum When {
    /// If standard error is a terminal on which nothing else appears.
    Auto,
    /// Also if standard error is no terminal: then a line every second.
    Always,
    /// Not at all.
    Never,
}

/// One piece of work.
#[derive(Debug)]
pub struct Progress {
    total: Option<u64>,
    terminal: bool,
    began: Instant,
    rate: Rate,
    drawn: Option<Instant>,
}

impl Progress {
    /// Begins to show how many bytes are done, of `total` if that is known.
    pub fn new(total: Option<u64>) -> Self {
        let began = Instant::now();
        let rate = Rate { at: began, done: 0, value: None };
        Self { total, terminal: io::stderr().is_terminal(), began, rate, drawn: None }
    }

    /// Shows that `done` bytes are, say, "sent", if the time for it has come.
    pub fn show(&mut self, what: &str, done: u64) {
        let now = Instant::now();
        let interval = if self.terminal { INTERVAL } else { PLAIN_INTERVAL };
        let due = self.drawn.map_or(self.began + PATIENCE.max(interval), |drawn| drawn + interval);
        // A little early counts as on time: a caller at regular intervals has some jitter.
        if now + interval / 10 < due {
            return;
        }
        self.rate.record_progress(now, done);
        let state = State { done, total: self.total, rate: self.rate.value, time: now - self.began };
        let mut error = io::stderr();
        let _ = if self.terminal {
            write!(error, "\r{}\x1b[K", state.line(what, width()))
        } else {
            writeln!(error, "{}", state.line(what, 0))
        };
        self.drawn = Some(now);
    }

    /// Removes the line.
    pub fn clear(&mut self) {
        if self.terminal && self.drawn.take().is_some() {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Returns the columns of the terminal now; it may be resized at any time.
fn width() -> usize {
    rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| size.ws_col.into())
}

/// Rate in bytes per second, averaged with decaying weights.
#[derive(Debug)]
struct Rate {
    at: Instant,
    done: u64,
    value: Option<f64>,
}

impl Rate {
    fn record_progress(&mut self, now: Instant, done: u64) {
        let seconds = (now - self.at).as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        let fresh = done.saturating_sub(self.done) as f64 / seconds;
        let weight = 1.0 - (-seconds / MEMORY).exp();
        self.value = Some(self.value.map_or(fresh, |old| old + (fresh - old) * weight));
        (self.at, self.done) = (now, done);
    }
}

/// Content of a line.
struct State {
    done: u64,
    total: Option<u64>,
    rate: Option<f64>,
    time: Duration,
}

impl State {
    /// Formats at most `width` columns; 0 stands for no terminal, where there is no bar.
    fn line(&self, what: &str, width: usize) -> String {
        let rate = self.rate.unwrap_or(0.0);
        let words = match self.total {
            Some(total) => {
                let left = total.saturating_sub(self.done);
                let eta = match left as f64 / rate {
                    _ if left == 0 => human::clock(Duration::ZERO),
                    s if s < 360_000.0 => human::clock(Duration::from_secs_f64(s.ceil())),
                    _ => "-:--".into(),
                };
                let (done, total) = (human::bytes(self.done), human::bytes(total));
                format!("{what} {done} of {total}  {}  {eta} left", human::rate(rate))
            }
            None => {
                let time = human::clock(self.time);
                format!("{what} {}  {}  {time}", human::bytes(self.done), human::rate(rate))
            }
        };
        let part = self.total.map(|total| if total == 0 { 1.0 } else { (self.done as f64 / total as f64).min(1.0) });
        let mut line = part.map_or(String::new(), |part| format!("{:3.0}% ", (part * 100.0).floor()));
        // One column stays free: a terminal may wrap when the last one is written.
        let room = width.saturating_sub(line.len() + words.len() + 4).min(40);
        if let (Some(part), 8..) = (part, room) {
            let full = (part * room as f64) as usize;
            line += &format!("[{}{}] ", "#".repeat(full), "-".repeat(room - full));
        }
        line += &words;
        if width > 0 {
            line.truncate(width - 1);
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HALF: State = State { done: 512 << 20, total: Some(1 << 30), rate: Some(5e8), time: Duration::from_secs(61) };

    #[test]
    fn line_on_a_terminal_has_a_bar_and_fits() {
        assert_eq!(
            HALF.line("sent", 80),
            " 50% [#############-------------] sent 512 MiB of 1.00 GiB  500 MB/s  0:02 left"
        );
        for width in 1..200 {
            assert!(HALF.line("sent", width).len() < width, "{width}");
        }
    }

    #[test]
    fn line_elsewhere_has_none() {
        assert_eq!(HALF.line("sent", 0), " 50% sent 512 MiB of 1.00 GiB  500 MB/s  0:02 left");
    }

    #[test]
    fn line_of_unknown_length_says_the_time() {
        let state = State { total: None, ..HALF };
        assert_eq!(state.line("received", 80), "received 512 MiB  500 MB/s  1:01");
    }

    #[test]
    fn line_that_stands_still_or_has_too_much_is_sane() {
        let still = State { rate: None, ..HALF };
        assert!(still.line("sent", 80).ends_with("0.00 B/s  -:-- left"));
        let grown = State { done: 2 << 30, ..HALF };
        assert!(grown.line("sent", 80).starts_with("100% ["));
        let empty = State { done: 0, total: Some(0), ..HALF };
        assert!(empty.line("sent", 80).starts_with("100% ["));
    }

    #[test]
    fn rate_follows_within_seconds() {
        let began = Instant::now();
        let mut rate = Rate { at: began, done: 0, value: None };
        for tenth in 1..=50u32 {
            rate.record_progress(began + tenth * INTERVAL, u64::from(tenth) * 10);
        }
        assert!((rate.value.unwrap() - 100.0).abs() < 1e-6);
        for tenth in 51..=100 {
            rate.record_progress(began + tenth * INTERVAL, 500);
        }
        assert!(rate.value.unwrap() < 1.0);
    }
}
