// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The lines that `tombolod` writes to standard error, as a terminal and as the journal show them.

mod common;

use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::Path,
    process::Command,
};

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat, open};

use common::{Daemon, until};

/// Checks a valid configuration. Returns the exit code, and what was written to a file.
fn check(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String) {
    let (config, log) = (folder.join("tombolod.toml"), folder.join("log"));
    fs::write(&config, "[domain.a]\n").unwrap();
    let file = File::create(&log).unwrap();
    let stat = file.metadata().unwrap();
    let journal = format!("{}:{}", stat.dev(), stat.ino());
    let mut command = Command::new(env!("CARGO_BIN_EXE_tombolod"));
    command.arg("--check").arg(&config).args(arguments).stderr(file);
    command.env_remove("TOMBOLO_LOG").env_remove("JOURNAL_STREAM");
    for (name, value) in variables {
        command.env(name, if *value == "the log" { &journal } else { *value });
    }
    (command.status().unwrap().code(), fs::read_to_string(&log).unwrap())
}

#[test]
fn journal_gets_the_level_of_each_line_and_a_file_none() {
    let folder = tempfile::tempdir().unwrap();
    let (code, line) = check(folder.path(), &[], &[]);
    assert_eq!(code, Some(0));
    assert!(line.starts_with("tombolod: ") && line.ends_with(": 1 domains, 0 rules\n"), "{line}");
    let (_, same) = check(folder.path(), &[], &[("JOURNAL_STREAM", "1:2")]);
    assert_eq!(same, line, "the journal is somewhere else");
    let (_, journal) = check(folder.path(), &[], &[("JOURNAL_STREAM", "the log")]);
    assert_eq!(journal, format!("<6>{line}"));
}

#[test]
fn log_has_the_level_of_the_command_line_or_else_of_the_environment() {
    let folder = tempfile::tempdir().unwrap();
    let lines =
        |arguments: &[&str], variables: &[(&str, &str)]| check(folder.path(), arguments, variables).1.lines().count();
    assert_eq!(lines(&["--log", "warn"], &[]), 0);
    assert_eq!(lines(&[], &[("TOMBOLO_LOG", "tombolod=off")]), 0);
    assert_eq!(lines(&["--log", "info"], &[("TOMBOLO_LOG", "off")]), 1);
    let (code, why) = check(folder.path(), &[], &[("TOMBOLO_LOG", "loud")]);
    assert!(code == Some(2) && why.starts_with("tombolod: TOMBOLO_LOG: \"loud\" is no level: `error`"), "{why}");
    assert_eq!(check(folder.path(), &["--log", "loud"], &[]).0, Some(2));
}

#[test]
fn log_that_nobody_reads_stops_the_broker_neither_at_its_start_nor_later() {
    let mut daemon = Daemon::new("[domain.a]\n");
    let pipe = daemon.file("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let reader = open(&pipe, OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()).unwrap();
    // The pipe is full before the first line: a further line needs a reader.
    let fill = || while rustix::io::write(&reader, &[b'x'; 4096]).is_ok() {};
    fill();
    daemon.under = vec!["sh", "-c", "exec \"$0\" \"$@\" 2<>\"${2%/*}/pipe\""];
    daemon.restart();
    daemon.client().links();
    // A reader gets the lines that were logged meanwhile.
    let mut said = Vec::new();
    until("the lines come", || {
        let mut some = vec![0; 1 << 16];
        let read = rustix::io::read(&reader, &mut some).unwrap_or(0);
        said.extend_from_slice(&some[..read]);
        String::from_utf8_lossy(&said).contains("ready in").then_some(())
    });
    fill();
    daemon.configure("this is none");
    daemon.signal(rustix::process::Signal::HUP);
    daemon.client().links();
    daemon.stop();
}

/// The broker of a machine blocks the signals that it reads, after the log has begun.
#[test]
fn thread_that_writes_the_log_takes_no_signal() {
    let daemon = Daemon::start("[domain.a]\n");
    let tasks = format!("/proc/{}/task", daemon.pid());
    let blocked = until("the thread blocks", || {
        let statuses =
            fs::read_dir(&tasks).unwrap().map(|task| fs::read_to_string(task.unwrap().path().join("status")));
        let status = statuses.filter_map(Result::ok).find(|status| status.starts_with("Name:\tlog\n"))?;
        let word = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?;
        u64::from_str_radix(word.trim(), 16).ok().filter(|blocked| *blocked != 0)
    });
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::INT, rustix::process::Signal::HUP] {
        assert_ne!(blocked & 1 << (signal.as_raw() - 1), 0, "{signal:?} is taken: {blocked:x}");
    }
}
