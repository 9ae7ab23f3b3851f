// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo top`: shows the pipes of this machine, live.

mod rates;
mod screen;
mod table;

use std::{
    io::{IsTerminal, stdin, stdout},
    time::{Duration, Instant},
};

use serde::Serialize;
use tombolo_inspect::{Channel, Socket, Summary};

use crate::{
    failure::{Failure, Result},
    output,
    signals::{self, Signals},
};

use rates::{Measured, Meter, Paths, Rates};
use screen::{Event, Screen};
use table::{Sort, Table};

/// Show the channels of this machine live: rates, fill, sleeps, notifications
///
/// One line for each direction of each channel, then one for each TCP connection of programs under `tombolo run`. Keys:
/// q quits. r, c, f, s, n, u, p, a, i sort by rate, calls, fill, sleeps, notifications sent, notifications unneeded,
/// spins that paid, age, id. The same key again turns the order round; j, k, arrows and page keys scroll.
///
/// Exit codes: 0 if it was ended by q or Ctrl-C, or --once is done; 1 if it was not possible to look; 2 if the options
/// make no sense or there is no terminal.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Seconds between two looks
    #[arg(short, long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
    /// What to sort by
    #[arg(short, long, value_name = "KEY", default_value = "rate")]
    pub sort: Sort,
    /// Smallest first
    #[arg(short, long)]
    pub reverse: bool,
    /// Look once, print and end; needs no terminal
    #[arg(long)]
    pub once: bool,
    /// Print lines of JSON at each look: one for each channel, and a summary; needs no terminal
    #[arg(long)]
    pub json: bool,
}

/// Longest time before the first rates are shown.
const FIRST: Duration = Duration::from_millis(250);

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds such as 2 or 0.5"))?;
    if (0.1..=3600.0).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err("0.1 to 3600".into()) }
}

/// One look at everything, with what happened since the last look.
struct Look {
    channels: Vec<Measured>,
    sockets: Vec<(Socket, Option<Paths>)>,
    summary: Summary,
    /// Seconds since the last look.
    seconds: f64,
}

impl Look {
    /// Looks now.
    fn measure_now(meter: &mut Meter) -> Result<Self> {
        let view = tombolo_inspect::inspect(&[])?;
        let (seconds, channels) = meter.measure(view.channels, Instant::now());
        let sockets = meter.measure_sockets(view.sockets, seconds);
        Ok(Self { channels, sockets, summary: view.summary, seconds })
    }
}

/// Carries out the command.
pub fn run(args: &Args) -> Result<()> {
    if args.json || args.once {
        return output::unless_unread(print(args));
    }
    if !stdin().is_terminal() || !stdout().is_terminal() {
        let hint = "top draws on a terminal, and standard input or output is none: use --once or --json";
        return Err(Failure::Usage(hint.into()));
    }
    watch(args)
}

/// One line of JSON.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Line<'a> {
    Channel {
        #[serde(flatten)]
        channel: &'a Channel,
        /// Rates of each pipe; `null` where nothing is known from before.
        rates: Option<[Rates; 2]>,
    },
    Socket {
        #[serde(flatten)]
        socket: &'a Socket,
        /// Bytes per second by each path, both directions; `null` where nothing is known from before.
        rates: Option<Paths>,
    },
    Summary {
        #[serde(flatten)]
        summary: &'a Summary,
        seconds: f64,
    },
}

/// Prints one look after another, or only one.
fn print(args: &Args) -> Result<()> {
    let signals = Signals::hold()?;
    let mut meter = Meter::default();
    Look::measure_now(&mut meter)?;
    loop {
        signals.check_within(args.interval)?;
        let look = Look::measure_now(&mut meter)?;
        if args.json {
            for (channel, rates) in &look.channels {
                output::json(&Line::Channel { channel, rates: *rates })?;
            }
            for (socket, rates) in &look.sockets {
                output::json(&Line::Socket { socket, rates: *rates })?;
            }
            output::json(&Line::Summary { summary: &look.summary, seconds: look.seconds })?;
        } else {
            let table = Table::new(args.sort, args.reverse);
            output::print(table.lines(&look, usize::MAX).join("\n").trim_end())?;
        }
        if args.once {
            return Ok(());
        }
    }
}

/// Draws until the user ends it.
fn watch(args: &Args) -> Result<()> {
    let signals = Signals::hold()?;
    let mut meter = Meter::default();
    let mut look = Look::measure_now(&mut meter)?;
    let mut due = Instant::now() + args.interval.min(FIRST);
    let mut table = Table::new(args.sort, args.reverse);
    let mut screen = Screen::enter()?;
    loop {
        screen.draw(|width, height| table.frame(&look, width, height))?;
        match screen.wait(&signals, due)? {
            Event::Key(key) => {
                if !table.press(key) {
                    return Ok(());
                }
            }
            Event::Resized => {}
            Event::Due => {
                look = Look::measure_now(&mut meter)?;
                due = Instant::now() + args.interval;
            }
            Event::Gone => return Ok(()),
            // Ctrl-C is the usual way to end a program that fills the screen.
            Event::Signal(signals::INTERRUPT) => return Ok(()),
            Event::Signal(signal) => return Err(Failure::Interrupted { signal, after: String::new() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_in_bounds_is_taken_and_others_refused() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "0", "0.01", "-1", "nan", "inf", "1e9", "1s"] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }
}
