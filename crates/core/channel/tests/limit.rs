// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A listener at the limit of open files (C-7). The limit is the process's, so the test is alone in its binary.

mod common;

use std::fs::File;

use common::{World, eventually, raw};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tombolo_channel::Stream;
use tombolo_domain::Error as DomainError;
use tombolo_layout::handshake::Message;

#[test]
fn c7_silent_callers_make_room_for_one_who_speaks_where_no_file_is_left() {
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..before }).unwrap();
    let world = World::local();
    let mut listener = world.listen::<Stream>();
    let mut silent: Vec<_> = (0..30).map(|_| world.connect_raw()).collect();
    assert!(listener.try_accept().unwrap().is_none());
    let mut honest = world.connect_raw();
    let _kept = raw::send_with_segment(&mut *honest, &Message::Hello(raw::greeting()).encode(), 0);
    let mut rest: Vec<File> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    let mut channel = None;
    eventually("the one who speaks is served", || {
        channel = listener.try_accept().unwrap();
        channel.is_some()
    });
    rest.clear();
    assert!(matches!(raw::receive_message(&mut *honest), Ok(Message::Welcome(_))));
    eventually("the longest silent went", || matches!(silent[0].recv(0), Err(DomainError::PeerGone)));
    assert!(matches!(silent[29].recv(0), Ok(None)), "and the others did not");
}
