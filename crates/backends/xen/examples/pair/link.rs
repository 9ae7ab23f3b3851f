// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The agent, and how the tests reach it.

use std::{
    net::{TcpListener, TcpStream},
    process::Command,
    sync::Arc,
    thread,
};

use tombolo_domain::{Deadline, Endpoint, Listener, Rendezvous, Result};
use tombolo_domain_xen::XenDomain;
use tombolo_testing::conformance::remote::{Remote, serve as work};

/// A domain that puts the other's number in front of each name: the suite has one text for both.
#[derive(Debug)]
pub struct Side {
    pub domain: XenDomain,
    pub other: u16,
}

impl Side {
    pub fn new(other: &str) -> Self {
        Self { domain: XenDomain::new(), other: other.parse().expect("the number of a domain") }
    }

    fn service(&self, name: &str) -> String {
        format!("{}/{name}", self.other)
    }
}

impl Rendezvous for Side {
    fn scheme(&self) -> &'static str {
        self.domain.scheme()
    }

    fn listen(&self, name: &str) -> Result<Box<dyn Listener>> {
        self.domain.listen(&self.service(name))
    }

    fn connect(&self, name: &str, deadline: Deadline) -> Result<Box<dyn Endpoint>> {
        self.domain.connect(&self.service(name), deadline)
    }
}

/// Serves for ever.
pub fn serve(address: &str, other: &str) -> bool {
    let listener = TcpListener::bind(address).expect("the address is free");
    println!("ready");
    for stream in listener.incoming() {
        let stream = stream.expect("the listener works");
        let other = other.to_owned();
        thread::spawn(move || {
            let backend = Arc::new(Side::new(&other));
            let answers = stream.try_clone().expect("there are descriptors");
            stream.set_nodelay(true).expect("it is TCP");
            let cast = move |role: &str, service: &str| {
                let mut command = Command::new("/proc/self/exe");
                command.args(["actor", role, service, &other]);
                command
            };
            if let Err(error) = work(stream, answers, backend, cast) {
                eprintln!("a connection failed: {error}");
            }
        });
    }
    false
}

/// The agent's backend.
pub fn reach(address: &str) -> Remote {
    let stream = TcpStream::connect(address).expect("the agent is there");
    stream.set_nodelay(true).expect("it is TCP");
    Remote::new("xen", stream.try_clone().expect("there are descriptors"), stream)
}
