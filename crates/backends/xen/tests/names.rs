// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Names that the broker of dom0 publishes, over the simulated Xen: which domains may reach which by them, and the
//! handling of stale, foreign or garbage entries.

use std::collections::BTreeMap;

use tombolo_domain::{Endpoint, Error, Liveness, Rendezvous, Result, wait_readable};
use tombolo_domain_xen::{FakeXen, State, View, Views, XenHost};
use tombolo_testing::conformance::{self, accept, eventually, patience};

/// Returns every domain's view of every other: `rules` lists who may connect to which service of whom.
fn views(domains: &[(u16, &str, State)], rules: &[(&str, &str, &str)]) -> Views {
    let may = |from: &str, to: &str| {
        let allowed = rules.iter().filter(|rule| (rule.0, rule.1) == (from, to));
        allowed.map(|rule| rule.2.parse().unwrap()).collect::<Vec<_>>()
    };
    let told = |name: &str| {
        let others = domains.iter().map(|(id, other, state)| {
            let (ours, theirs) = (may(other, name), may(name, other));
            (*id, View { name: other.parse().unwrap(), state: *state, ours, theirs })
        });
        others.filter(|(_, view)| !view.ours.is_empty() || !view.theirs.is_empty()).collect::<BTreeMap<_, _>>()
    };
    domains.iter().map(|(id, name, _)| (*id, (name.parse().unwrap(), told(name)))).collect()
}

const BOTH: [(u16, &str, State); 2] = [(5, "left", State::Running), (7, "right", State::Running)];
const RULES: [(&str, &str, &str); 1] = [("left", "right", "file*")];

/// Returns domains 5, `left`, and 7, `right`, and their broker. The first may connect to the other's files.
fn world() -> (FakeXen, XenHost) {
    let xen = FakeXen::new();
    BOTH.iter().for_each(|(id, name, _)| xen.name(*id, name));
    let mut host = xen.host().expect("dom0");
    host.publish_views(&views(&BOTH, &RULES)).expect("dom0 may");
    (xen, host)
}

/// Returns both endpoints of a connection from domain 5 to the service `file` of domain 7.
fn join(xen: &FakeXen) -> [Box<dyn Endpoint>; 2] {
    let (left, right) = (xen.domain(5).names(), xen.domain(7).names());
    let mut listener = right.listen("right/file").expect("free");
    let mut called = left.connect("right/file", patience()).expect("somebody listens");
    called.send(b"hello", None).expect("there is room");
    let mut accepted = accept(&mut *listener);
    assert_eq!(conformance::receive(&mut *accepted, patience()).expect("sent").message, b"hello");
    accepted.send(b"welcome", None).expect("there is room");
    assert_eq!(conformance::receive(&mut *called, patience()).expect("sent").message, b"welcome");
    [called, accepted]
}

fn refused(result: Result<Box<dyn Endpoint>>) -> Error {
    result.map(drop).expect_err("it was let in")
}

#[test]
fn x20_name_leads_to_the_domain_that_has_it() {
    let (xen, _host) = world();
    let [called, accepted] = join(&xen);
    assert_eq!((called.peer().domain.as_str(), accepted.peer().domain.as_str()), ("7", "5"));
    assert_eq!([called.liveness(), accepted.liveness()], [Liveness::Running; 2]);
}

