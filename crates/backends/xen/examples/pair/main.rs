// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two Xen domains put to the test, with this program in both: in one it is the *agent*, in the other it runs tests.
//!
//! ```text
//! pair agent ADDRESS OTHER            serves whoever connects to ADDRESS; OTHER is the number of the other domain
//! pair suite ADDRESS OTHER [WORD...]  the conformance suite against the agent, each side listening once
//! pair hostile ADDRESS OTHER [WORD..] what hostile peers do, done by the agent's domain to this one
//! pair deaths ADDRESS OTHER COUNT     kills COUNT processes of the agent's domain, each at another moment under load
//! pair outlive ROLE OTHER SERVICE     meets all those whom `kill` kills, in the other domain
//! pair kill ROLE OTHER SERVICE EVERY  kills a caller or listener at every so many stops between two steps of connect
//! pair open ADDRESS OTHER COUNT RING  that many channels at once, and how fast they open
//! pair doorbell ADDRESS OTHER COUNT       round trips of an event channel: to a waiter, and through a thread to a waiter
//! ```
//! It prints what libtest prints, and fails if a test does.

mod actors;
mod deaths;
mod doorbell;
mod link;
mod many;
mod steps;
mod tests;

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let passed = match words.as_slice() {
        ["agent", address, other] => link::serve(address, other),
        ["suite", address, other, words @ ..] => tests::suite(address, other, words),
        ["hostile", address, other, words @ ..] => tests::hostile(address, other, words),
        ["deaths", address, other, count] => deaths::run(address, other, count.parse().expect("a number")),
        ["open", address, other, count, ring] => {
            many::run(address, other, count.parse().expect("a number"), ring.parse().expect("a number"))
        }
        ["doorbell", address, other, count] => doorbell::run(address, other, count.parse().expect("a number")),
        ["outlive", role, other, service] => steps::outlive(role, other, service),
        ["kill", role, other, service, every] => steps::kill(role, other, service, every.parse().expect("a number")),
        ["step", role, other, service, word] => steps::step(role, other, service, word),
        ["actor", role, service, other] => actors::play(role, service, other),
        _ => {
            eprintln!("usage: see the first lines of this program");
            false
        }
    };
    if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
