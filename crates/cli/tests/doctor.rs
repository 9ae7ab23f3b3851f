// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo doctor`, on this machine and on one with faults.

mod common;

use std::fs;

use common::{Place, Running};
use serde_json::Value;

/// Returns the findings and the exit code, with this folder of services.
fn doctor(folder: &str) -> (Vec<Value>, Option<i32>, String) {
    let ended = Running::start(&["doctor", "--json"], |command| _ = command.env("TOMBOLO_DIR", folder)).end();
    let lines = String::from_utf8(ended.out).unwrap();
    let findings = lines.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    (findings, ended.status.code(), ended.said)
}

#[test]
fn machine_that_runs_these_tests_is_well() {
    let place = Place::new();
    let (findings, code, said) = doctor(place.path("").to_str().unwrap());
    assert_eq!(code, Some(0), "{said}");
    assert!(findings.len() >= 15 && findings.iter().all(|finding| finding["type"] == "finding"), "{findings:?}");
    for finding in &findings {
        let bad = finding["grade"] == "warning" || finding["grade"] == "failure";
        assert_eq!(finding["remedy"].is_string(), bad, "{finding}");
    }
    let grade = |check: &str| findings.iter().find(|finding| finding["check"] == check).unwrap()["grade"].clone();
    for check in ["kernel", "proc", "memfd", "eventfd", "folder", "channel"] {
        assert_eq!(grade(check), "ok", "{check}");
    }
    assert!(fs::read_dir(place.path("")).unwrap().next().is_none(), "nothing is left behind");
}

#[test]
fn canary_folder_that_cannot_be_is_a_failure_with_a_remedy() {
    let place = Place::new();
    let (findings, code, said) = doctor(place.path("missing/too").to_str().unwrap());
    assert_eq!(code, Some(1));
    assert!(said.contains("channels do not work here: see folder"), "{said}");
    let folder = findings.iter().find(|finding| finding["check"] == "folder").unwrap();
    assert!(folder["grade"] == "failure" && folder["remedy"].as_str().unwrap().contains("TOMBOLO_DIR"), "{folder}");
}

#[test]
fn text_has_a_line_for_each_finding() {
    let text = String::from_utf8(Running::start(&["doctor"], |_| {}).end().out).unwrap();
    assert!(["kernel", "membarrier", "files", "cpus", "xen"].iter().all(|check| text.contains(check)), "{text}");
    Running::start(&["doctor", "--nonsense"], |_| {}).end().expect(2);
}
