// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What `tombolod` writes to standard error, as a terminal and as the journal has it.

use std::{
    fs::{self, File},
    os::unix::fs::MetadataExt,
    path::Path,
    process::Command,
};

/// Looks through a configuration that is sound: the exit code, and what was written to a file.
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
