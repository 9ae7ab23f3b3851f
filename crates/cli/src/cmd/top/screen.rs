// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Takes over the terminal, draws on it, and gives it back however this program ends.

use std::{
    io::{self, Write, stdin, stdout},
    os::{fd::AsFd, unix::net::UnixStream},
    panic,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use rustix::termios::{InputModes, LocalModes, OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use signal_hook::{
    consts::{SIGCONT, SIGTSTP, SIGWINCH},
    flag, low_level,
};

use crate::{
    failure::{Os, Result},
    output,
    signals::{Signals, await_any},
};

/// Switches to another screen than the shell's, hides the cursor, and cuts lines that are too long.
const ENTER: &str = "\x1b[?1049h\x1b[?25l\x1b[?7l";
const LEAVE: &str = "\x1b[?7h\x1b[?25h\x1b[?1049l";

/// Key that means something here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Key {
    Char(char),
    Up,
    Down,
    PageUp,
    PageDown,
}

/// Event to act on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event {
    Key(Key),
    /// The screen has another size, or must be drawn anew.
    Resized,
    /// The time to wait for is reached.
    Due,
    /// A signal that ends programs.
    Signal(i32),
    /// The terminal has gone away.
    Gone,
}

/// The terminal, while this program has it.
#[derive(Debug)]
pub struct Screen {
    before: Termios,
    /// Polls readable when SIGWINCH, SIGTSTP or SIGCONT came.
    wake: UnixStream,
    stopped: Arc<AtomicBool>,
    /// Keys that were read and not acted on, the last first.
    keys: Vec<Key>,
}

impl Screen {
    /// Takes the terminal over.
    pub fn enter() -> Result<Self> {
        let (wake, theirs) = UnixStream::pair().os("socketpair")?;
        wake.set_nonblocking(true).os("fcntl")?;
        let stopped = Arc::new(AtomicBool::new(false));
        flag::register(SIGTSTP, Arc::clone(&stopped)).os("sigaction")?;
        for signal in [SIGWINCH, SIGTSTP, SIGCONT] {
            low_level::pipe::register(signal, theirs.try_clone().os("dup")?).os("sigaction")?;
        }
        let before = tcgetattr(stdin()).os("tcgetattr")?;
        let screen = Self { before, wake, stopped, keys: Vec::new() };
        screen.enter_screen()?;
        // The message of a panic must not vanish with the screen.
        let (before, hook) = (screen.before.clone(), panic::take_hook());
        panic::set_hook(Box::new(move |info| {
            give_back(&before);
            hook(info);
        }));
        Ok(screen)
    }

    fn enter_screen(&self) -> Result<()> {
        let mut mine = self.before.clone();
        // Keys come one by one and without echo; Ctrl-C and Ctrl-Z stay signals, Ctrl-S does not stop the screen.
        mine.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        mine.input_modes -= InputModes::IXON;
        tcsetattr(stdin(), OptionalActions::Flush, &mine).os("tcsetattr")?;
        write(ENTER)
    }

    /// Draws the lines that `frame` returns for the screen's columns and lines.
    pub fn draw(&self, frame: impl FnOnce(usize, usize) -> Vec<String>) -> Result<()> {
        let size = tcgetwinsize(stdout()).os("reading the size of the terminal")?;
        // A terminal that reports no size is taken for the classical one.
        let (width, height) = match (size.ws_col, size.ws_row) {
            (0, _) | (_, 0) => (80, 24),
            (width, height) => (width.into(), height.into()),
        };
        let lines = frame(width, height);
        let mut text = String::from("\x1b[H");
        for (at, line) in lines.iter().enumerate() {
            let (on, off) = if at == 1 { ("\x1b[7m", "\x1b[0m") } else { ("", "") };
            let end = if at + 1 < lines.len() { "\r\n" } else { "" };
            text += &format!("{on}{line}{off}\x1b[K{end}");
        }
        write(&(text + "\x1b[J"))
    }

