// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs commands in a guest, over any stream that reaches the guest's agent.

use crate::error::{Context, Error, Result};
use crate::line_reader::{LineReader, NoLine};
use crate::wire::{End, ToGuest, ToHost};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::time::Instant;

/// The host's end of the connection to an agent.
pub struct Control {
    out: Box<dyn Write + Send>,
    lines: LineReader,
    next: u32,
    jobs: BTreeMap<u32, State>,
}

#[derive(Debug, Default)]
struct State {
    printed: Vec<String>,
    /// Number of these lines that the caller has received.
    taken: usize,
    end: Option<End>,
}

/// A command that was started in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job(u32);

/// The exit status of a command, and all that it printed.
#[derive(Debug, Clone)]
pub struct Output {
    /// Exit status of the command.
    pub end: End,
    /// Text that the command printed on either stream.
    pub text: String,
}

impl Output {
    /// Returns the printed text, if the command succeeded.
    ///
    /// # Errors
    /// The exit status, with the printed text.
    pub fn success(self) -> Result<String> {
        match self.end {
            End::Code(0) => Ok(self.text),
            end => Err(Error::new(format!("{end:?}: {}", self.text))),
        }
    }
}

impl Control {
    /// Opens the connection to the agent at the other end of `input` and `out`, once the agent reports that it is
    /// ready.
    ///
    /// # Errors
    /// The guest did not come up before the deadline, or it ended.
    pub fn open(
        input: impl Read + Send + 'static,
        out: impl Write + Send + 'static,
        deadline: Instant,
    ) -> Result<Self> {
        let lines = LineReader::of(input);
        let mut control = Self { out: Box::new(out), lines, next: 0, jobs: BTreeMap::new() };
        control.again(deadline)?;
        Ok(control)
    }

    /// Waits until a guest that goes down is up again. Drops its jobs and its incomplete output.
    ///
    /// # Errors
    /// The guest does not come up before the deadline.
    pub fn again(&mut self, deadline: Instant) -> Result<()> {
        self.jobs.clear();
        loop {
            let line = self.next_line(deadline).context("waiting for the guest to come up")?;
            if matches!(serde_json::from_str(&line), Ok(ToHost::Ready)) {
                return Ok(());
            }
        }
    }

    /// Continues with the same agent at the other end of `input` and `out`, to which its machine has migrated.
    /// Processes all earlier output of the agent first.
    pub fn go_on(&mut self, input: impl Read + Send + 'static, out: impl Write + Send + 'static) {
        while self.listen(Instant::now()).is_ok() {}
        (self.lines, self.out) = (LineReader::of(input), Box::new(out));
    }

    /// Runs a command to its end and returns what it printed.
    ///
    /// # Errors
    /// The command fails, or still runs at the deadline.
    pub fn run(&mut self, argv: &[&str], deadline: Instant) -> Result<String> {
        let job = self.start(argv)?;
        self.wait(job, deadline)?.success()
    }

    /// Starts a command.
    ///
    /// # Errors
    /// The connection to the guest is closed.
    pub fn start(&mut self, argv: &[&str]) -> Result<Job> {
        let job = self.next;
        self.next += 1;
        self.jobs.insert(job, State::default());
        self.send_to_guest(&ToGuest::Run { job, argv: argv.iter().map(|arg| (*arg).to_owned()).collect() })?;
        Ok(Job(job))
    }

    /// Returns the next line that the command prints.
    ///
    /// # Errors
    /// The command ended instead, or printed nothing before the deadline.
    pub fn line(&mut self, job: Job, deadline: Instant) -> Result<String> {
        loop {
            let state = self.jobs.get_mut(&job.0).ok_or_else(|| Error::new("no such job"))?;
            if let Some(line) = state.printed.get(state.taken) {
                state.taken += 1;
                return Ok(line.clone());
            }
            if let Some(end) = state.end {
                return Err(Error::new(format!("it ended ({end:?}) after: {}", state.printed.join("\n"))));
            }
            self.listen(deadline)?;
        }
    }

    /// Returns all that the command has printed so far.
    #[must_use]
    pub fn printed(&self, job: Job) -> &[String] {
        self.jobs.get(&job.0).map_or(&[], |state| &state.printed)
    }

    /// Returns whether the command is known to have ended and the caller has received all that it printed.
    #[must_use]
    pub fn ended(&self, job: Job) -> bool {
        self.jobs.get(&job.0).is_none_or(|state| state.end.is_some() && state.taken == state.printed.len())
    }

