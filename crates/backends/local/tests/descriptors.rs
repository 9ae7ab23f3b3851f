// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A listener whose process has no descriptor left. The limit is the whole process's, so the test has a program of its
//! own.

use std::fs::File;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tombolo_domain::{Deadline, Error, Liveness, Rendezvous, wait_readable};
use tombolo_domain_local::LocalDomain;

#[test]
fn l12_callers_beyond_the_limit_of_descriptors_are_turned_away_and_the_door_is_quiet_then() {
    let folder = tempfile::tempdir().unwrap();
    let domain = LocalDomain::in_folder(folder.path());
    let mut listener = domain.listen("crowded").unwrap();
    let callers: Vec<_> = (0..3).map(|_| domain.connect("crowded", Deadline::NEVER).unwrap()).collect();

    let limit = Rlimit { current: Some(64), maximum: getrlimit(Resource::Nofile).maximum };
    setrlimit(Resource::Nofile, limit).unwrap();
    let full: Vec<_> = std::iter::from_fn(|| File::open("/dev/null").ok()).collect();
    assert!(!full.is_empty());
    for caller in &callers {
        assert!(wait_readable(listener.fd(), Deadline::NOW).unwrap());
        let refused = listener.accept().map(drop);
        assert!(matches!(refused, Err(Error::Limit { .. })), "{refused:?}");
        assert_eq!(caller.liveness(), Liveness::ProcessGone);
    }
    assert!(!wait_readable(listener.fd(), Deadline::NOW).unwrap(), "nobody is left waiting");
    assert!(listener.accept().unwrap().is_none());

    drop(full);
    let late = domain.connect("crowded", Deadline::NEVER).unwrap();
    assert!(listener.accept().unwrap().is_some());
    drop(late);
}