#[test]
fn x20_what_no_rule_allows_has_no_door_and_an_error_that_says_so() {
    let (xen, _host) = world();
    xen.name(9, "third");
    let (left, right) = (xen.domain(5).names(), xen.domain(7).names());
    let mut file = right.listen("file").expect("free");
    let _secret = right.listen("secret").expect("free");
    assert!(matches!(refused(left.connect("right/secret", patience())), Error::Denied(_)));
    // Nor does it help to know the number: there is no listener page.
    assert!(matches!(refused(xen.domain(5).connect("7/secret", patience())), Error::NotFound(_)));
    assert!(matches!(refused(xen.domain(9).connect("7/file", patience())), Error::NotFound(_)));
    // The other way round no rule allows anything.
    let _back = left.listen("file").expect("free");
    assert!(matches!(refused(right.connect("left/file", patience())), Error::Denied(_)));
    // A domain without published names gets an error that says what to do.
    let nothing = refused(xen.domain(9).names().connect("right/file", patience()));
    let why = std::error::Error::source(&nothing).expect("a reason").to_string();
    assert!(why.contains("[xen]") && why.contains("xen:DOMID"), "{why}");
    let unknown = refused(left.connect("middle/file", patience()));
    assert!(matches!(&unknown, Error::NotFound(what) if what.contains("[[allow]]")), "{unknown}");
    assert!(file.accept().expect("it listens").is_none());
}

#[test]
fn x20_listener_has_a_door_for_who_comes_later_and_none_for_who_may_no_more() {
    let (xen, mut host) = world();
    let mut listener = xen.domain(7).names().listen("file").expect("free");
    let all = [BOTH[0], BOTH[1], (9, "third", State::Running)];
    xen.name(9, "third");
    assert!(matches!(refused(xen.domain(9).names().connect("right/file", patience())), Error::Os { .. }));
    host.publish_views(&views(&all, &[("third", "right", "*")])).expect("dom0 may");
    assert!(wait_readable(listener.fd(), patience()).expect("polling works"), "a change is not told");
    eventually("the new listener page is there", || {
        listener.accept().expect("it listens");
        xen.domain(9).names().connect("right/file", patience()).is_ok()
    });
    assert!(matches!(refused(xen.domain(5).names().connect("right/file", patience())), Error::NotFound(_)));
    assert!(
        matches!(refused(xen.domain(5).connect("7/file", patience())), Error::NotFound(_)),
        "the old listener page stands"
    );
}

#[test]
fn x20_folder_is_its_domains_to_read_and_nobodys_to_write() {
    let (xen, _host) = world();
    let path = "/local/domain/5/tombolo/7";
    assert!(xen.node(5, path).expect("its own").starts_with("1 right running "));
    assert_eq!(xen.node(7, path), None, "another domain reads it");
    for (id, path) in [(5, path), (7, path), (5, "/local/domain/5/tombolo/9"), (5, "/local/domain/5/tombolo")] {
        let written = std::panic::catch_unwind(|| xen.write_node(id, path, "1 right running"));
        assert!(written.is_err(), "domain {id} writes {path}");
    }
}

#[test]
fn x20_records_that_make_no_sense_are_passed_over_and_cleaned_up() {
    let (xen, host) = world();
    let record = xen.node(5, "/local/domain/5/tombolo/7").expect("told");
    drop(host);
    for (node, value) in [
        ("9", "garbage"),
        ("99999", record.as_str()),
        ("07", &record),
        ("5", &record),
        ("alive", "4294967296"),
        ("self", "-"),
        ("8", "1 right running 0 0\n"),
    ] {
        xen.write_node(0, &format!("/local/domain/5/tombolo/{node}"), value);
    }
    let left = xen.domain(5).names();
    let _listener = xen.domain(7).names().listen("file").expect("free");
    let link = left.connect("right/file", patience()).expect("the one record that is sound is believed");
    assert_eq!(link.liveness(), Liveness::Unknown, "no broker lives");
    // Where two domains have one name, it stands for neither.
    xen.write_node(0, "/local/domain/5/tombolo/8", &record);
    eventually("the name is nobody's", || matches!(left.connect("right/file", patience()), Err(Error::NotFound(_))));
    let mut host = xen.host().expect("dom0");
    host.publish_views(&views(&BOTH, &RULES)).expect("dom0 may");
    for node in ["8", "9"] {
        assert_eq!(xen.node(5, &format!("/local/domain/5/tombolo/{node}")), None);
    }
    eventually("the name is right's again", || left.connect("right/file", patience()).is_ok());
}

