// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Transports that a program adds, as seen by a program of its own: an added transport is known to the whole process.

use tombolo_bench::job::{Mode, Report, Test, Wait};
use tombolo_bench::transport::{self, Card, Context, Namespaces, Transport};
use tombolo_bench::{BenchArgs, Plan, Result};

struct Pigeon;

impl Transport for Pigeon {
    fn card(&self) -> Card {
        Card {
            name: "carrier-pigeon",
            mode: Mode::Message,
            variants: &[""],
            namespaces: Namespaces::Shared,
            tests: &[Test::Latency],
            waits: &[Wait::Sleep],
            size: None,
            rings: false,
        }
    }

    fn perform(&self, _: &mut Context) -> Result<Report> {
        Ok(Report::default())
    }
}

#[test]
fn transport_added_is_last_and_can_be_asked_for() {
    let args = BenchArgs { transports: vec!["carrier-pigeon".into()], ..BenchArgs::default() };
    assert!(Plan::try_from(&args).is_err() && transport::find("carrier-pigeon", Mode::Message).is_err());
    let before = transport::all().len();
    transport::add(Pigeon);
    assert_eq!(transport::all().len(), before + 1);
    assert_eq!(transport::all().last().unwrap().card().name, "carrier-pigeon");
    assert_eq!(Plan::try_from(&args).unwrap().transports.len(), 1);
    assert!(transport::find("carrier-pigeon", Mode::Message).is_ok());
}
