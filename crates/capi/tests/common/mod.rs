// SPDX-License-Identifier: Apache-2.0 OR MIT
//! An installed libtombolo, C programs built against it as a user would build them, and the examples run in pairs.
#![allow(dead_code, reason = "each test program uses its part of this")]

pub mod pairs;

use std::{
    fs,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex, OnceLock},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};

/// Longer than any program here takes, under any checker.
const LIMIT: Duration = Duration::from_secs(120);
const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
const TMP: &str = env!("CARGO_TARGET_TMPDIR");

/// Returns the folder where this test program installs, once: by a complete `make install`.
pub fn prefix() -> &'static Path {
    static PREFIX: OnceLock<PathBuf> = OnceLock::new();
    PREFIX.get_or_init(|| {
        let prefix = Path::new(TMP).join(concat!(env!("CARGO_CRATE_NAME"), "-prefix"));
        let _ = fs::remove_dir_all(&prefix);
        let mut make = Command::new("make");
        make.current_dir(ROOT).arg("install").arg(format!("PREFIX={}", prefix.display()));
        // Settings that cargo makes for a test must not reach the cargo that builds the library.
        make.env_remove("CARGO_TARGET_DIR").env_remove("RUSTFLAGS").env_remove("DESTDIR");
        must(&mut make);
        prefix
    })
}

/// Runs a command to its end; its output is shown if it fails.
pub fn must(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
    let (out, said) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{out}\n{said}");
    out.into_owned()
}

/// Returns the output of pkg-config for the installed library.
pub fn pkg_config(words: &str) -> Vec<String> {
    let mut command = Command::new("pkg-config");
    command.args(words.split(' ')).arg("tombolo").env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig"));
    must(&mut command).split_whitespace().map(String::from).collect()
}

/// Reports that a test cannot run here, and where it can.
pub fn skip(test: &str, need: &str, why: &str) {
    // In one piece: the runner reads the line between those of other tests.
    let line = format!("SKIP {test} (needs {need}): {why}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Returns whether a program can be run; if not, the test is skipped.
pub fn has(test: &str, program: &str) -> bool {
    let quiet = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    let there = quiet.is_ok_and(|status| status.success());
    if !there {
        skip(test, program, "it is not installed: `make install-deps`");
    }
    there
}

/// A way to build and to run C programs.
pub struct Kit {
    name: &'static str,
    flags: &'static str,
    /// Command that runs the programs, with its options.
    under: &'static [&'static str],
    /// Number of bytes that the long programs move.
    pub bytes: usize,
    /// Folder of the examples, once they are built.
    examples: OnceLock<PathBuf>,
}

pub static PLAIN: Kit =
    Kit { name: "plain", flags: "-O2 -g", under: &[], bytes: 20_000_000, examples: OnceLock::new() };
pub static SANITIZED: Kit = Kit {
    name: "sanitized",
    flags: "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
    under: &[],
    bytes: 5_000_000,
    examples: OnceLock::new(),
};
pub static VALGRIND: Kit = Kit {
    name: "valgrind",
    flags: "-O1 -g",
    // "Possibly lost" memory is reached only by a pointer into its middle, as Rust's reference counts are.
    under: &[
        "valgrind",
        "--quiet",
        "--error-exitcode=99",
        "--leak-check=full",
        "--show-leak-kinds=definite,indirect",
        "--errors-for-leak-kinds=definite,indirect",
    ],
    bytes: 300_000,
    examples: OnceLock::new(),
};

impl Kit {
    fn folder(&self) -> PathBuf {
        let folder = Path::new(TMP).join(concat!(env!("CARGO_CRATE_NAME"), "-programs")).join(self.name);
        fs::create_dir_all(&folder).unwrap();
        folder
    }

    /// Returns the folder of the examples, built once with their own Makefile.
    pub fn examples(&self) -> &Path {
        self.examples.get_or_init(|| {
            let folder = self.folder();
            let mut make = Command::new("make");
            make.current_dir(Path::new(ROOT).join("examples/c")).arg("--always-make");
            make.arg(format!("OUT={}", folder.display())).env("CFLAGS", self.flags);
            must(make.env("PKG_CONFIG_PATH", prefix().join("lib/pkgconfig")));
            folder
        })
    }

    /// Builds a program of `tests/c`; each is built by one test only.
    pub fn program(&self, source: &str) -> PathBuf {
        let path = self.folder().join(source.split('.').next().unwrap());
        let (compiler, standard) = if source.ends_with(".cc") { ("c++", "-std=c++17") } else { ("cc", "-std=c11") };
        let mut compile = Command::new(compiler);
        compile.args(["-Wall", "-Wextra", "-Werror", "-pedantic", standard, "-D_DEFAULT_SOURCE", "-pthread"]);
        compile.args(self.flags.split(' ')).arg("-o").arg(&path);
        compile.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source));
        compile.args(pkg_config("--cflags --libs")).arg(format!("-Wl,-rpath,{}/lib", prefix().display()));
        must(&mut compile);
        path
    }

    /// Starts a program.
    pub fn start(&self, program: &Path, words: &[&str]) -> Running {
        let line: Vec<&str> = self.under.iter().copied().chain([program.to_str().unwrap()]).collect();
        Running::start(&line, words)
    }

    /// Runs a program that must succeed.
    pub fn run(&self, program: &Path, words: &[&str]) -> String {
        self.start(program, words).succeeds()
    }
}

