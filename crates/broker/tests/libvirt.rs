// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The scripts for libvirt, with a virsh and a tombolo that only record their arguments.

use std::{
    fs,
    io::Write,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

fn script(name: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/libvirt")).join(name)
}

/// Makes a program that records its arguments and ends with this code.
fn fake(folder: &Path, name: &str, code: i32) {
    let path = folder.join(name);
    let text = format!("#!/bin/sh\necho {name} \"$@\" >> {}/said\nexit {code}\n", folder.display());
    // This process must not have the file open for writing when it is executed.
    let written =
        Command::new("sh").args(["-c", "cat > \"$0\" && chmod +x \"$0\""]).arg(&path).stdin(Stdio::piped()).spawn();
    let mut written = written.unwrap();
    written.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    assert!(written.wait().unwrap().success());
}

/// Returns the commands that were run, and the script's exit code, for `words` where tombolo ends with one code and
/// virsh with another.
fn called(words: &str, tombolo: i32, virsh: i32) -> (Vec<String>, i32) {
    let folder = tempfile::tempdir().unwrap();
    fake(folder.path(), "tombolo", tombolo);
    fake(folder.path(), "virsh", virsh);
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    let status = Command::new(script("tombolo-virsh.sh")).args(words.split(' ')).env("PATH", path).status().unwrap();
    let said = fs::read_to_string(folder.path().join("said")).unwrap_or_default();
    (said.lines().map(String::from).collect(), status.code().unwrap())
}

#[test]
fn b26_virsh_migrates_saves_and_has_snapshots_of_machines_that_are_ready() {
    let prepared = |name: &str| format!("tombolo vm prepare-migration {name}");
    let back = |name: &str| format!("tombolo vm cancel-migration {name}");
    for words in ["migrate --live web qemu+ssh://other/system", "save web /tmp/web", "managedsave --domain web"] {
        assert_eq!(called(words, 0, 0), (vec![prepared("web"), format!("virsh {words}")], 0));
        // On a failure the machine stays here.
        assert_eq!(called(words, 0, 1), (vec![prepared("web"), format!("virsh {words}"), back("web")], 1));
        // The machine was ready already; it is not there; it cannot be made ready.
        assert_eq!(called(words, 7, 0).1, 0);
        assert_eq!(called(words, 3, 0), (vec![prepared("web"), format!("virsh {words}")], 0));
        assert_eq!(called(words, 4, 0), (vec![prepared("web")], 4));
    }
    let words = "snapshot-create-as --domain=db now";
    assert_eq!(called(words, 0, 0), (vec![prepared("db"), format!("virsh {words}"), back("db")], 0));
    assert_eq!(called("list --all", 0, 0), (vec!["virsh list --all".into()], 0));
    assert_eq!(called("migrate --live", 0, 0), (vec![], 2));
}

#[test]
fn b27_hook_takes_the_doorbell_out_of_what_arrives_and_nothing_else() {
    let described = "<domain>\n  <devices>\n    <shmem name='tombolo'>\n      <model type='ivshmem-doorbell'/>\n    </shmem>\n    \
                     <shmem name='other'>\n    </shmem>\n  </devices>\n</domain>\n";
    let hook = |operation: &[&str]| {
        let mut hook = Command::new(script("qemu-hook.sh"));
        let piped = hook.arg("web").args(operation).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.spawn().unwrap();
        // A hook that has nothing to change reads no input.
        let _ = child.stdin.take().unwrap().write_all(described.as_bytes());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    for operation in ["migrate", "restore"] {
        let left = hook(&[operation, "begin", "-"]);
        assert!(!left.contains("tombolo") && !left.contains("ivshmem-doorbell"), "{left}");
        assert!(left.contains("<shmem name='other'>\n    </shmem>\n  </devices>\n</domain>\n"), "{left}");
    }
    assert_eq!(hook(&["start", "begin", "-"]), "");
    for name in ["tombolo-virsh.sh", "qemu-hook.sh"] {
        assert!(fs::metadata(script(name)).unwrap().permissions().mode() & 0o111 == 0o111, "{name}");
    }
}
