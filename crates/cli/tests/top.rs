// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo top`, in a terminal: a pseudo-terminal of the kernel, with an emulator that keeps the screen's contents.

mod common;

use std::{
    fs::File,
    io::{Read, Write},
    num::NonZero,
    os::{fd::OwnedFd, unix::process::ExitStatusExt},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use common::{Place, Running, wait_until};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::{Mode, OFlags},
    process::{Pid, Signal, kill_process},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};
use serde_json::Value;

/// A terminal with `tombolo top` on it, as its controlling terminal.
struct Terminal {
    master: Option<File>,
    /// Held open so that its modes can be read when the program is gone.
    slave: OwnedFd,
    before: (LocalModes, rustix::termios::InputModes),
    child: Child,
    emulator: vt100::Parser,
}

impl Terminal {
    fn start(options: &[&str], rows: u16, columns: u16) -> Self {
        Self::changed(options, rows, columns, |_| {})
    }

    fn changed(options: &[&str], rows: u16, columns: u16, change: impl FnOnce(&mut Command)) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let name = ptsname(&master, Vec::new()).unwrap();
        let slave = rustix::fs::open(name, OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC, Mode::empty()).unwrap();
        tcsetwinsize(&slave, size(rows, columns)).unwrap();
        let modes = tcgetattr(&slave).unwrap();
        let end = || Stdio::from(slave.try_clone().unwrap());
        let mut command = Command::new("setsid");
        command.args(["--ctty", env!("CARGO_BIN_EXE_tombolo"), "top"]).args(options);
        change(&mut command);
        let child = command.stdin(end()).stdout(end()).stderr(end()).spawn().unwrap();
        let emulator = vt100::Parser::new(some(rows), some(columns), 0);
        let before = (modes.local_modes, modes.input_modes);
        Self { master: Some(master.into()), slave, before, child, emulator }
    }

    /// Takes in what the program has drawn by now, and returns the screen.
    fn read_screen(&mut self) -> String {
        let mut bytes = [0; 4096];
        let now = Timespec::try_from(Duration::from_millis(1)).unwrap();
        let Some(master) = &mut self.master else { return String::new() };
        while poll(&mut [PollFd::new(&*master, PollFlags::IN)], Some(&now)).unwrap() > 0 {
            match master.read(&mut bytes) {
                Ok(len) if len > 0 => self.emulator.process(&bytes[..len]),
                _ => break,
            }
        }
        self.emulator.screen().contents()
    }

    fn wait(&mut self, what: &str, mut is: impl FnMut(&vt100::Screen) -> bool) -> String {
        let mut text = String::new();
        wait_until(what, || {
            text = self.read_screen();
            assert!(self.child.try_wait().unwrap().is_none(), "it has ended: {text}");
            is(self.emulator.screen())
        });
        text
    }

    fn press(&mut self, keys: &str) {
        self.master.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn row(&self, row: u16) -> String {
        let (_, columns) = self.emulator.screen().size();
        self.emulator.screen().rows(0, columns.get()).nth(row.into()).unwrap()
    }

    /// Returns whether the terminal is as the shell left it.
    fn is_as_before(&self) -> bool {
        let modes = tcgetattr(&self.slave).unwrap();
        (modes.local_modes, modes.input_modes) == self.before
    }

    /// Waits for the end; the terminal must be as before.
    #[track_caller]
    fn ended(mut self) -> ExitStatus {
        let mut status = None;
        wait_until("top ends", || {
            self.read_screen();
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        self.read_screen();
        let screen = self.emulator.screen();
        assert!(!screen.alternate_screen() && !screen.hide_cursor(), "the screen is given back");
        assert!(self.is_as_before(), "keys are seen again and come in lines");
        status.unwrap()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn some(number: u16) -> NonZero<u16> {
    NonZero::new(number).expect("a screen of some size")
}

fn size(rows: u16, columns: u16) -> Winsize {
    Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }
}

fn drawn(screen: &vt100::Screen) -> bool {
    screen.alternate_screen() && screen.contents().contains("q quit") && screen.contents().contains("RATE")
}

#[test]
fn b20_top_draws_channels_to_machines() {
    let place = Place::new();
    let broker = common::broker::of_web(&place);
    let mut top = Terminal::changed(&[], 24, 160, |command| _ = command.env("TOMBOLO_BROKER", &broker));
    top.wait("a channel to a machine", |screen| drawn(screen) && screen.contents().contains("vm:db/sql"));
    top.press("q");
    assert!(top.ended().success());
}

#[test]
fn top_draws_channels_and_quits_by_key() {
    let place = Place::new();
    let listener = place.listen("--ring 64KiB");
    let connector = place.connect("");
    let mut top = Terminal::start(&["--interval", "0.1"], 40, 200);
    let pids = format!("{}>{}", listener.child.id(), connector.child.id());
    top.wait("the channel is there", |screen| screen.contents().contains(&pids));
    let text = top.wait("rates are there", |screen| {
        screen.contents().lines().any(|line| line.contains(&pids) && line.contains("0.00 B/s"))
    });
    let line = text.lines().find(|line| line.contains(&pids)).unwrap();
    assert!(line.contains("open") && line.contains("0%") && line.contains(&place.address()), "{line}");
    assert!(top.row(0).contains("channels") && top.row(39).starts_with("q quit"), "{text}");
    assert!(top.emulator.screen().hide_cursor() && !top.is_as_before());
    top.press("f");
    top.wait("it is sorted by fill", |screen| screen.contents().contains("*FILL"));
    top.press("q");
    assert_eq!(top.ended().code(), Some(0));
}

#[test]
fn top_fits_the_terminal_whatever_its_size_becomes() {
    let mut top = Terminal::start(&["--interval", "3600"], 24, 80);
    top.wait("it is drawn", drawn);
    for (rows, columns) in [(10, 100), (50, 30), (2, 2), (24, 80)] {
        top.emulator.screen_mut().set_size(some(rows), some(columns));
        // Only the signal triggers it: the next regular look is an hour away.
        tcsetwinsize(top.master.as_ref().unwrap(), size(rows, columns)).unwrap();
        let wanted: String = "q quit  sort: r rate  c calls".chars().take(columns.into()).collect();
        wait_until("it is drawn anew", || {
            top.read_screen();
            let screen = top.emulator.screen();
            let rows: Vec<String> = screen.rows(0, columns).collect();
            let keys = rows.iter().filter(|row| row.starts_with(wanted.trim_end())).count();
            keys == 1 && rows.last().unwrap().starts_with(wanted.trim_end())
        });
    }
    top.press("q");
    assert_eq!(top.ended().code(), Some(0));
}

#[test]
fn control_c_ends_top_well_and_other_signals_are_died_of() {
    let mut top = Terminal::start(&[], 24, 80);
    top.wait("it is drawn", drawn);
    top.press("\x03");
    assert_eq!(top.ended().code(), Some(0));
    for signal in [Signal::TERM, Signal::HUP] {
        let mut top = Terminal::start(&[], 24, 80);
        top.wait("it is drawn", drawn);
        top.signal(signal);
        assert_eq!(top.ended().signal(), Some(signal.as_raw()));
    }
}

#[test]
fn control_z_gives_the_terminal_back_until_it_goes_on() {
    let mut top = Terminal::start(&[], 24, 80);
    top.wait("it is drawn", drawn);
    top.press("\x1a");
    let stat = format!("/proc/{}/stat", top.child.id());
    wait_until("it is stopped", || std::fs::read_to_string(&stat).unwrap().contains(") T "));
    wait_until("the screen is given back", || {
        top.read_screen();
        !top.emulator.screen().alternate_screen()
    });
    assert!(top.is_as_before());
    top.signal(Signal::CONT);
    top.wait("it is drawn again", drawn);
    assert!(!top.is_as_before());
    top.press("q");
    assert_eq!(top.ended().code(), Some(0));
}

#[test]
fn terminal_that_goes_away_ends_top() {
    let mut top = Terminal::start(&[], 24, 80);
    top.wait("it is drawn", drawn);
    top.master = None;
    wait_until("top ends", || top.child.try_wait().unwrap().is_some());
}

#[test]
fn canary_changed_terminal_is_noticed_by_these_tests() {
    let top = Terminal::start(&[], 24, 80);
    let mut modes = tcgetattr(&top.slave).unwrap();
    modes.local_modes ^= LocalModes::ECHO;
    rustix::termios::tcsetattr(&top.slave, rustix::termios::OptionalActions::Now, &modes).unwrap();
    wait_until("it differs", || !top.is_as_before());
}

#[test]
fn without_a_terminal_the_way_out_is_named() {
    Running::start(&["top"], |_| {}).end().expect_failure(2, &["terminal", "--once", "--json"]);
    for bad in [&["top", "--interval", "0"][..], &["top", "--sort", "beauty"], &["top", "--nonsense"]] {
        Running::start(bad, |_| {}).end().expect(2);
    }
}

#[test]
fn once_prints_a_table_and_json_the_rates() {
    let place = Place::new();
    let listener = place.listen("");
    let mut connector = place.connect("");
    wait_until("they have met", || {
        let text = Running::start(&["ls"], |_| {}).end().expect(0).out;
        String::from_utf8(text).unwrap().contains(&place.address())
    });
    let once = Running::start(&["top", "--once", "--interval", "0.1", "--sort", "id"], |_| {}).end().expect(0).out;
    let once = String::from_utf8(once).unwrap();
    assert!(once.contains("*PIPE") && once.contains(&place.address()) && !once.contains('\x1b'), "{once}");

    // It continues until it is interrupted; meanwhile the connection is used.
    let mut top = Running::start(&["top", "--json", "--interval", "0.1"], |_| {});
    let mut seen = String::new();
    let mut input = connector.child.stdin.take().unwrap();
    let out = top.child.stdout.take().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(out));
    wait_until("its rate is seen", || {
        seen = lines.next().unwrap().unwrap();
        let line: Value = serde_json::from_str(&seen).expect(&seen);
        let ours = line["address"] == place.address().as_str();
        if ours {
            // The peer does not read, so only a little is written each time.
            input.write_all(&[1; 1000]).unwrap();
        }
        ours && line["rates"][1]["bytes"].as_f64() > Some(0.0)
    });
    let line: Value = serde_json::from_str(&seen).unwrap();
    assert!(line["type"] == "channel" && line["state"] == "open" && line["rates"][0]["sleeps"].is_number(), "{line}");
    top.signal(Signal::INT);
    drop(lines);
    let status = top.end_with_open_input().status;
    assert!(status.signal() == Some(2) || status.code() == Some(0), "interrupted, or nobody read on: {status}");
    drop((input, listener, connector));
}
