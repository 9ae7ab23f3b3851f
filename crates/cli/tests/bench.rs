// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo bench` as a verb; its measurements are tested in its own crate.

mod common;

use std::fs;

use common::{Place, Running};

#[test]
fn bench_with_json_prints_lines_and_its_report_is_made_of_them() {
    let place = Place::new();
    let words = "bench --test latency --transport pipe --size 64 --wait sleep --seconds 0.01 --runs 2 --json";
    let ended = Running::start(&words.split(' ').collect::<Vec<_>>(), |_| {}).end().expect(0);
    let lines = String::from_utf8(ended.out).unwrap();
    assert!(lines.starts_with(r#"{"test":"latency","transport":"pipe""#) && lines.lines().count() == 1, "{lines}");

    fs::write(place.path("lines.jsonl"), lines).unwrap();
    let (report, file) = (place.path("report").display().to_string(), place.path("lines.jsonl").display().to_string());
    let ended = Running::start(&["bench", "--report", &report, "--from", &file], |_| {}).end().expect(0);
    assert_eq!(String::from_utf8(ended.out).unwrap(), format!("{report}/index.html\n"));
    assert!(fs::read_to_string(place.path("report/index.html")).unwrap().contains("Round trip, sleeping"));
}

#[test]
fn bench_that_makes_no_sense_is_refused_in_one_line() {
    let place = Place::new();
    let (report, missing) = (place.path("report").display().to_string(), place.path("missing").display().to_string());
    let words = ["bench", "--report", &report, "--from", &missing];
    Running::start(&words, |_| {}).end().expect_failure(2, &["cannot read", "missing"]);
    Running::start(&["bench", "--transport", "pigeon"], |_| {})
        .end()
        .expect_failure(2, &["no transport \"pigeon\"; there are tombolo, tcp,"]);
    assert!(!place.path("report").exists());
}
