// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs one command under a time limit, shows its output and passes each line of it to the caller.

use super::kin;
use std::io::{self, BufRead, BufReader, IsTerminal, Read, Write};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

/// Interval between looks at whether the command has ended or its time is up.
const TICK: Duration = Duration::from_millis(50);
/// Time that descendants may take to end after the command has.
const GRACE: Duration = Duration::from_secs(2);

/// How a command ended.
#[derive(Debug)]
pub enum End {
    Exited(ExitStatus),
    /// The time limit was reached; the command and all its descendants were killed.
    TimedOut,
}

/// Result of a command.
#[derive(Debug)]
pub struct Ran {
    pub end: End,
    /// Descendants that outlived the command. They were killed.
    pub strays: Vec<String>,
}

enum Line {
    Out(String),
    Err(String),
}

/// Runs the command. Its output goes to this process's streams; each line of either stream also goes to `on_line`.
pub fn run(command: &mut Command, limit: Duration, mut on_line: impl FnMut(&str)) -> io::Result<Ran> {
    if io::stderr().is_terminal() && std::env::var_os("CARGO_TERM_COLOR").is_none() {
        command.env("CARGO_TERM_COLOR", "always"); // It writes to a pipe, but a person reads a terminal.
    }
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (sender, lines) = channel();
    forward(child.stdout.take(), sender.clone(), Line::Out);
    forward(child.stderr.take(), sender, Line::Err);
    supervise(&mut child, Instant::now() + limit, &lines, &mut |line| match line {
        Line::Out(line) => {
            println!("{line}");
            on_line(&line);
        }
        Line::Err(line) => {
            eprintln!("{line}");
            on_line(&line);
        }
    })
}

/// Passes lines on until the command has ended and no process holds its pipes any more.
fn supervise(
    child: &mut Child,
    deadline: Instant,
    lines: &Receiver<Line>,
    on_line: &mut dyn FnMut(Line),
) -> io::Result<Ran> {
    let mut ran = None;
    loop {
        match lines.recv_timeout(TICK) {
            Ok(line) => on_line(line),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => match ran {
                Some(ran) => {
                    io::stdout().flush()?;
                    return Ok(ran);
                }
                None => kin::pause(), // It closed its streams and still runs.
            },
        }
        if ran.is_some() {
            continue;
        }
        if let Some(status) = child.try_wait()? {
            let strays = kin::outlasting(GRACE).iter().map(ToString::to_string).collect();
            kin::end_all();
            ran = Some(Ran { end: End::Exited(status), strays });
        } else if Instant::now() >= deadline {
            kin::end_all();
            child.wait()?;
            ran = Some(Ran { end: End::TimedOut, strays: Vec::new() });
        }
    }
}

fn forward(stream: Option<impl Read + Send + 'static>, to: Sender<Line>, wrap: fn(String) -> Line) {
    let Some(stream) = stream else { return };
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let mut stream = BufReader::new(stream);
        while matches!(stream.read_until(b'\n', &mut bytes), Ok(n) if n > 0) {
            let line = String::from_utf8_lossy(&bytes).trim_end_matches('\n').to_owned();
            if to.send(wrap(line)).is_err() {
                return;
            }
            bytes.clear();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// Lets one test run at a time, because the runner counts every descendant of this process as its own.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        kin::adopt().unwrap();
        guard
    }

    fn sh(script: &str, limit: Duration) -> (Ran, Vec<String>) {
        let mut lines = Vec::new();
        let ran = run(Command::new("sh").args(["-c", script]), limit, |line| lines.push(line.to_owned())).unwrap();
        (ran, lines)
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn lines_of_both_streams_and_the_exit_code_arrive() {
        let _alone = alone();
        let (ran, mut lines) = sh("echo a; echo b >&2; printf c; exit 3", LONG);
        lines.sort();
        assert_eq!(lines, ["a", "b", "c"]);
        assert!(matches!(ran.end, End::Exited(status) if status.code() == Some(3)), "{ran:?}");
        assert!(ran.strays.is_empty(), "{ran:?}");
    }

    #[test]
    fn canary_command_beyond_its_limit_is_killed_with_all_descendants() {
        let _alone = alone();
        let start = Instant::now();
        let (ran, lines) = sh("setsid sleep 600 & echo up; sleep 600", Duration::from_millis(300));
        assert!(matches!(ran.end, End::TimedOut), "{ran:?}");
        assert_eq!(lines, ["up"]);
        assert!(start.elapsed() < LONG, "took {:?}", start.elapsed());
        assert!(kin::all().is_empty(), "{:?}", kin::all());
    }

    #[test]
    fn canary_process_left_behind_is_named_and_killed() {
        let _alone = alone();
        let (ran, _) = sh("setsid sleep 600 & exit 0", LONG);
        assert!(ran.strays.len() == 1 && ran.strays[0].starts_with("sleep ("), "{ran:?}");
        assert!(kin::all().is_empty(), "{:?}", kin::all());
    }

    #[test]
    fn command_that_closes_its_streams_is_waited_for() {
        let _alone = alone();
        let (ran, _) = sh("exec >&- 2>&-; sleep 0.2; exit 4", LONG);
        assert!(matches!(ran.end, End::Exited(status) if status.code() == Some(4)), "{ran:?}");
    }
}
