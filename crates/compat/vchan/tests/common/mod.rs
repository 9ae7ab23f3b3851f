// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The library for tests, C programs built with it, and the map by which they find each other.
#![allow(dead_code, reason = "each test program uses its part of this")]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Output, Stdio},
    sync::OnceLock,
};

pub const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../..");
const TMP: &str = env!("CARGO_TARGET_TMPDIR");
/// System libraries that a Rust library is linked with.
const SYSTEM: [&str; 7] = ["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// Runs a command to its end; its output is shown if it fails.
pub fn must(command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
    let (out, said) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    assert!(status.success(), "{command:?}: {status}\n{out}\n{said}");
    out.into_owned()
}

/// Reports that a test cannot run here, and where it can.
pub fn skip(test: &str, need: &str, why: &str) {
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

/// Returns whether the C compiler has AddressSanitizer; if not, the test is skipped.
pub fn has_sanitizers(test: &str) -> bool {
    let mut compile = Command::new("sh");
    compile.args(["-c", "echo 'int main(void){}' | cc -fsanitize=address,undefined -x c -o /dev/null -"]);
    let there = compile.stderr(Stdio::null()).status().is_ok_and(|status| status.success());
    if !there {
        skip(test, "asan", "cc has no AddressSanitizer here (package libasan8 or its like)");
    }
    there
}

/// Returns the archive, which contains the harsh double.
fn archive() -> &'static Path {
    static ARCHIVE: OnceLock<PathBuf> = OnceLock::new();
    ARCHIVE.get_or_init(|| {
        // Beside the tests, so that their common parts are built once.
        let target = Path::new(TMP).parent().unwrap();
        let mut build = Command::new(env!("CARGO"));
        build.current_dir(ROOT).args(["build", "--quiet", "--profile", "test"]);
        build.args(["--package", "tombolo-vchan", "--features", "testing"]);
        // Variables that cargo sets for a test must not reach this cargo.
        build.arg("--target-dir").arg(target).env_remove("RUSTFLAGS").env_remove("CARGO_TARGET_DIR");
        must(&mut build);
        target.join("debug/libtombolo_vchan.a")
    })
}

/// A way to build and to run C programs.
pub struct Kit {
    pub name: &'static str,
    pub flags: &'static str,
    /// Command that runs them.
    pub under: &'static [&'static str],
}

pub const PLAIN: Kit = Kit { name: "plain", flags: "-O2 -g", under: &[] };
pub const SANITIZED: Kit = Kit {
    name: "sanitized",
    flags: "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all",
    under: &[],
};

impl Kit {
    /// Builds a program of `tests/c` for one test.
    pub fn program(&self, source: &str, test: &str) -> PathBuf {
        let folder = Path::new(TMP).join("vchan-programs").join(self.name);
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join(test);
        let (compiler, standard) = if source.ends_with(".cc") { ("c++", "-std=c++17") } else { ("cc", "-std=c11") };
        let mut compile = Command::new(compiler);
        compile.args(["-Wall", "-Wextra", "-Werror", "-pedantic", standard, "-D_DEFAULT_SOURCE", "-pthread"]);
        compile.args(self.flags.split(' ')).arg("-I").arg(Path::new(ROOT).join("include/vchan")).arg("-o").arg(&path);
        compile.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(source)).arg(archive()).args(SYSTEM);
        must(&mut compile);
        path
    }

    /// Returns a command that starts a program in the world of `map`.
    pub fn command(&self, program: &Path, map: &Map) -> Command {
        let line: Vec<&str> = self.under.iter().copied().chain([program.to_str().unwrap()]).collect();
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).env("TOMBOLO_VCHAN_CONF", map.0.path().join("vchan.conf"));
        command.env_remove("TOMBOLO_VCHAN_SELF");
        command
    }
}

/// A folder with a map in it.
pub struct Map(pub tempfile::TempDir);

impl Map {
    /// Makes a map for processes of this kernel.
    pub fn local() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = format!("self 1\ndomain 1 local:{}\n", folder.path().display());
        fs::write(folder.path().join("vchan.conf"), text).unwrap();
        Self(folder)
    }

    /// Makes a map for two domains within one process.
    pub fn harsh() -> Self {
        Self::within("self 1\ndomain 1 harsh:\n")
    }

    /// As `harsh`, under a Xen in the process and by the layout of the original.
    pub fn original() -> Self {
        Self::within("domain 1 fake-xen:\n")
    }

    fn within(text: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("vchan.conf"), text).unwrap();
        Self(folder)
    }

    /// Returns the files in the folder besides the map; none may be left there.
    pub fn left(&self) -> Vec<String> {
        let names = fs::read_dir(self.0.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name != "vchan.conf").collect()
    }
}

/// A program whose output is read line by line. It is killed when dropped.
pub struct Running {
    pub child: Child,
    lines: BufReader<ChildStdout>,
}

impl Running {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines }
    }

    /// Returns the next line that it prints.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        if line.is_empty() {
            let mut said = String::new();
            self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
            panic!("it says nothing more: {said}");
        }
        line.trim_end().into()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
