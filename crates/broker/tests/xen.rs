// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The broker in dom0, over the simulated Xen and with a toolstack that is a script.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, time::Duration};

use tombolo_broker::{config::Config, xen::names::XenThread};
use tombolo_domain::{Deadline, Liveness, Rendezvous};
use tombolo_domain_xen::FakeXen;
use tombolo_testing::conformance::eventually;

/// Makes a configuration with these rules, and with an `xl` that prints the contents of `list`.
fn config(folder: &Path, rules: &str) -> Config {
    let xl = folder.join("xl");
    fs::write(&xl, format!("#!/bin/sh\ntest \"$1\" = list && exec cat {}\n", folder.join("list").display())).unwrap();
    fs::set_permissions(&xl, fs::Permissions::from_mode(0o755)).unwrap();
    let text = format!("[xen]\ndomains = [\"left\", \"right\"]\nxl = {:?}\n{rules}", xl.display().to_string());
    Config::parse(Path::new("t.toml"), &text).expect("sound")
}

/// Sets what `xl list` prints, atomically.
fn list(folder: &Path, right: &str) {
    let text = format!("Domain-0 0 2048 2 r----- 9.0\nleft 5 384 1 -b---- 1.0\nright 7 384 1 {right} 1.0\n");
    fs::write(folder.join("new"), text).unwrap();
    fs::rename(folder.join("new"), folder.join("list")).unwrap();
}

const RULE: &str = "[[allow]]\nfrom = \"left\"\nto = \"right\"\nservice = \"file\"\n";

#[test]
fn x22_broker_tells_names_lives_and_new_rules_and_breaks_nothing_when_it_ends() {
    let (xen, folder) = (FakeXen::new(), tempfile::tempdir().unwrap());
    list(folder.path(), "-b----");
    [(5, "left"), (7, "right")].iter().for_each(|(id, name)| xen.name(*id, name));
    let mut herald = XenThread::default();
    let dom0 = xen.clone();
    herald.settle_on(&config(folder.path(), RULE), move || dom0.host()).expect("there is room for a thread");
    let (left, right) = (xen.domain(5).names(), xen.domain(7).names());
    eventually("names are told", || left.are_published().unwrap() && right.are_published().unwrap());
    let mut listener = right.listen("file").expect("free");
    let deadline = || Deadline::after(Duration::from_secs(30));
    // A listener learns of new rules and domains through its descriptor, and opens listener pages when it is asked for
    // callers.
    let (mut connected, mut accepted) = (None, Vec::new());
    eventually("right is told", || {
        accepted.extend(listener.accept().expect("it listens"));
        connected = connected.take().or_else(|| left.connect("right/file", deadline()).ok());
        !accepted.is_empty()
    });
    let connected = connected.expect("somebody listens");
    eventually("right runs", || connected.liveness() == Liveness::Running);
    list(folder.path(), "--p---");
    eventually("right is paused", || connected.liveness() == Liveness::Paused);
    fs::remove_file(folder.path().join("list")).unwrap();
    eventually("nobody tells", || connected.liveness() == Liveness::Unknown);
    list(folder.path(), "-b----");
    eventually("right runs", || connected.liveness() == Liveness::Running);

    // A renamed domain is another one; the domain that has the name afterwards is found.
    xen.name(7, "other");
    eventually("right is not there", || left.connect("right/file", deadline()).is_err());
    xen.name(7, "right");
    eventually("right is there, with a new listener page", || {
        accepted.extend(listener.accept().expect("it listens"));
        left.connect("right/file", deadline()).is_ok()
    });

    let dom0 = xen.clone();
    herald.settle_on(&config(folder.path(), ""), move || dom0.host()).expect("there is a thread");
    eventually("left may no more", || left.connect("right/file", deadline()).is_err());
    assert_eq!(connected.liveness(), Liveness::Unknown, "nothing is told of a domain with which nothing is allowed");
    let dom0 = xen.clone();
    herald.settle_on(&config(folder.path(), RULE), move || dom0.host()).expect("there is a thread");
    eventually("left may again, and right has a listener page for it", || {
        accepted.extend(listener.accept().expect("it listens"));
        left.connect("right/file", deadline()).is_ok()
    });
    eventually("right runs", || connected.liveness() == Liveness::Running);
    drop(herald);
    assert_eq!(connected.liveness(), Liveness::Unknown);
    assert!(left.connect("right/file", deadline()).is_ok(), "names went with the broker");
}

#[test]
fn x22_broker_that_is_not_in_dom0_says_so_and_ends_when_it_is_told_to() {
    let (xen, folder) = (FakeXen::new(), tempfile::tempdir().unwrap());
    let mut herald = XenThread::default();
    let first = xen.host().expect("dom0");
    let dom0 = xen.clone();
    // Another process is the broker; once that is gone, this one is.
    herald.settle_on(&config(folder.path(), ""), move || dom0.host()).expect("there is room for a thread");
    drop(first);
    eventually("dom0 is told its name", || xen.node(0, "/local/domain/0/tombolo/self").as_deref() == Some("host"));
    let none = Config::parse(Path::new("t.toml"), "").expect("sound");
    herald.reconcile(&none).expect("nothing to do");
    assert!(xen.host().is_ok(), "the thread is still there");
}