#[test]
fn x21_number_that_another_domain_has_by_now_leads_nowhere() {
    let (xen, host) = world();
    // No broker reports the end of the one, nor that another has its number.
    drop(host);
    xen.destroy(7);
    xen.name(7, "impostor");
    let _anybody = xen.domain(7).listen("5/file").expect("free");
    assert!(xen.node(5, "/local/domain/5/tombolo/7").is_some(), "the record is stale, as it should be here");
    assert!(matches!(refused(xen.domain(5).names().connect("right/file", patience())), Error::NotFound(_)));
    assert!(xen.domain(5).connect("7/file", patience()).is_ok(), "by its number it is reached");
    // The other way round: a listener that knows of `left` does not listen to another domain that has its number.
    let (xen, host) = world();
    let mut listener = xen.domain(7).names().listen("file").expect("free");
    drop(host);
    xen.destroy(5);
    xen.name(5, "impostor");
    assert!(matches!(refused(xen.domain(5).connect("7/file", patience())), Error::NotFound(_)));
    assert!(listener.accept().expect("it listens").is_none());
    // A broker that begins publishes the right names.
    let mut host = xen.host().expect("dom0");
    let domains = host.domains().expect("XenStore answers");
    assert_eq!(domains, [(5, "impostor".to_owned()), (7, "right".to_owned())].into());
    host.publish_views(&views(&[BOTH[1]], &[])).expect("dom0 may");
    assert_eq!(xen.node(7, "/local/domain/7/tombolo/5"), None);
}

#[test]
fn x21_numbers_outlive_the_broker_and_change_with_a_domain() {
    let (xen, mut host) = world();
    let told =
        |xen: &FakeXen| [(5, 7), (7, 5)].map(|(id, of)| xen.node(id, &format!("/local/domain/{id}/tombolo/{of}")));
    let first = told(&xen);
    let numbers = |record: &Option<String>| {
        let record = record.as_ref().expect("told");
        let line = record.lines().next().expect("a head");
        line.split(' ').skip(3).map(str::to_owned).collect::<Vec<_>>()
    };
    let [here, there] = [numbers(&first[0]), numbers(&first[1])];
    assert_eq!((&here[0], &here[1]), (&there[1], &there[0]));
    assert_ne!(here[0], here[1]);
    host.publish_views(&views(&BOTH, &RULES)).expect("dom0 may");
    assert_eq!(told(&xen), first);
    drop(host);
    let mut host = xen.host().expect("dom0");
    host.publish_views(&views(&BOTH, &RULES)).expect("dom0 may");
    assert_eq!(told(&xen), first, "a broker that begins anew makes others of them");
    // The same number and the same name, but another domain, between two looks.
    xen.destroy(7);
    xen.name(7, "right");
    assert!(host.changed().expect("XenStore answers"));
    host.domains().expect("XenStore answers");
    host.publish_views(&views(&BOTH, &RULES)).expect("dom0 may");
    let second = told(&xen);
    assert_ne!(numbers(&second[0]), here);
    assert_eq!(numbers(&second[0])[0], numbers(&second[1])[1]);
}

#[test]
fn x22_paused_peer_is_said_to_be_and_a_dead_broker_says_nothing() {
    let (xen, mut host) = world();
    let [called, accepted] = join(&xen);
    let paused = [BOTH[0], (7, "right", State::Paused)];
    host.publish_views(&views(&paused, &RULES)).expect("dom0 may");
    eventually("right is paused", || called.liveness() == Liveness::Paused);
    assert_eq!(accepted.liveness(), Liveness::Running, "left is not");
    host.publish_views(&views(&BOTH, &RULES)).expect("dom0 may");
    eventually("right runs", || called.liveness() == Liveness::Running);
    host.publish_views(&views(&paused, &RULES)).expect("dom0 may");
    eventually("right is paused", || called.liveness() == Liveness::Paused);
    drop(host);
    assert_eq!([called.liveness(), accepted.liveness()], [Liveness::Unknown; 2], "a dead broker is believed");
    let mut host = xen.host().expect("dom0");
    host.publish_views(&views(&BOTH, &RULES)).expect("dom0 may");
    eventually("right runs", || called.liveness() == Liveness::Running);
    xen.destroy(7);
    eventually("right is gone", || called.liveness() == Liveness::DomainGone);
}

