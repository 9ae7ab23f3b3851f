// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tombolo ls`: what it shows of programs that know nothing of it.

mod common;

use std::{
    fs,
    io::{Read, Write},
    os::unix::process::CommandExt,
    process::Stdio,
    thread,
};

use common::{Place, Running, wait_until};
use rustix::process::Signal;
use serde_json::Value;
use tombolo::{Options, Stream};

/// Returns the JSON output of `ls` about this place.
fn ls(place: &Place) -> Vec<Value> {
    let folder = place.path("").display().to_string();
    let out = Running::start(&["ls", "--json", "--folder", &folder], |_| {}).end().expect(0).out;
    let lines = String::from_utf8(out).unwrap();
    lines.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

/// Returns the only row of a type at this place.
fn only(place: &Place, what: &str) -> Option<Value> {
    let here = |line: &Value| line["type"] == what && line["address"].as_str() == Some(place.address().as_str());
    let mut found: Vec<_> = ls(place).into_iter().filter(here).collect();
    assert!(found.len() <= 1, "{found:?}");
    found.pop()
}

/// Returns the channel, once `is` holds for it.
fn channel(place: &Place, what: &str, mut is: impl FnMut(&Value) -> bool) -> Value {
    let mut seen = None;
    wait_until(what, || {
        seen = only(place, "channel");
        seen.as_ref().is_some_and(&mut is)
    });
    seen.unwrap()
}

fn summary(place: &Place) -> Value {
    ls(place).pop().filter(|line| line["type"] == "summary").expect("the last line is a summary")
}

#[test]
fn b20_channels_to_machines_and_listeners_for_them_are_shown_with_what_the_broker_tells() {
    let place = Place::new();
    let broker = common::broker::of_web(&place);
    let folder = place.path("").display().to_string();
    let told = |option: &[&str]| {
        let words = [&["ls", "--folder", &folder], option].concat();
        let out = Running::start(&words, |command| _ = command.env("TOMBOLO_BROKER", &broker)).end().expect(0).out;
        String::from_utf8(out).unwrap()
    };
    let lines: Vec<Value> = told(&["--json"]).lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    let find = |what: &str, address: &str| {
        let found = lines.iter().find(|line| line["type"] == what && line["address"] == address);
        found.unwrap_or_else(|| panic!("no {what} {address}: {lines:?}")).clone()
    };
    let channel = find("channel", "vm:db/sql");
    let machine = &channel["machine"];
    assert_eq!((&machine["name"], &machine["link"], &machine["storms"]), (&"db".into(), &7.into(), &4.into()));
    let listener = find("listener", "vm:web/log");
    assert_eq!(listener["pid"].as_u64(), Some(std::process::id().into()));
    let text = told(&[]);
    assert!(text.contains("vm:db/sql") && text.contains("vm:web/log"), "{text}");
}

#[test]
fn channel_is_shown_with_both_ends_and_what_they_counted() {
    let place = Place::new();
    let mut listener = place.listen("--ring 64KiB");
    let mut connector = place.connect("--ring 8KiB");
    connector.child.stdin.as_mut().unwrap().write_all(&[7; 5000]).unwrap();
    listener.child.stdout.as_mut().unwrap().read_exact(&mut [0; 5000]).unwrap();

    let asleep = |channel: &Value| {
        channel["pipes"].as_array().is_some_and(|pipes| pipes.iter().all(|pipe| pipe["reader"]["asleep"] == true))
    };
    let channel = channel(&place, "a channel whose readers sleep", asleep);
    assert_eq!((&channel["state"], &channel["mode"]), (&"open".into(), &"stream".into()));
    let [listened, connected] = [0, 1].map(|end| &channel["ends"][end]);
    assert_eq!((listened["pid"].as_u64(), &listened["listened"]), (Some(listener.child.id().into()), &true.into()));
    assert_eq!((connected["pid"].as_u64(), &connected["listened"]), (Some(connector.child.id().into()), &false.into()));
    assert!([listened, connected].iter().all(|end| end["command"] == "tombolo" && end["user"].is_string()));
    assert_eq!(channel["memory"], 4096 + (64 << 10) + 4096 + (8 << 10));
    assert!(channel["age"].as_f64().is_some_and(|age| (0.0..60.0).contains(&age)), "{}", channel["age"]);

    let [there, back] = [0, 1].map(|pipe| &channel["pipes"][pipe]);
    assert_eq!((&there["ring"], &there["bytes"], &there["fill"]), (&(64 << 10).into(), &0.into(), &0.into()));
    assert_eq!((&back["ring"], &back["bytes"], &back["fill"]), (&(8 << 10).into(), &5000.into(), &0.into()));
    assert!(back["reader"]["counters"]["sleeps"].as_u64() >= Some(1), "{back}");
    assert!(back["reader"]["counters"]["calls"].as_u64() >= Some(1), "{back}");
    assert_eq!(back["writer"]["phase"], "open");

    let text = String::from_utf8(Running::start(&["ls"], |_| {}).end().expect(0).out).unwrap();
    let header = text.lines().position(|line| line.starts_with(&place.address())).expect(&text);
    let shown: Vec<_> = text.lines().skip(header).take(7).collect();
    assert!(shown[0].contains("  open  stream  ") && shown[0].contains("memory 80.0 KiB"), "{text}");
    assert!(shown[4].contains("ring 8.00 KiB  fill 0 B  written 4.88 KiB"), "{text}");
    drop(connector.child.stdin.take());
    listener.end().expect(0);
    connector.end().expect(0);
    assert!(only(&place, "channel").is_none(), "nothing is left of it");
}

#[test]
fn c12_ring_that_follows_its_load_is_shown_with_its_target_and_why() {
    let place = Place::new();
    let mut listener = place.listen("--ring 1MiB");
    let mut connector = place.connect("--ring auto");
    connector.child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    listener.child.stdout.as_mut().unwrap().read_exact(&mut [0; 1]).unwrap();
    let channel = channel(&place, "a channel with both ends", |channel| channel["state"] == "open");
    let [there, back] = [0, 1].map(|pipe| &channel["pipes"][pipe]);
    assert!(there["growth"].is_null(), "{there}");
    assert_eq!((&back["ring"], &back["growth"]["reason"]), (&(8 << 10).into(), &"first".into()), "{back}");
    let target = back["growth"]["target"].as_u64().unwrap();
    assert!(target >= 1 << 20, "{back}");
    let text = String::from_utf8(Running::start(&["ls"], |_| {}).end().expect(0).out).unwrap();
    let shown = format!("ring 8.00 KiB of {}.00 MiB (first)  fill", target >> 20);
    assert!(text.contains(&shown), "{text}");
    let text = Running::start(&["top", "--once"], |_| {}).end().expect(0).out;
    let shown = format!("8KiB/{}MiB first", target >> 20);
    assert!(String::from_utf8(text).unwrap().contains(&shown));
}

#[test]
fn states_are_told_apart() {
    let place = Place::new();
    let mut listener = place.listen("");
    let connector = place.connect("").hush();
    channel(&place, "one direction is closed", |channel| channel["state"] == "half_closed");
    listener.signal(Signal::STOP);
    let paused = channel(&place, "an end is stopped", |channel| channel["ends"][0]["paused"] == true);
    assert_eq!(paused["state"], "half_closed", "what is worse is said");
    connector.signal(Signal::KILL);
    let hidden = summary(&place)["hidden"].as_u64() > Some(0);
    let gone = if hidden { "peer_hidden" } else { "peer_gone" };
    let gone = channel(&place, "an end is gone", |channel| channel["state"] == gone);
    assert!(gone["ends"][1].is_null() && gone["pipes"][0]["reader"].is_null() && gone["pipes"][1]["ring"].is_null());
    listener.signal(Signal::CONT);
    drop(listener.child.stdin.take());
    listener.end().expect(0);
}

#[test]
fn stopped_end_of_an_open_channel_is_paused() {
    let place = Place::new();
    let _listener = place.listen("");
    let connector = place.connect("");
    channel(&place, "they have met", |channel| channel["state"] == "open");
    connector.signal(Signal::STOP);
    let paused = channel(&place, "it is paused", |channel| channel["state"] == "paused");
    assert!(paused["ends"][0]["paused"] == false && paused["ends"][1]["paused"] == true, "{paused}");
    connector.signal(Signal::CONT);
    channel(&place, "it goes on", |channel| channel["state"] == "open");
}

#[test]
fn listener_is_shown_with_its_owner_and_a_dead_one_as_stale() {
    let place = Place::new();
    let listener = place.listen("");
    let mut shown = None;
    wait_until("it listens", || {
        shown = only(&place, "listener");
        shown.as_ref().is_some_and(|shown| shown["state"] == "listening")
    });
    let shown = shown.unwrap();
    assert_eq!((shown["pid"].as_u64(), &shown["command"]), (Some(listener.child.id().into()), &"tombolo".into()));
    assert!(shown["user"].is_string());
    drop(listener); // By SIGKILL: its socket stays.
    assert!(place.socket_is_there());
    wait_until("its socket is known to be stale", || {
        only(&place, "listener").is_some_and(|shown| shown["state"] == "stale" && shown["pid"].is_null())
    });
    let folder = place.path("").display().to_string();
    let text = String::from_utf8(Running::start(&["ls", "--folder", &folder], |_| {}).end().expect(0).out).unwrap();
    assert!(text.contains(&format!("{}  stale", place.address())), "{text}");
    fs::remove_file(place.path("socket")).unwrap();
}

/// Both endpoints are in this process, which has several such channels: the stats pages show which two belong together.
#[test]
fn c12_channels_between_the_same_processes_are_told_apart() {
    const ENDS: usize = 4;
    let place = Place::new();
    let address = place.address();
    let mut listener = tombolo::listen_with::<Stream>(&address, &Options::new().ring_size(64 << 10)).unwrap();
    let mut pairs: Vec<(Stream, Stream)> = (0..ENDS)
        .map(|_| {
            thread::scope(|scope| {
                let client = scope.spawn(|| tombolo::connect(&address).unwrap());
                (listener.accept().unwrap(), client.join().unwrap())
            })
        })
        .collect();
    for (index, (server, client)) in pairs.iter_mut().enumerate() {
        client.write_all(&vec![1; 1000 * (index + 1)]).unwrap();
        // The bytes that were read are handed back once there is nothing more.
        server.read_exact(&mut vec![0; 1000 * (index + 1)]).unwrap();
        assert_eq!(server.split().0.try_read(&mut [0]).unwrap(), None);
        client.write_all(&vec![1; index + 1]).unwrap();
    }
    // The last one moves to a larger ring.
    let (server, client) = &mut pairs[ENDS - 1];
    server.split().1.resize(256 << 10).unwrap();
    wait_until("the ring is changed", || {
        server.write_all(&[2; 10]).unwrap();
        client.read_exact(&mut [0; 10]).unwrap();
        !server.split().1.is_moving()
    });

    let here = |line: &Value| line["type"] == "channel" && line["address"] == address.as_str();
    let mut seen: Vec<_> = ls(&place).into_iter().filter(here).collect();
    seen.sort_by_key(|channel| channel["pipes"][1]["bytes"].as_u64());
    assert_eq!(seen.len(), ENDS, "{seen:?}");
    for (index, channel) in seen.iter().enumerate() {
        let from_client = &channel["pipes"][1];
        assert_eq!(from_client["bytes"], 1001 * (index + 1), "{channel}");
        assert_eq!(from_client["fill"], index + 1, "{channel}");
        assert_eq!(channel["state"], "open");
        let ring = if index + 1 == ENDS { 256 << 10 } else { 64 << 10 };
        assert_eq!(channel["pipes"][0]["ring"], ring, "{channel}");
    }
}

#[test]
fn memory_that_is_no_segment_is_counted_and_harms_nothing() {
    let place = Place::new();
    let _zeros = tombolo_mem::create_sealed("tombolo", 8192).unwrap();
    let _small = tombolo_mem::create_sealed("tombolo:/x\x1b[2J", 4096).unwrap();
    assert!(summary(&place)["broken"].as_u64() >= Some(2));
}

#[test]
fn hostile_names_do_not_reach_the_terminal() {
    let place = Place::new();
    let address = format!("local:{}", place.path("a\x1b[2J\nb").display());
    let words = ["cat", "--listen", &address];
    let _listener = Running::start(&words, |_| {});
    wait_until("it listens", || place.path("a\x1b[2J\nb").exists());
    let folder = place.path("").display().to_string();
    let listed = || Running::start(&["ls", "--folder", &folder], |_| {}).end().expect(0).out;
    assert!(!listed().contains(&0x1b), "of a listener");
    let _connector = Running::start(&["cat", "--connect", &address], |_| {});
    wait_until("they have met", || {
        let text = listed();
        assert!(!text.contains(&0x1b), "of a channel");
        String::from_utf8(text).unwrap().lines().any(|line| line.contains("a?[2J?b  open"))
    });
}

#[test]
fn who_may_see_little_is_told_so() {
    let test = "who_may_see_little_is_told_so";
    if !rustix::process::geteuid().is_root() {
        let _ = writeln!(std::io::stderr(), "SKIP {test} (needs root): only root can become somebody else");
        return;
    }
    let place = Place::new();
    let _listener = place.listen("");
    // A copy that any user can run: the original may be in a folder that others cannot enter.
    let folder = tempfile::Builder::new().permissions(mode(0o755)).tempdir().unwrap();
    let program = folder.path().join("tombolo");
    fs::copy(env!("CARGO_BIN_EXE_tombolo"), &program).unwrap();
    let run = |words: &[&str]| {
        let mut command = std::process::Command::new(&program);
        command.args(words).uid(65534).gid(65534).env_remove("XDG_RUNTIME_DIR").env_remove("TOMBOLO_DIR");
        command.stdin(Stdio::null()).output().unwrap()
    };
    let seen = run(&["ls"]);
    let text = String::from_utf8(seen.stdout.clone()).unwrap();
    assert!(text.contains("processes could not be looked into; root sees all"), "{seen:?}");
    let json = String::from_utf8(run(&["ls", "--json"]).stdout).unwrap();
    let last: Value = serde_json::from_str(json.lines().last().unwrap()).unwrap();
    assert!(last["hidden"].as_u64() >= Some(1), "{last}");
    assert!(!json.contains(&place.address()));
    fs::create_dir(place.path("closed")).unwrap();
    fs::set_permissions(place.path("closed"), mode(0o700)).unwrap();
    let refused = run(&["ls", "--folder", place.path("closed").to_str().unwrap()]);
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && said.contains("cannot look into"), "{said}");
}