    /// Waits until the command ends.
    ///
    /// # Errors
    /// The command still runs at the deadline; it is then killed.
    pub fn wait(&mut self, job: Job, deadline: Instant) -> Result<Output> {
        loop {
            let state = self.jobs.get(&job.0).ok_or_else(|| Error::new("no such job"))?;
            if let Some(end) = state.end {
                let text = state.printed.join("\n");
                self.jobs.remove(&job.0);
                return Ok(Output { end, text });
            }
            if let Err(why) = self.listen(deadline) {
                let printed = self.jobs.get(&job.0).map_or_else(String::new, |state| state.printed.join("\n"));
                _ = self.kill(job);
                return Err(Error::new(format!("{why}; it had printed: {printed}")));
            }
        }
    }

    /// Sends SIGKILL to a command.
    ///
    /// # Errors
    /// The connection to the guest is closed.
    pub fn kill(&mut self, job: Job) -> Result<()> {
        self.send_to_guest(&ToGuest::Kill { job: job.0 })
    }

    fn send_to_guest(&mut self, what: &ToGuest) -> Result<()> {
        let mut line = serde_json::to_vec(what)?;
        line.push(b'\n');
        self.out.write_all(&line).context("talking to the guest")
    }

    fn next_line(&mut self, deadline: Instant) -> Result<String> {
        self.lines.next_before(deadline).map_err(|why| match why {
            NoLine::TimedOut => Error::new("no answer before the deadline"),
            NoLine::Ended => Error::new("the guest is gone"),
        })
    }

    fn listen(&mut self, deadline: Instant) -> Result<()> {
        let line = self.next_line(deadline)?;
        match serde_json::from_str(&line).context(format!("the guest said `{line}`"))? {
            ToHost::Ready => return Err(Error::new("the guest started anew")),
            ToHost::Line { job, text } => {
                self.jobs.entry(job).and_modify(|state| state.printed.push(text));
            }
            ToHost::Exit { job, end } => {
                self.jobs.entry(job).and_modify(|state| state.end = Some(end));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::line_reader::within;
    use std::io::BufRead;
    use std::os::unix::net::UnixStream;

    /// Returns the connection to an agent that answers the first request with `answers`.
    fn with_agent(answers: &'static str) -> Control {
        let (ours, theirs) = UnixStream::pair().unwrap();
        std::thread::spawn(move || {
            let mut out = theirs.try_clone().unwrap();
            out.write_all(b"\"Ready\"\n").unwrap();
            let mut request = String::new();
            std::io::BufReader::new(&theirs).read_line(&mut request).unwrap();
            out.write_all(answers.as_bytes()).unwrap();
            if !answers.contains("Exit") {
                // Keeps the connection open until the other end closes it.
                _ = std::io::copy(&mut &theirs, &mut std::io::sink());
            }
        });
        Control::open(ours.try_clone().unwrap(), ours, within(10)).unwrap()
    }

    #[test]
    fn output_and_end_of_a_command_arrive() {
        let answers = "{\"Line\":{\"job\":0,\"text\":\"a\"}}\n{\"Exit\":{\"job\":0,\"end\":{\"Code\":3}}}\n";
        let mut control = with_agent(answers);
        let job = control.start(&["x"]).unwrap();
        assert_eq!(control.line(job, within(10)).unwrap(), "a");
        let output = control.wait(job, within(10)).unwrap();
        assert_eq!((output.end, output.text.as_str()), (End::Code(3), "a"));
        assert!(output.success().is_err());
    }

    #[test]
    fn canary_command_that_hangs_ends_at_the_deadline() {
        let mut control = with_agent("{\"Line\":{\"job\":0,\"text\":\"so far\"}}\n");
        let job = control.start(&["x"]).unwrap();
        let why = control.wait(job, within(1)).unwrap_err().to_string();
        assert!(why.contains("no answer before the deadline") && why.contains("so far"), "{why}");
    }

    #[test]
    fn canary_guest_that_went_is_noticed() {
        let mut control = with_agent("{\"Exit\":{\"job\":9,\"end\":{\"Code\":0}}}\n");
        let job = control.start(&["x"]).unwrap();
        let why = control.wait(job, within(10)).unwrap_err().to_string();
        assert!(why.contains("the guest is gone"), "{why}");
    }
}
