// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo run`: the environment of the program, and its end. What its connections do is tested with the library.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    os::unix::fs::PermissionsExt,
    path::PathBuf,
    process::{Command, Output, Stdio},
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
fn flag_that_is_none_is_bad_usage_and_those_after_the_program_are_its_own() {
    let run = |words: &[&str]| {
        let mut tombolo = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        let folder = tempfile::tempdir().unwrap();
        tombolo.arg("run").arg("--library").arg(library()).arg("--folder").arg(folder.path());
        tombolo.args(words).output().unwrap()
    };
    let done = run(&["--ringg", "1MiB", "true"]);
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && said.contains("unexpected argument '--ringg'"), "{said}");
    let done = run(&["printf", "%s|", "-x", "--ring", "--", "--not"]);
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "-x|--ring|--|--not|");
}

#[test]
fn sizes_are_taken_in_units_and_those_that_make_no_sense_are_refused() {
    let (done, _folder) = run(
        &["--after", "1KiB", "--ring", "2MiB", "--first-ring", "16K", "--memory", "1GiB"],
        &[
            "sh",
            "-c",
            "echo $TOMBOLO_SOCKETS_AFTER $TOMBOLO_SOCKETS_RING $TOMBOLO_SOCKETS_FIRST_RING $TOMBOLO_SOCKETS_MEMORY",
        ],
    );
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "1024 2097152 16384 1073741824\n");
    for (option, size) in [("--ring", "24KiB"), ("--first-ring", "2048"), ("--ring", "2GiB"), ("--memory", "much")] {
        let (done, _folder) = run(&[option, size], &["true"]);
        let said = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.code() == Some(2) && said.contains(option), "{option} {size}: {said}");
    }
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
    // By its number, 425, and without parameters: a kernel that has the call returns EFAULT, or the error that it is
    // configured to return.
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

/// Two ends in this process that talk once for each line that is read, and print so; with `fork` they talk the second
/// time in a child.
const TALKS: &str = "
import os, socket, sys
listener = socket.create_server(('127.0.0.1', 0))
def talk():
    a = socket.create_connection(listener.getsockname())
    b, _ = listener.accept()
    for _ in range(100):
        for x, y in ((a, b), (b, a)):
            x.sendall(b'x' * 1000)
            left = 1000
            while left:
                left -= len(y.recv(left))
    a.close()
    b.close()
    print('talked', flush=True)
for line in sys.stdin:
    if line == 'fork\\n':
        if os.fork() == 0:
            talk()
            sys.stdout.flush()
            os._exit(0)
        os.wait()
    elif line == 'end\\n':
        sys.exit(int(sys.stdin.readline()))
    elif line == 'die\\n':
        os.kill(os.getpid(), 9)
    else:
        talk()
";

fn has_python() -> bool {
    let there = std::path::Path::new("/usr/bin/python3").is_file();
    if !there {
        let _ = writeln!(std::io::stderr(), "SKIP tombolo run with connections (needs python3): it is not installed");
    }
    there
}

/// Returns the program's result and output for these input lines.
fn talks(options: &[&str], steps: &str) -> (Output, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let mut tombolo = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    tombolo.arg("run").arg("--library").arg(library()).arg("--folder").arg(folder.path().join("meet"));
    tombolo.args(["--after", "0"]).args(options).args(["--", "/usr/bin/python3", "-c", TALKS]);
    let mut child = tombolo.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(steps.as_bytes()).unwrap();
    (child.wait_with_output().unwrap(), folder)
}

#[test]
fn summary_says_what_all_processes_connections_were_carried_by_and_the_end_is_the_programs() {
    if !has_python() {
        return;
    }
    let (done, _folder) = talks(&["--summary"], "talk\nfork\nend\n7\n");
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(7), "{said}");
    let lines: Vec<_> = said.lines().collect();
    assert!(lines[0].contains("4 connections joined, 0 not, in 2 processes"), "{said}");
    assert!(lines[1].contains("sent") && lines[1].contains("KiB through shared memory"), "{said}");
    assert_eq!(lines.len(), 3, "{said}");
    let (done, _folder) = talks(&["--summary", "--no-loopback"], "talk\n");
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.success() && said.contains("0 connections joined, 2 not, in 1 process"), "{said}");
    assert!(
        said.contains("2 on TCP: ") && said.contains("391 KiB over TCP") || said.contains("195 KiB over TCP"),
        "{said}"
    );
    let (done, _folder) = talks(&["--summary"], "talk\ndie\n");
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&done.status), Some(9), "{said}");
    assert!(said.contains("2 connections joined"), "{said}");
}

