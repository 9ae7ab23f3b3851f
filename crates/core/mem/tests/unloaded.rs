// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A library that contains this crate stays loaded once it handles `SIGBUS`, even if its program closes it.

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::SystemTime,
};

/// Maps memory that may be taken away, or memory that stays.
const LIBRARY: &str = r#"
use std::{fs::File, os::fd::AsFd};

#[no_mangle]
pub extern "C" fn map(revocable: i32) -> i32 {
    let Ok(file) = File::open(std::env::var_os("MEMORY").unwrap()) else { return 1 };
    let mapped = if revocable == 1 {
        tombolo_mem::PeerSegment::map_revocable(file.as_fd(), 0, 4096, ())
    } else {
        tombolo_mem::PeerSegment::map(file.as_fd(), 4096)
    };
    i32::from(mapped.is_err())
}
"#;

/// Prints what is left of the library. A thread that has used the library may keep it loaded, so that thread has ended
/// by then.
const PROGRAM: &str = r#"
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

static int (*map)(int);
static int revocable;

static void *run(void *failed) {
    *(int *)failed = map(revocable);
    return NULL;
}

int main(int count, char **words) {
    int failed = 1;
    pthread_t thread;
    void *library = dlopen(words[1], RTLD_NOW | RTLD_LOCAL);
    revocable = count == 3;
    if (!library || !(*(void **)&map = dlsym(library, "map")) || pthread_create(&thread, NULL, run, &failed)
        || pthread_join(thread, NULL) || failed || dlclose(library)) {
        fprintf(stderr, "it does not run: %s\n", dlerror());
        return 1;
    }
    puts(dlopen(words[1], RTLD_NOW | RTLD_NOLOAD) ? "loaded" : "unloaded");
    return 0;
}
"#;

/// Returns the crate as cargo built it for this test: the latest build.
fn built(deps: &Path) -> PathBuf {
    let is_it = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.starts_with("libtombolo_mem-") && name.ends_with(".rlib")
    };
    let made = |path: &PathBuf| fs::metadata(path).and_then(|found| found.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
    let all = fs::read_dir(deps).unwrap().map(|entry| entry.unwrap().path());
    all.filter(is_it).max_by_key(made).expect("cargo builds it before its tests")
}

fn compile(command: &mut Command, source: &str) {
    let mut compiler = command.stdin(Stdio::piped()).spawn().unwrap();
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    assert!(compiler.wait().unwrap().success(), "{command:?}");
}

#[test]
fn d3_library_that_handles_memory_taken_away_stays_loaded() {
    let quiet = Command::new("cc").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !quiet.is_ok_and(|status| status.success()) {
        let line = "SKIP d3_library_that_handles_memory_taken_away_stays_loaded (needs cc): it is not installed\n";
        std::io::stderr().write_all(line.as_bytes()).unwrap();
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let [library, program, memory] = ["library.so", "program", "memory"].map(|name| folder.path().join(name));
    fs::write(&memory, [0; 4096]).unwrap();
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let mut rustc = Command::new(std::env::var_os("RUSTC").unwrap_or("rustc".into()));
    rustc.args(["--edition", "2021", "--crate-type", "cdylib", "--crate-name", "library", "-o"]).arg(&library);
    rustc.arg("--extern").arg(format!("tombolo_mem={}", built(&deps).display()));
    compile(rustc.arg("-L").arg(format!("dependency={}", deps.display())).arg("-"), LIBRARY);
    let mut cc = Command::new("cc");
    compile(cc.arg("-o").arg(&program).args(["-x", "c", "-", "-ldl", "-pthread"]), PROGRAM);
    let left = |words: &[&str]| {
        let output = Command::new(&program).arg(&library).args(words).env("MEMORY", &memory).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(left(&[]), "unloaded\n", "nothing keeps it there otherwise");
    assert_eq!(left(&["revocable"]), "loaded\n");
}
