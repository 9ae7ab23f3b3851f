// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Runs CPython's own networking tests, with the library and without: each test gives the same result.

mod place;

use std::{
    fs,
    io::Write,
    process::{Command, Stdio},
};

use place::{
    Place,
    suite::{self, Results, Use, at_length},
};

/// A test that differs at times: it requires that a peer closes in the middle of a `sendfile`. The guide states this.
const DIFFER: &str = "*sendfile_close_peer_in_the_middle_of_receiving";

fn python() -> Command {
    Command::new("/usr/bin/python3")
}

/// Returns whether a suite is installed; if not, reports that it is skipped.
fn has(suite: &str) -> bool {
    let import = python().args(["-c", &format!("import test.{suite}")]).stderr(Stdio::null()).status();
    let there = import.is_ok_and(|status| status.success());
    if !there {
        let _ = writeln!(std::io::stderr(), "SKIP {suite} (needs libpython3.11-testsuite): it is not installed");
    }
    there
}

/// Runs a suite. Returns the result of each test by its name.
fn run(place: &Place, suite: &str, dress: bool) -> Results {
    let name = if dress { "with" } else { "plain" };
    let (folder, table) = (place.path(&format!("in-{name}")), place.path(&format!("{name}.xml")));
    fs::create_dir(&folder).unwrap();
    let mut command = python();
    // Tests of VSOCK sockets hang, with the library or without.
    command.args(["-m", "test", "-u", "network", "-i", "*VSOCK*"]);
    command.args(["-i", DIFFER, "--junit-xml"]).arg(&table).arg(suite);
    if dress {
        place.dress(command.env("TOMBOLO_SOCKETS_AFTER", "0"));
    }
    suite::run(command.current_dir(folder), &place.path(name));
    place.assert_tidy();
    results(&fs::read_to_string(table).unwrap())
}

/// Returns the result of each test from the table that the suites write: the contents of its element, without the
/// times.
fn results(table: &str) -> Results {
    let cases = table.split("<testcase ").skip(1);
    let result = |case: &str| {
        let (start, inside) = case.split_once('>').unwrap();
        let name = start.split('"').nth(1).unwrap();
        let tags = inside.split('<').skip(1).filter_map(|tag| tag.split([' ', '>', '/']).find(|word| !word.is_empty()));
        let words = ["skipped", "failure", "error"];
        let word = words.into_iter().find(|word| tags.clone().any(|tag| tag == *word));
        (name.to_owned(), word.unwrap_or("ok").to_owned())
    };
    cases.map(result).collect()
}

fn always(_: &str) -> bool {
    true
}

macro_rules! suites {
    ($($when:ident $test:ident, $suite:literal, $ends:literal, $percent:literal;)*) => {
        $(#[test]
        fn $test() {
            if $when(stringify!($test)) && has($suite) {
                let wanted = Use { ends: $ends, percent: $percent };
                suite::same($suite, wanted, |place, dress| run(place, $suite, dress));
            }
        })*
    };
}

suites! {
    always cpythons_test_asyncore_is_the_same, "test_asyncore", 0, 0;
    always cpythons_test_epoll_is_the_same, "test_epoll", 0, 0;
    always cpythons_test_ftplib_is_the_same, "test_ftplib", 100, 15;
    always cpythons_test_httpservers_is_the_same, "test_httpservers", 0, 0;
    always cpythons_test_poll_is_the_same, "test_poll", 0, 0;
    always cpythons_test_select_is_the_same, "test_select", 0, 0;
    always cpythons_test_smtplib_is_the_same, "test_smtplib", 40, 5;
    // Nearly all its bytes go in one call: whether the endpoints join before or during it is random.
    always cpythons_test_socketserver_is_the_same, "test_socketserver", 2, 0;
    at_length cpythons_test_asyncio_is_the_same, "test_asyncio", 2, 20;
    at_length cpythons_test_selectors_is_the_same, "test_selectors", 0, 0;
    at_length cpythons_test_socket_is_the_same, "test_socket", 2, 10;
    at_length cpythons_test_ssl_is_the_same, "test_ssl", 2, 5;
}

#[test]
fn canary_library_that_does_nothing_joins_no_ends() {
    let test = "canary_library_that_does_nothing_joins_no_ends";
    if has("test_socketserver") && place::has(test, &["cc"]) {
        let place = Place::idle();
        assert!(run(&place, "test_socketserver", true).len() > 3);
        assert!(!Use::of(&place).is_at_least(Use { ends: 2, percent: 0 }));
    }
}

#[test]
fn canary_result_that_differs_is_seen() {
    let table = |second: &str| {
        let case = |name, inside| format!("<testcase name=\"{name}\" status=\"run\" time=\"0.1\"{inside}");
        results(&format!("<testsuites><testsuite>{}{}</testsuite>", case("a", " />"), case("b", second)))
    };
    let plain = table(" />");
    assert_eq!(plain.len(), 2);
    assert_eq!(plain, table("><system-out>error</system-out></testcase>"));
    for inside in ["><failure>no</failure>", "><skipped>no</skipped>", "><error message=\"x\">no</error>"] {
        assert_ne!(plain, table(&format!("{inside}</testcase>")), "{inside}");
    }
}