#[test]
fn summary_of_a_program_that_is_not_there_is_bad_usage() {
    let (done, _folder) = run(&["--summary"], &["/nowhere/program"]);
    assert_eq!(done.status.code(), Some(2));
    assert!(String::from_utf8(done.stderr).unwrap().contains("/nowhere/program"));
}

#[test]
fn signal_to_the_command_with_a_summary_is_the_programs() {
    let folder = tempfile::tempdir().unwrap();
    let mut tombolo = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    tombolo.arg("run").arg("--library").arg(library()).arg("--folder").arg(folder.path().join("meet"));
    let script = "trap 'echo heard; exit 5' TERM; echo ready; while :; do read line || :; done";
    tombolo.args(["--summary", "--", "bash", "-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = tombolo.stderr(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    out.read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    // Its shell handles the signal when the command that it waits for has ended.
    writeln!(child.stdin.as_mut().unwrap()).unwrap();
    let mut rest = String::new();
    out.read_line(&mut rest).unwrap();
    assert_eq!((rest.as_str(), child.wait().unwrap().code()), ("heard\n", Some(5)));
}

#[test]
fn ports_that_make_no_sense_are_bad_usage_and_good_ones_reach_the_library() {
    let (done, _folder) = run(&["--only", "80,http"], &["true"]);
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && said.contains("--only") && said.contains("\"http\""), "{said}");
    let (done, _folder) = run(&["--not", "9-1"], &["true"]);
    assert_eq!(done.status.code(), Some(2));
    let (done, _folder) = run(
        &["--only", "80,443", "--not", "8000-8080"],
        &["sh", "-c", "echo $TOMBOLO_SOCKETS_ONLY $TOMBOLO_SOCKETS_NOT"],
    );
    assert_eq!(String::from_utf8(done.stdout).unwrap(), "80,443 8000-8080\n");
}

#[test]
fn check_says_what_keeps_a_programs_connections_on_tcp() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let judge = |options: &[&str], program: &str| {
        let (done, _folder) = run(&[&["--check"][..], options].concat(), &[program]);
        let said = String::from_utf8([done.stdout, done.stderr].concat()).unwrap();
        (done.status.code(), said)
    };
    let (code, said) = judge(&[], "true");
    assert!(code == Some(0) && said.lines().count() == 3 && said.contains("can be preloaded"), "{said}");
    std::fs::write(at("script"), "#!/usr/bin/env sh\necho ran\n").unwrap();
    std::fs::set_permissions(at("script"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (code, said) = judge(&[], at("script").to_str().unwrap());
    assert!(code == Some(0) && said.contains("/sh: can be preloaded") && !said.contains("ran\n"), "{said}");
    std::fs::write(at("orphan"), "#!/nowhere/interpreter\n").unwrap();
    std::fs::set_permissions(at("orphan"), std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::copy("/bin/grep", at("rights")).unwrap();
    std::fs::set_permissions(at("rights"), std::fs::Permissions::from_mode(0o4755)).unwrap();
    std::fs::write(at("text"), "no program\n").unwrap();
    std::fs::write(at("c.c"), "int main(void) { return 0; }\n").unwrap();
    let cc = Command::new("cc").args(["-static", "-o"]).arg(at("static")).arg(at("c.c")).status().unwrap();
    assert!(cc.success());
    let shell = at("static");
    std::fs::write(at("by-static"), format!("#!{}\n", shell.display())).unwrap();
    std::fs::set_permissions(at("by-static"), std::fs::Permissions::from_mode(0o755)).unwrap();
    for (program, wanted, status) in [
        ("rights", "another user's rights", 1),
        ("static", "is linked statically", 1),
        ("by-static", "is linked statically", 1),
        ("orphan", "/nowhere/interpreter is not there", 2),
        ("text", "no file that can be executed", 2),
        ("missing", "missing", 2),
    ] {
        let (code, said) = judge(&[], at(program).to_str().unwrap());
        assert!(code == Some(status) && said.contains(wanted), "{program}: {code:?} {said}");
    }
    // A folder that is refused.
    std::fs::create_dir(at("open")).unwrap();
    std::fs::set_permissions(at("open"), std::fs::Permissions::from_mode(0o777)).unwrap();
    let mut tombolo = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    tombolo.args(["run", "--check", "--library"]).arg(library()).arg("--folder").arg(at("open"));
    let done = tombolo.args(["--", "true"]).output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert!(done.status.code() == Some(2) && said.contains("others may write to it"), "{said}");
}

#[test]
fn check_knows_programs_of_go_with_and_without_libc() {
    let Some(go) = env::split_paths(&env::var_os("PATH").unwrap()).map(|at| at.join("go")).find(|at| at.is_file())
    else {
        let _ = writeln!(std::io::stderr(), "SKIP check of Go's programs (needs go): it is not installed");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (name, cgo, text, wanted) in [
        ("plain", "0", "package main\nfunc main() {}\n", "Go program that is linked statically"),
        (
            "cgo",
            "1",
            "package main\n// int one(void) { return 1; }\nimport \"C\"\nfunc main() { C.one() }\n",
            "makes its system calls itself",
        ),
    ] {
        std::fs::write(at("main.go"), text).unwrap();
        let mut build = Command::new(&go);
        build.args(["build", "-o"]).arg(at(name)).arg(at("main.go")).current_dir(folder.path());
        build.env("CGO_ENABLED", cgo).env("GOFLAGS", "-mod=mod").env("GOTOOLCHAIN", "local");
        build.env("GOCACHE", at("cache")).env("GO111MODULE", "off");
        let built = build.output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let (done, _folder) = run(&["--check"], &[at(name).to_str().unwrap()]);
        let said = String::from_utf8(done.stderr).unwrap();
        assert!(done.status.code() == Some(1) && said.contains(wanted), "{name}: {said}");
    }
}

#[test]
fn process_that_is_switched_off_joins_no_more_until_it_is_switched_on() {
    if !has_python() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut tombolo = Command::new(env!("CARGO_BIN_EXE_tombolo"));
    tombolo.arg("run").arg("--library").arg(library()).arg("--folder").arg(folder.path().join("meet"));
    tombolo.arg("--log").arg(&log).args(["--after", "0", "--", "/usr/bin/python3", "-c", TALKS]);
    let mut child = tombolo.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut out = BufReader::new(child.stdout.take().unwrap());
    let pid = child.id().to_string();
    let switch = |option: &str, pid: &str| {
        let done = Command::new(env!("CARGO_BIN_EXE_tombolo")).args(["run", option, pid]).output().unwrap();
        (done.status.code(), String::from_utf8([done.stdout, done.stderr].concat()).unwrap())
    };
    let mut step = |words: &str| {
        writeln!(child.stdin.as_mut().unwrap(), "{words}").unwrap();
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "talked\n");
        std::fs::read_to_string(&log).unwrap_or_default().matches("joined").count()
    };
    assert_eq!(step("talk"), 2);
    let (code, said) = switch("--off", &pid);
    assert!(code == Some(0) && said.contains("joins no more connections"), "{said}");
    assert_eq!((step("talk"), step("fork")), (2, 2), "nor does a child");
    assert!(std::fs::read_to_string(&log).unwrap().contains("`tombolo run --off`"));
    let (code, said) = switch("--on", &pid);
    assert!(code == Some(0) && said.contains("joins connections again"), "{said}");
    assert_eq!((step("talk"), step("fork")), (4, 6));
    let (code, said) = switch("--on", &pid);
    assert!(code == Some(0) && said.contains("was not off"), "{said}");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    for (pid, wanted) in [(pid, "no such process"), (std::process::id().to_string(), "not started by `tombolo run`")] {
        let (code, said) = switch("--off", &pid);
        assert!(code == Some(2) && said.contains(wanted), "{said}");
    }
}