fn mode(bits: u32) -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(bits)
}

#[test]
fn bad_options_and_folders_are_one_clear_line() {
    let place = Place::new();
    let missing = place.path("missing").display().to_string();
    let ended = Running::start(&["ls", "--folder", &missing], |_| {}).end();
    ended.expect_failure(2, &["cannot look into", "missing", "No such file"]);
    Running::start(&["ls", "--nonsense"], |_| {}).end().expect(2);
}

#[test]
fn output_that_nobody_reads_is_no_failure() {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    drop(reader);
    let ls = Running::start(&["ls", "--json"], |command| _ = command.stdout(Stdio::from(writer)));
    let ended = ls.end_with_open_input().expect(0);
    assert_eq!(ended.said, "");
}

/// Returns all names of fields, at any depth.
fn fields(value: &Value) -> Vec<String> {
    let deeper = |value: &Value| fields(value);
    match value {
        Value::Object(map) => {
            map.iter().flat_map(|(name, value)| [vec![name.clone()], deeper(value)].concat()).collect()
        }
        Value::Array(list) => list.iter().flat_map(deeper).collect(),
        _ => Vec::new(),
    }
}

#[test]
fn every_field_of_the_json_is_in_the_guide() {
    let guide = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide/operate.md")).unwrap();
    let place = Place::new();
    let _running = (place.listen(""), place.connect(""));
    channel(&place, "they have met", |channel| channel["state"] == "open");
    let _listener = Running::start(&["cat", "--listen", &format!("local:{}", place.path("b").display())], |_| {});
    wait_until("another listens", || place.path("b").exists());
    let listed = ls(&place);
    let top = Running::start(&["top", "--once", "--json", "--interval", "0.1"], |_| {}).end().expect(0).out;
    let top = String::from_utf8(top).unwrap();
    let watched = top.lines().map(|line| serde_json::from_str(line).unwrap());
    let all: Vec<String> = listed.iter().cloned().chain(watched).flat_map(|line| fields(&line)).collect();
    for needed in ["rates", "pipes", "uid", "hidden"] {
        assert!(all.iter().any(|field| field == needed), "{needed}");
    }
    for field in all {
        assert!(guide.contains(&format!("`{field}`")), "the guide says nothing of {field}");
    }
}
