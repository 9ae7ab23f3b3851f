// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo link` against a broker, which runs in threads of this process and ends with it.

use std::{
    io::Write,
    path::Path,
    process::{Command, Output},
    thread,
};

use tombolo_broker::host::{descriptor_store, qemu::ASK_AGAIN, run};

const CONFIG: &str = r#"
[domain.web]
[domain.db]
machine = "q35"
ports = 2
[[allow]]
from = "web"
to = "db"
service = "sql"
"#;

/// Starts a broker in a folder of its own.
fn broker() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (path, config) = (folder.path().to_owned(), folder.path().join("tombolod.toml"));
    std::fs::write(&config, CONFIG).unwrap();
    let place = path.clone();
    thread::spawn(move || descriptor_store::serve(&place).unwrap());
    while !path.join("holder.socket").exists() {
        thread::yield_now();
    }
    let place = path.clone();
    thread::spawn(move || run::run(&config, &place, false, ASK_AGAIN).map_err(|error| error.to_string()).unwrap());
    while link(&path, "ls").0 == 2 {
        thread::yield_now();
    }
    folder
}

fn link(folder: &Path, words: &str) -> (i32, String, String) {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_tombolo"))
        .arg("link")
        .args(words.split(' '))
        .arg("--broker")
        .arg(folder.join("tombolod.socket"))
        .output()
        .unwrap();
    (status.code().unwrap(), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn links_are_added_shown_and_removed() {
    let broker = broker();
    let link = |words: &str| link(broker.path(), words);
    let (code, out, err) = link("add web db --size 64KiB");
    assert_eq!((code, out.as_str()), (0, ""), "{err}");
    assert_eq!(err, "tombolo: the link waits until both web and db run\n");
    let (code, out, err) = link("ls");
    assert_eq!((code, err.as_str()), (0, ""));
    let lines: Vec<Vec<&str>> = out.lines().map(|line| line.split_whitespace().collect()).collect();
    let heads = ["LINK", "A", "B", "SIZE", "GEN", "STATE", "DOORBELLS", "CHANNELS", "USED", "STORMS", "KEPT", "NOTE"];
    assert_eq!(lines[0], heads);
    let cells = ["web", "db", "64.0", "KiB", "0", "waiting", "-/-", "0/0", "0", "B/0", "B", "0/0", "-"];
    assert_eq!(lines[1][1..], cells);
    let (_, out, _) = link("ls --json");
    let row: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(
        (row["a"].as_str(), row["state"].as_str(), row["size"].as_u64()),
        (Some("web"), Some("waiting"), Some(65536))
    );
    let ends: Vec<_> = row["ends"].as_array().unwrap().iter().map(|end| (&end["domain"], &end["stage"])).collect();
    assert_eq!(serde_json::json!(ends), serde_json::json!([["web", "absent"], ["db", "absent"]]));
    let (_, out, _) = link("ls --domains");
    assert!(out.contains("db      gone     2/2") && out.contains("host    running  -"), "{out}");
    assert_eq!(link("rm db web").0, 0);
    assert_eq!(link("ls --json").1, "");
}

#[test]
fn commands_of_the_guide_are_understood() {
    let guide = include_str!("../../../docs/guide/broker.md");
    let commands = guide.lines().filter(|line| line.starts_with("tombolo "));
    let mut count = 0;
    for line in commands {
        let line = line.split(['#', '<', '>']).next().unwrap_or_default();
        let words: Vec<&str> = line.split_whitespace().skip(1).collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tombolo"));
        command.args(&words).env("TOMBOLO_BROKER", "/nowhere").stdin(std::process::Stdio::null());
        if words[0] == "link" {
            command.args(["--broker", "/nowhere"]);
        }
        let said = String::from_utf8(command.output().unwrap().stderr).unwrap();
        assert!(said.contains("/nowhere"), "{line}: {said}");
        count += 1;
    }
    assert!(count >= 7, "{count} commands");
}

#[test]
fn what_the_broker_refuses_is_told_with_its_remedy() {
    let broker = broker();
    let (code, out, err) = link(broker.path(), "add web web");
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.starts_with("tombolo: no rule allows web and web anything: add an [[allow]] to "), "{err}");
    let (code, _, err) = link(broker.path(), "add web we/b");
    assert!(code == 2 && err.contains("a name is 1 to 64 letters"), "{err}");
    let (code, _, err) = link(Path::new("/nowhere"), "ls");
    assert_eq!(code, 2);
    assert!(
        err.starts_with(
            "tombolo: cannot open /nowhere/tombolod.socket (is tombolod running, and may you use it?): No such"
        ),
        "{err}"
    );
}

#[test]
fn snippets_are_what_qemu_and_libvirt_read() {
    let broker = broker();
    let (code, out, _) = link(broker.path(), "snippet db");
    assert_eq!((code, out.lines().count()), (0, 5));
    assert!(out.contains("-device ivshmem-doorbell,") && out.contains("pcie-root-port,id=tombolo-p-1"), "{out}");
    let (_, out, _) = link(broker.path(), "snippet web --libvirt");
    assert!(out.contains("<model type='ivshmem-doorbell'/>") && out.contains("<qemu:commandline>"), "{out}");
}

const SCHEMA: &str = "/usr/share/libvirt/schemas/domain.rng";

/// Returns the objections of libvirt's schema to a domain with a snippet; `None` if there is no schema here, or no
/// program that reads it.
fn schemas_verdict(devices: &str, rest: &str) -> Option<Result<(), String>> {
    let xml = format!(
        "<domain type='kvm' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'><name>web</name><memory>65536</memory>\
         <os><type arch='x86_64' machine='pc-q35-7.2'>hvm</type></os><devices>{devices}</devices>{rest}</domain>"
    );
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("domain.xml");
    std::fs::write(&file, xml).unwrap();
    let reader = Command::new("xmllint").args(["--noout", "--relaxng", SCHEMA]).arg(file).output();
    let Output { status, stderr, .. } = reader.ok().filter(|_| Path::new(SCHEMA).exists())?;
    Some(if status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&stderr).into_owned()) })
}

#[test]
fn snippet_is_what_libvirts_schema_allows() {
    let test = "snippet_is_what_libvirts_schema_allows";
    let broker = broker();
    for domain in ["web", "db"] {
        let (code, out, err) = link(broker.path(), &format!("snippet {domain} --libvirt"));
        assert_eq!(code, 0, "{err}");
        let (devices, rest) = out.split_at(out.find("<!-- this goes").unwrap());
        let Some(verdict) = schemas_verdict(devices, rest) else {
            let why = format!("no {SCHEMA} or no xmllint: `apt install libvirt0 libxml2-utils`");
            let _ = writeln!(std::io::stderr(), "SKIP {test} (needs libvirt): {why}");
            return;
        };
        assert_eq!(verdict, Ok(()), "{out}");
        let canary = schemas_verdict(&devices.replace("ivshmem-doorbell", "ivshmem-doorball"), rest);
        assert!(canary.is_some_and(|verdict| verdict.is_err()), "the schema allows anything");
    }
}
