// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Two network namespaces with real programs in them.
#![allow(unused_macros, reason = "each test uses its part")]

use std::{fs, os::unix::fs::chown, path::PathBuf, process::Command};

use super::{Namespaces, Place, SERVER, Started, has, output, python};

/// Two namespaces, and the place that programs there are started with.
pub struct World {
    pub place: Place,
    pub namespaces: Namespaces,
}

pub const SERVERS: usize = 0;
pub const CLIENTS: usize = 1;

impl World {
    /// Returns `None`, and reports a skip, where something is missing.
    pub fn new(test: &str, needs: &[&str], place: fn() -> Place) -> Option<Self> {
        let namespaces = has(test, &[needs, &["ip", "python3"]].concat()).then(|| Namespaces::new(test)).flatten()?;
        Some(Self { place: place(), namespaces })
    }

    pub fn command(&self, end: usize, words: &[&str]) -> Command {
        let mut command = self.namespaces.bare(end, words[0]);
        command.args(&words[1..]);
        self.place.dress(&mut command);
        command
    }

    /// Starts a server, and returns once it listens at `port`.
    pub fn serve(&self, port: u16, words: &[&str]) -> Started {
        let log = fs::File::create(self.place.path(&format!("server-{port}"))).unwrap();
        let server = Started::new(self.command(SERVERS, words).stderr(log.try_clone().unwrap()).stdout(log));
        self.namespaces.wait_for(port);
        server
    }

    /// Runs a client to its end, which must be successful. Returns what it printed.
    pub fn ask(&self, words: &[&str]) -> String {
        output(&mut self.command(CLIENTS, words), &self.place.path("client"))
    }

    /// Writes a file with this text. Returns its path.
    pub fn file(&self, name: &str, text: &str) -> String {
        fs::write(self.place.path(name), text).unwrap();
        self.text(name)
    }

    /// Gives all files of the place to a user without rights, for programs that do not run as root.
    pub fn give(&self, user: u32) {
        let all = fs::read_dir(self.place.path("")).unwrap().map(|entry| entry.unwrap().path());
        for path in all.chain([self.place.path("")]) {
            chown(&path, Some(user), Some(user)).unwrap();
        }
    }

    pub fn text(&self, name: &str) -> String {
        self.place.path(name).to_str().unwrap().to_owned()
    }
}

/// Returns the path of a script in `programs`.
pub fn script(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/programs").join(name).to_str().unwrap().to_owned()
}

pub fn interpreter() -> String {
    python("").get_program().to_str().unwrap().to_owned()
}

/// Returns the number that a program printed after `label`.
pub fn number_after(text: &str, label: &str) -> u64 {
    let rest = text.split_once(label).unwrap_or_else(|| panic!("no {label:?} in {text}")).1;
    let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or_else(|_| panic!("no number after {label:?} in {text}"))
}

/// Sends streams that must come back unchanged, with one program as the server and the client.
pub fn echo(world: &World, server: &[&str], client: &[&str], len: usize) -> u64 {
    echo_at(world, SERVER, server, client, len)
}

pub fn echo_at(world: &World, address: &str, server: &[&str], client: &[&str], len: usize) -> u64 {
    let bytes = len.to_string();
    let mut server = world.serve(7000, &[server, &["serve", address, "7000"]].concat());
    let said = world.ask(&[client, &["ask", address, "7000", &bytes]].concat());
    assert_eq!(number_after(&said, "whole:"), 4, "{said}");
    server.terminate();
    2 * len as u64
}

/// Declares tests of programs that must only deliver the right data.
macro_rules! correct {
    ($($test:ident, $needs:expr, $run:ident;)*) => {
        $(#[test]
        fn $test() {
            if let Some(world) = World::new(stringify!($test), &$needs, Place::new) {
                $run(&world);
            }
        })*
    };
}

/// Declares tests of programs whose bytes must go through shared memory, and a canary for all of them.
macro_rules! accelerated {
    ($($test:ident, $needs:expr, $run:ident;)*) => {
        $(#[test]
        fn $test() {
            let Some(world) = World::new(stringify!($test), &$needs, Place::new) else { return };
            let payload = $run(&world);
            world.place.accelerated(payload).unwrap();
        })*

        #[test]
        fn canary_library_that_does_nothing_fails_the_share_of_every_program() {
            let test = "canary_library_that_does_nothing_fails_the_share_of_every_program";
            $(if let Some(world) = World::new(test, &[&$needs[..], &["cc"]].concat(), Place::idle) {
                let payload = $run(&world);
                assert!(world.place.accelerated(payload).is_err(), stringify!($run));
            })*
        }
    };
}