    /// Waits for an event to act on, until `due`.
    pub fn wait(&mut self, signals: &Signals, due: Instant) -> Result<Event> {
        loop {
            if let Some(key) = self.keys.pop() {
                return Ok(Event::Key(key));
            }
            let left = due.saturating_duration_since(Instant::now());
            let input = stdin();
            let ready = await_any(&[signals.fd(), self.wake.as_fd(), input.as_fd()], Some(left))?;
            if let Some(signal) = signals.caught() {
                return Ok(Event::Signal(signal));
            }
            if ready[1] {
                self.drain_wake();
                if self.stopped.swap(false, Ordering::SeqCst) {
                    self.stop()?;
                }
                return Ok(Event::Resized);
            }
            if ready[2] {
                let mut bytes = [0; 64];
                match rustix::io::read(&input, &mut bytes) {
                    Ok(0) | Err(rustix::io::Errno::IO) => return Ok(Event::Gone),
                    Ok(len) => self.keys = keys(&bytes[..len]),
                    Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => {}
                    Err(error) => return Ok(Err(error).os("reading the terminal")?),
                }
            } else {
                return Ok(Event::Due);
            }
        }
    }

    fn drain_wake(&self) {
        let mut bytes = [0; 64];
        while matches!(rustix::io::read(&self.wake, &mut bytes), Ok(1..)) {}
    }

    /// Handles Ctrl-Z: gives the shell its terminal back, until the shell lets this program continue.
    fn stop(&self) -> Result<()> {
        give_back(&self.before);
        low_level::emulate_default_handler(SIGTSTP).os("raise")?;
        self.enter_screen()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back(&self.before);
    }
}

/// Gives the terminal back. Ignores errors, because there is nobody to report them to.
fn give_back(before: &Termios) {
    let _ = write(LEAVE);
    let _ = tcsetattr(stdin(), OptionalActions::Flush, before);
}

fn write(text: &str) -> Result<()> {
    let mut out = stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|error: io::Error| output::failed(error))
}

/// Returns the keys in what was typed, the last first.
fn keys(mut bytes: &[u8]) -> Vec<Key> {
    const SEQUENCES: [(&[u8], Key); 6] = [
        (b"\x1b[A", Key::Up),
        (b"\x1b[B", Key::Down),
        (b"\x1bOA", Key::Up),
        (b"\x1bOB", Key::Down),
        (b"\x1b[5~", Key::PageUp),
        (b"\x1b[6~", Key::PageDown),
    ];
    let mut keys = Vec::new();
    while let [first, rest @ ..] = bytes {
        match SEQUENCES.iter().find(|(sequence, _)| bytes.starts_with(sequence)) {
            Some((sequence, key)) => {
                keys.push(*key);
                bytes = &bytes[sequence.len()..];
                continue;
            }
            // Another key with a sequence of its own: none of its letters is meant.
            None if *first == 0x1b => {
                let body = rest.strip_prefix(b"[").or_else(|| rest.strip_prefix(b"O")).unwrap_or(rest);
                let end = body.iter().position(|byte| byte.is_ascii_alphabetic() || *byte == b'~');
                bytes = end.map_or(&[], |end| &body[end + 1..]);
                continue;
            }
            None if first.is_ascii_graphic() => keys.push(Key::Char(char::from(*first))),
            None => {}
        }
        bytes = rest;
    }
    keys.reverse();
    keys
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_told_from_the_sequences_of_others() {
        let mut pressed = keys(b"f\x1b[B\x1b[5~\x1b[1;5Cq");
        pressed.reverse();
        assert_eq!(pressed, [Key::Char('f'), Key::Down, Key::PageUp, Key::Char('q')]);
        assert!(keys(b"\x1b[q\x1b").is_empty() && keys(b"\xff\x00\n").is_empty());
    }
}
