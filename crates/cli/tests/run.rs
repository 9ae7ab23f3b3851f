// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo run`: what the program finds, and what becomes of it. What its connections do is tested with the library.

use std::{
    env,
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Output},
};

/// The library, which cargo builds for these tests.
fn library() -> PathBuf {
    let library = env::current_exe().unwrap().with_file_name("libtombolo_preload.so");
    assert!(library.is_file(), "{} is not built", library.display());
    library
}

fn run(options: &[&str], command: &[&str]) -> (Output, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut tombolo = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    tombolo.arg("run").arg("--library").arg(library()).arg("--folder").arg(folder.path().join("meet"));
    (tombolo.args(options).arg("--").args(command).output().unwrap(), folder)
}

#[test]
fn program_finds_the_library_after_those_that_were_preloaded_before() {
    let folder = tempfile::tempdir().unwrap();
    let mut tombolo = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    tombolo.env("LD_PRELOAD", "/nowhere/other.so").arg("run").arg("--library").arg(library());
    tombolo.arg("--folder").arg(folder.path());
    let done = tombolo.args(["--", "sh", "-c", "echo $LD_PRELOAD $TOMBOLO_SOCKETS"]).output().unwrap();
    let said = String::from_utf8(done.stdout).unwrap();
    let folder = folder.path().canonicalize().unwrap();
    assert_eq!(said, format!("/nowhere/other.so:{} {}\n", library().display(), folder.display()));
}

#[test]
fn exit_code_of_the_program_is_that_of_the_command() {
    let (done, _folder) = run(&[], &["sh", "-c", "exit 7"]);
    assert_eq!(done.status.code(), Some(7));
}

#[test]
fn arguments_reach_the_program_as_they_are() {
    let (done, _folder) = run(&[], &["printf", "%s|", "a b", "--ring", "$x"]);
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "a b|--ring|$x|");
}

#[test]
fn io_uring_is_kept_from_the_program_unless_it_is_allowed() {
    let filters = |options: &[&str]| {
        let (done, _folder) = run(options, &["grep", "Seccomp:", "/proc/self/status"]);
        String::from_utf8(done.stdout).unwrap()
    };
    let before = std::fs::read_to_string("/proc/self/status").unwrap();
    let before = before.lines().find(|line| line.starts_with("Seccomp:")).unwrap();
    assert_eq!(filters(&[]), "Seccomp:\t2\n");
    assert_eq!(filters(&["--allow-io-uring"]).trim_end(), before);
}

#[test]
fn program_that_makes_an_io_uring_hears_that_there_is_none_unless_it_is_allowed() {
    // By its number, 425, and without parameters: a kernel that has it says EFAULT, or what it is configured to say.
    const MAKES: &str = "$! = 0; syscall(425, 1, 0); print $! + 0";
    let errno = |output: Output| String::from_utf8(output.stdout).unwrap();
    let (kept, _folder) = run(&[], &["perl", "-e", MAKES]);
    assert_eq!(errno(kept), rustix::io::Errno::NOSYS.raw_os_error().to_string());
    let (allowed, _folder) = run(&["--allow-io-uring"], &["perl", "-e", MAKES]);
    let plain = Command::new("perl").args(["-e", MAKES]).output().unwrap();
    assert_eq!(errno(allowed), errno(plain));
}

#[test]
fn program_with_rights_of_its_file_keeps_them_and_one_line_says_that_it_stays_on_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("grep");
    std::fs::copy("/bin/grep", &program).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let words = [program.to_str().unwrap(), "-E", "NoNewPrivs|Seccomp:", "/proc/self/status"];
    let plain = Command::new(words[0]).args(&words[1..]).output().unwrap();
    let (done, _folder) = run(&[], &words);
    assert_eq!(done.stdout, plain.stdout);
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(said.contains("another user's rights") && said.lines().count() == 1, "{said}");
}

#[test]
fn static_program_runs_and_one_line_says_that_it_stays_on_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let (source, program) = (folder.path().join("static.c"), folder.path().join("static"));
    std::fs::write(&source, "#include <stdio.h>\nint main(void) { puts(\"here\"); return 5; }\n").unwrap();
    let made = Command::new("cc").args(["-static", "-o"]).arg(&program).arg(&source).status().unwrap();
    assert!(made.success());
    let (done, _folder) = run(&[], &[program.to_str().unwrap()]);
    assert_eq!((done.status.code(), &done.stdout[..]), (Some(5), &b"here\n"[..]));
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(said.contains("linked statically") && said.lines().count() == 1, "{said}");
}

#[test]
fn library_or_program_that_is_not_there_is_bad_usage() {
    let tombolo = |arguments: &[&str]| {
        let folder = tempfile::tempdir().unwrap();
        let mut tombolo = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        let done = tombolo.arg("run").arg("--folder").arg(folder.path()).args(arguments).output().unwrap();
        (done.status.code(), String::from_utf8(done.stderr).unwrap())
    };
    let (code, said) = tombolo(&["--library", "/nowhere/x.so", "true"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("no library at /nowhere/x.so") && said.lines().count() == 1, "{said}");
    let library = library();
    let (code, said) = tombolo(&["--library", library.to_str().unwrap(), "/nowhere/program"]);
    assert_eq!(code, Some(2));
    assert!(said.contains("/nowhere/program") && said.lines().count() == 1, "{said}");
    let (code, _) = tombolo(&["--library", library.to_str().unwrap(), "--ring", "5000", "true"]);
    assert_eq!(code, Some(2));
}