#[test]
fn x22_dom0_itself_is_told_without_a_page() {
    let xen = FakeXen::new();
    xen.name(7, "right");
    let mut host = xen.host().expect("dom0");
    let both = [(0, "host", State::Running), BOTH[1]];
    let rules = [("host", "right", "*"), ("right", "host", "log")];
    host.publish_views(&views(&both, &rules)).expect("dom0 may");
    let (dom0, right) = (xen.domain(0).names(), xen.domain(7).names());
    let mut listener = dom0.listen("host/log").expect("free");
    assert!(matches!(dom0.listen("Domain-0/log"), Err(Error::BadService { .. })));
    let called = right.connect("host/log", patience()).expect("somebody listens");
    let accepted = accept(&mut *listener);
    assert_eq!([called.liveness(), accepted.liveness()], [Liveness::Running; 2]);
    assert_eq!(xen.node(0, "/local/domain/0/tombolo/alive"), None);
    drop(host);
    assert_eq!([called.liveness(), accepted.liveness()], [Liveness::Unknown; 2]);
}

#[test]
fn x22_broker_leaves_no_page_and_nothing_of_a_domain_that_went() {
    let (xen, mut host) = world();
    assert_eq!(xen.grants(), 2, "a page for each domain");
    xen.destroy(7);
    assert!(host.changed().expect("XenStore answers"));
    assert_eq!(host.domains().expect("XenStore answers").keys().copied().collect::<Vec<_>>(), [5]);
    host.publish_views(&views(&BOTH[..1], &[])).expect("dom0 may");
    assert_eq!((xen.grants(), xen.node(5, "/local/domain/5/tombolo/7")), (1, None));
    // The domain went while its names were being written, and the write made its folder anew.
    xen.name(7, "right");
    host.domains().expect("XenStore answers");
    xen.destroy(7);
    host.publish_views(&views(&BOTH, &RULES)).expect("dom0 may");
    assert!(xen.node(0, "/local/domain/7/tombolo/5").is_some());
    host.domains().expect("XenStore answers");
    assert_eq!(xen.node(0, "/local/domain/7"), None, "a folder is left of a domain that is no more");
    host.publish_views(&Views::new()).expect("dom0 may");
    assert_eq!((xen.grants(), xen.node(5, "/local/domain/5/tombolo")), (0, None));
}

#[test]
fn x22_broker_hears_who_comes_goes_is_renamed_and_who_had_a_channel() {
    let (xen, mut host) = world();
    host.domains().expect("XenStore answers");
    while host.changed().expect("XenStore answers") {}
    assert!(!host.has_listeners(), "nobody had a channel");
    xen.name(9, "third");
    assert!(wait_readable(host.fd(), patience()).expect("polling works") && host.changed().expect("XenStore answers"));
    assert_eq!(host.domains().expect("XenStore answers")[&9], "third");
    host.changed().expect("XenStore answers");
    xen.name(9, "fourth");
    assert!(wait_readable(host.fd(), patience()).expect("polling works") && host.changed().expect("XenStore answers"));
    assert_eq!(host.domains().expect("XenStore answers")[&9], "fourth");
    let _links = join(&xen);
    assert!(!host.changed().expect("XenStore answers"), "a channel is no domain");
    assert!(host.has_listeners(), "somebody had a channel");
    assert!(matches!(xen.host(), Err(Error::InUse(_))), "two brokers");
}