/// A folder with an address in it.
pub struct Place(tempfile::TempDir);

impl Place {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn address(&self) -> String {
        format!("local:{}", self.path("socket").display())
    }
}

/// Waits for a condition without a notification, by polling.
pub fn wait_until(what: &str, mut there: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !there() {
        assert!(Instant::now() < deadline, "{what}: not within {LIMIT:?}");
        thread::park_timeout(Duration::from_millis(2));
    }
}

/// A program with pipes to all three of its streams. It is killed when dropped.
pub struct Running {
    pub child: Child,
    out: Heard,
    said: Heard,
}

/// Output of a pipe, taken by a thread so that the program need not wait for the test.
struct Heard(Arc<Mutex<Vec<u8>>>, JoinHandle<()>);

impl Heard {
    fn new(mut pipe: impl Read + Send + 'static) -> Self {
        let bytes = Arc::new(Mutex::new(Vec::new()));
        let heard = Arc::clone(&bytes);
        let gather = move || {
            let mut part = [0; 4096];
            while let Ok(len @ 1..) = pipe.read(&mut part) {
                heard.lock().unwrap().extend_from_slice(&part[..len]);
            }
        };
        Self(bytes, thread::spawn(gather))
    }

    fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }
}

impl Running {
    fn start(line: &[&str], words: &[&str]) -> Self {
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).args(words);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (out, said) = (Heard::new(child.stdout.take().unwrap()), Heard::new(child.stderr.take().unwrap()));
        Self { child, out, said }
    }

    /// Waits until it has written a line to standard output.
    pub fn tells(&self, line: &str) {
        wait_until(line, || self.out.text().lines().any(|found| found == line));
    }

    /// Writes to its standard input.
    pub fn feed(&mut self, bytes: &[u8]) {
        self.child.stdin.as_mut().unwrap().write_all(bytes).unwrap();
    }

    /// Closes its standard input.
    pub fn hush(&mut self) {
        drop(self.child.stdin.take());
    }

    pub fn kill(&self) {
        kill_process(Pid::from_child(&self.child), Signal::KILL).unwrap();
    }

    /// Waits for the end of the program. Returns exit code, standard output and standard error.
    pub fn ends(mut self) -> (Option<i32>, String, String) {
        let mut status = None;
        wait_until("the program ends", || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        wait_until("its pipes are closed", || self.out.1.is_finished() && self.said.1.is_finished());
        // Valgrind prints this where it does not know a call of the kernel, which then fails for the program.
        let own = format!("--{}--", self.child.id());
        let said = self
            .said
            .text()
            .lines()
            .filter(|line| !line.starts_with(&own))
            .map(|line| line.to_owned() + "\n")
            .collect();
        (status.unwrap().code(), self.out.text(), said)
    }

    /// Waits for the end of the program, which must be successful. Returns its standard output.
    pub fn succeeds(self) -> String {
        let (code, out, said) = self.ends();
        assert_eq!(code, Some(0), "{said}");
        out
    }

    /// Waits for the end of the program, which must fail with one line of text. Returns that line.
    pub fn fails(self, code: i32) -> String {
        let (found, _, said) = self.ends();
        assert_eq!(found, Some(code), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        said.trim_end().to_owned()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
