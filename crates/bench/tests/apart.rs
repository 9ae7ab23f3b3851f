// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two sides that share nothing but a network: here both are on one machine, and do not know it.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::process::Child;

use common::{Place, text};
use tombolo_bench::Measurement;

/// The right side, killed at the end of the test.
struct Right(Child);

impl Drop for Right {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a right side in a place. Returns it with its address.
fn serve(place: &Place, options: &str) -> (Right, String) {
    let mut child = place.start(&format!("--serve 127.0.0.1:0 {options}"));
    let stderr = child.stderr.take().unwrap();
    let right = Right(child);
    let said = BufReader::new(stderr).lines().map_while(Result::ok).find(|line| line.starts_with("serving at "));
    (right, said.unwrap().trim_start_matches("serving at ").to_owned())
}

#[test]
fn two_machines_measure_what_goes_between_machines_and_nothing_else() {
    let place = Place::new("apart");
    let via = format!("--via local:{}", place.0.display());
    let (right, address) = serve(&place, &via);
    // Twice: after a driver has gone the right side must serve the next.
    for _ in 0..2 {
        let tests = "--test throughput,latency,load,switches,setup,cpu,memory";
        let output = place.run(&format!(
            "--peer {address} {via} {tests} --size 64 --seconds 0.02 --runs 1 --volume 1MiB --ring 64KiB --json"
        ));
        assert!(output.status.success(), "{}", text(&output.stderr));
        let all: Vec<Measurement> =
            text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let count = |transport: &str, test: &str| {
            all.iter().filter(|m| m.transport == transport && m.test.name() == test).count()
        };
        // As a stream and as messages; spinning and sleeping.
        assert_eq!((count("tombolo", "throughput"), count("tombolo", "latency"), count("tcp", "latency")), (2, 4, 2));
        assert_eq!((count("tombolo", "switches"), count("tcp", "setup"), count("tombolo", "load")), (2, 1, 0));
        assert!(all.iter().all(|m| ["tombolo", "tcp"].contains(&m.transport.as_str())), "{all:?}");
        assert!(all.iter().all(|m| m.median > 0.0 || m.test.name() == "switches"), "{all:?}");
    }
    drop(right);
}

#[test]
fn two_machines_with_no_channels_between_them_measure_tcp_and_say_what_is_skipped() {
    let place = Place::new("apart-tcp");
    let (_right, address) = serve(&place, "");
    let output = place.run(&format!("--peer {address} --test latency --size 64 --seconds 0.02 --runs 1 --json"));
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("\"tcp\"") && !text(&output.stdout).contains("\"tombolo\""));
    assert!(text(&output.stderr).contains("SKIP latency tombolo"), "{}", text(&output.stderr));
}

#[test]
fn canary_driver_without_a_machine_to_measure_to_fails() {
    let place = Place::new("apart-none");
    // Port 9 of this machine, where nothing listens.
    let output = place.run("--peer 127.0.0.1:9 --transport tcp --test latency --size 64 --seconds 0.02 --runs 1");
    assert!(!output.status.success(), "{}", text(&output.stdout));
    assert!(text(&output.stderr).contains("connecting to the other machine"), "{}", text(&output.stderr));
}

/// A driver from the network may ask for measurements, and for nothing else.
#[test]
fn canary_driver_from_elsewhere_gets_no_command_run() {
    let place = Place::new("apart-run");
    let (_right, address) = serve(&place, "");
    let connect = |kind: &[u8]| {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(kind).unwrap();
        stream
    };
    let mut orders = connect(b"O");
    let _cord = connect(b"C");
    let made = place.0.join("made");
    writeln!(orders, "{}", serde_json::json!({ "Run": ["touch", made] })).unwrap();
    let answer = BufReader::new(orders).lines().next().unwrap().unwrap();
    assert!(answer.contains("no commands from another machine"), "{answer}");
    assert!(!made.exists());
}
